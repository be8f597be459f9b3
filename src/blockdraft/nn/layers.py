"""Layers of the Qwen3 family, under the names that checkpoints use."""

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
        # In training by autocast the weights are float32 and x may be less.
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
    """What an RMS norm without weight multiplies x `[..., D]` with, `[..., 1]` float32; in fewer operations than
    `F.rms_norm` takes on a CPU."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor: Tensor = size.square_().mul_(1 / x.size(-1)).add_(eps).rsqrt_()
    return factor


def rotate_swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in place; the first half of `sin` is negated, and both have the shape of x, or broadcast to it."""
    swapped = x.roll(x.size(-1) // 2, dims=-1)
    return x.mul_(cos).addcmul_(swapped, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama and Qwen.

    Args:
        x: `[..., N, heads, D]`.
        cos, sin: `[..., N, D]`, the angle's halves repeated.
    """
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(-2) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(-2)
