"""The engine: one lossless decode loop for all drafters and targets."""

from blockdraft.engine.costs import Costs, load_or_measure
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
    "load_or_measure",
    "loops",
    "mean_tau",
    "merge",
]
