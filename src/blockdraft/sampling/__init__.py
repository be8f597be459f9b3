"""Logits to probabilities, and the only place where tokens are drawn."""

from blockdraft.sampling.drawing import RandomNumbers, best_tokens, draw, exact
from blockdraft.sampling.laws import PART, Laws, Rules
from blockdraft.sampling.probabilities import probabilities

__all__ = ["PART", "Laws", "RandomNumbers", "Rules", "best_tokens", "draw", "exact", "probabilities"]
