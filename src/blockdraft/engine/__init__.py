"""The engine: one decode loop for all drafters and targets."""

from blockdraft.engine.engine import Batch, Completion, Engine
from blockdraft.engine.stats import Stats, mean_tau

__all__ = ["Batch", "Completion", "Engine", "Stats", "mean_tau"]
