"""Linear layers for few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.errors import UsageError

# Multiplies rows `[n, in]` with one weight, into `[n, out]`; both float32, `out` and each row contiguous.
Product = Callable[[Tensor, Tensor], None]


class Kernels(Protocol):
    """What multiplies with weights of which `lanes` output channels lie side by side."""

    @property
    def lanes(self) -> int: ...

    @property
    def weights_dtype(self) -> torch.dtype: ...

    def product(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None, inputs: int, outputs: int) -> Product:
        """The product with one weight.

        Args:
            weight: `[blocks, inputs, lanes]` in `weights_dtype`.
            scale, bias: `[blocks * lanes]` float32, or None.
        """


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` for inference, `[..., in]` to a new tensor `[..., out]`.

    `pack` hands it to compiled kernels, whose sums have the same bits for a row alone and among others.

    Args:
        weight: `[out, in]`; with the bias, it can be read back.
        bias: `[out]`.

    Attributes:
        rounded: How `cuda/rounded.py` has rounded the weight, or None.
    """

    rounded: str | None = None
    bias: Tensor | None
    scale: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        # `[out, in]`; packed `[blocks, in, lanes]`, in which some output channels lie side by side.
        self.stored: Tensor
        self.register_buffer("stored", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("scale", None)  # `[out]`, of an int8 weight
        self._kernels: Kernels | None = None
        self._product: Product | None = None

    @property
    def weight(self) -> Tensor:
        """`[out, in]`; a copy where it is packed or quantised."""
        if self.rounded is not None:
            return self.stored.dequantize()
        weight = self.stored
        if self._kernels is not None:
            weight = weight.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
        return weight.to(self.dtype) if self.scale is None else weight * self.scale.unsqueeze(-1)

    def quantize(self) -> None:
        """Round the weight to int8; inputs are never rounded. Due before `pack`."""
        if self.scale is None:
            assert self._kernels is None
            self.stored, self.scale = int8_rows(self.stored)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, `[...]` int64 to `[..., in]`: an embedding table is a weight too."""
        if self._kernels is None:
            rows = F.embedding(index, self.stored)
        else:
            check_tokens(index, self.out_features)  # beyond them lies padding
            lanes = self.stored.size(2)
            rows = self.stored[index // lanes, :, index % lanes]
        return rows.to(self.dtype) if self.scale is None else rows * self.scale[index].unsqueeze(-1)

    def pack(self, kernels: Kernels) -> Product:
        """Lay the weight out as these kernels want it, and compute with them from now on.

        They were built for the weight's dtype, or for bfloat16 where that rounds no number (`fits_bfloat16`).

        Returns:
            The kernels' product with this weight; valid as long as this layer lives.
        """
        if self._product is None:
            lanes = kernels.lanes
            blocks = -(-self.out_features // lanes)
            padded = F.pad(self.stored.to(kernels.weights_dtype), (0, 0, 0, blocks * lanes - self.out_features))
            self.stored = padded.view(blocks, lanes, self.in_features).transpose(1, 2).contiguous()
            scale, bias = (
                None if each is None else F.pad(each.float(), (0, blocks * lanes - self.out_features)).contiguous()
                for each in (self.scale, self.bias)
            )
            self._kernels = kernels
            self._product = kernels.product(self.stored, scale, bias, self.in_features, self.out_features)
        assert self._kernels is kernels, "packed for other kernels"
        return self._product

    def forward(self, x: Tensor) -> Tensor:
        if self._product is None or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight if self.rounded is None else self.stored, self.bias)
        rows = x.reshape(-1, self.in_features).float()
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        self._product(rows, out)
        return out.to(x.dtype)


def check_tokens(tokens: Tensor, count: int) -> None:
    """Raise a UsageError unless these token ids, int64, are from 0 to below the vocabulary's size."""
    wrong = tokens[(tokens < 0) | (tokens >= count)]
    if len(wrong):
        raise UsageError(
            f"Token id {int(wrong[0])} is none of the {count} that the model knows; "
            "use the tokenizer that it was trained with."
        )


def fits_bfloat16(weight: Tensor) -> bool:
    """Whether bfloat16 holds these numbers as they are: so it is where a checkpoint in bfloat16 was read as float32."""
    return torch.equal(weight.bfloat16().to(weight.dtype), weight)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight `[out, in]` as int8 and a float32 factor `[out]` for each of its rows.

    Factors have 16 bits, so that products with them are exact, and the same comes out when they are rounded once more.
    """
    largest = weight.float().abs().amax(dim=1)
    mantissa, exponent = torch.frexp(largest / 127)
    scale = torch.ldexp((mantissa * 2**16).ceil() / 2**16, exponent)
    scale = torch.where(largest > 0, scale, 1.0)
    return (weight.float() / scale.unsqueeze(-1)).round().to(torch.int8), scale
