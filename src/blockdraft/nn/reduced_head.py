"""An output projection over part of the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class ReducedHead:
    """A drafter's own head for the tokens that it can guess; every other token has a logit of minus infinity.

    Args:
        weight: `[Vd, H]`.
        kept: `[Vd]` int64, the target's ids of these tokens, distinct.
        vocab_size: V, of the target.
    """

    def __init__(self, weight: Tensor, kept: Tensor, vocab_size: int) -> None:
        self.weight, self.kept, self.vocab_size = weight, kept, vocab_size

    def to(self, device: torch.device, dtype: torch.dtype) -> ReducedHead:
        return ReducedHead(self.weight.to(device, dtype), self.kept.to(device), self.vocab_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., H]`."""
        logits = F.linear(hidden, self.weight)
        everywhere = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return everywhere.index_copy_(-1, self.kept, logits)
