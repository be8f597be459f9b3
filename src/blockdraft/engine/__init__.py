"""The engine: one lossless decode loop for all drafters and targets."""

from blockdraft.engine.costs import Costs
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import Chunk, Completion, Request
from blockdraft.engine.stats import Stats, loops, mean_tau, merge

__all__ = [
    "Chunk",
    "Completion",
    "Costs",
    "Engine",
    "Request",
    "Stats",
    "loops",
    "mean_tau",
    "merge",
]
