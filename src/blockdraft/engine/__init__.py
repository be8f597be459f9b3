"""The engine: one decode loop for all drafters and targets."""

from blockdraft.engine.batch import Batch
from blockdraft.engine.costs import Costs
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import Chunk, Completion, Request
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.stats import Stats, loops, mean_tau, merge

__all__ = [
    "Batch",
    "Chunk",
    "Completion",
    "Costs",
    "Engine",
    "Request",
    "Scheduler",
    "Stats",
    "loops",
    "mean_tau",
    "merge",
]
