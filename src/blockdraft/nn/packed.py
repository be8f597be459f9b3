"""Linear layers for few rows at a time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` for inference, `[..., in]` to a new tensor `[..., out]`.

    Args:
        weight: `[out, in]`, kept as it is: `weight` and `bias` can be read back.
        bias: `[out]`.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
