"""The engine: one decode loop for all drafters and targets."""

from blockdraft.engine.engine import Batch, Chunk, Completion, Engine
from blockdraft.engine.stats import Stats, mean_tau, merge

__all__ = ["Batch", "Chunk", "Completion", "Engine", "Stats", "mean_tau", "merge"]
