"""Layers of draft networks, with the parameter names of checkpoints of the Qwen3 family."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the weights are float32, and x may have a smaller dtype.
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rms_factor(x: Tensor, eps: float) -> Tensor:
    """Return the factor `[..., 1]` float32 of an RMS norm without weight on x `[..., D]`.

    On a CPU it takes fewer operations than `F.rms_norm`.
    """
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor: Tensor = size.square_().mul_(1 / x.size(-1)).add_(eps).rsqrt_()
    return factor


def rotate_swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply `rotate` in place. The first half of `sin` is negated; `cos` and `sin` broadcast to the shape of x."""
    swapped = x.roll(x.size(-1) // 2, dims=-1)
    return x.mul_(cos).addcmul_(swapped, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings in the half-split layout of Llama and Qwen.

    Args:
        x: `[..., N, heads, D]`.
        cos, sin: `[..., N, D]`, each angle once per half.
    """
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(-2) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(-2)


class ReducedHead:
    """Output projection of a drafter with a draft vocabulary. All other tokens have a logit of minus infinity.

    Args:
        weight: `[Vd, H]`.
        kept: `[Vd]` int64, the target's ids of the draft vocabulary, distinct.
        vocab_size: Size V of the target's vocabulary.
    """

    def __init__(self, weight: Tensor, kept: Tensor, vocab_size: int) -> None:
        with torch.device("meta"):
            # A layer with a parameter, which a backend may pack and free.
            self.projection = nn.Linear(weight.size(1), weight.size(0), bias=False)
        self.projection.weight = nn.Parameter(weight, requires_grad=False)
        self.kept, self.vocab_size = kept, vocab_size

    @property
    def weight(self) -> Tensor:
        return self.projection.weight

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, unless a backend has packed and freed it."""
        return sum(parameter.nbytes for parameter in self.projection.parameters())

    def to(self, device: torch.device, dtype: torch.dtype) -> ReducedHead:
        return ReducedHead(self.weight.to(device, dtype), self.kept.to(device), self.vocab_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., H]`."""
        return self.everywhere(self.projection(hidden))

    def everywhere(self, logits: Tensor) -> Tensor:
        """Expand logits `[..., Vd]` of the draft vocabulary to all tokens, `[..., V]`."""
        everywhere = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return everywhere.index_copy_(-1, self.kept, logits)
