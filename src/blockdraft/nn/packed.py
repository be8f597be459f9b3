"""Linear layers for few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.errors import UsageError
from blockdraft.nn.quantized import InterleavedWeight, QuantizedWeight

# Multiplies rows `[n, in]` with one weight, into `[n, out]`; both float32, `out` and each row contiguous.
Product = Callable[[Tensor, Tensor], None]


class Kernels(Protocol):
    """What multiplies with weights of which `lanes` output channels lie side by side."""

    @property
    def lanes(self) -> int: ...

    @property
    def weights_dtype(self) -> torch.dtype: ...

    def product(self, weight: Tensor | InterleavedWeight, bias: Tensor | None, inputs: int, outputs: int) -> Product:
        """The product with one weight.

        Args:
            weight: `[blocks, inputs, lanes]` in `weights_dtype`, or one of few bits.
            bias: `[blocks * lanes]` float32, or None.
        """


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` for inference, `[..., in]` to a new tensor `[..., out]`.

    `pack` hands it to compiled kernels, whose sums have the same bits for a row alone and among others.

    Args:
        weight: `[out, in]`; with the bias, it can be read back.
        bias: `[out]`.

    Attributes:
        dtype: Of what is read back: that of the weight, or for one of few bits whatever the owner sets.
        rounded: How `cuda/rounded.py` has rounded the weight, or None.
    """

    rounded: str | None = None
    bias: Tensor | None

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = torch.float32 if isinstance(weight, QuantizedWeight) else weight.dtype
        # `[out, in]`; packed `[blocks, in, lanes]`, in which some output channels lie side by side. Or in few bits.
        self.stored: Tensor
        self.quantized: QuantizedWeight | InterleavedWeight | None = None
        if isinstance(weight, QuantizedWeight):
            self.quantized = weight
        else:
            self.register_buffer("stored", weight)
        self.register_buffer("bias", bias)
        self._kernels: Kernels | None = None
        self._product: Product | None = None

    @property
    def bits(self) -> int | None:
        """Of the weight, where these are few."""
        return None if self.quantized is None else self.quantized.bits

    @property
    def weight(self) -> Tensor:
        """`[out, in]`; a copy where it is packed or of few bits."""
        if self.rounded is not None:
            return self.stored.dequantize()
        if self.quantized is not None:
            return self._unpacked(self.quantized).dequantize().to(self.dtype)
        weight = self.stored
        if self._kernels is not None:
            weight = weight.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
        return weight.to(self.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, `[...]` int64 to `[..., in]`: an embedding table is a weight too."""
        if self.quantized is not None:
            check_tokens(index, self.out_features)
            return self.quantized.rows(index.reshape(-1)).dequantize().view(*index.shape, -1).to(self.dtype)
        if self._kernels is None:
            return F.embedding(index, self.stored).to(self.dtype)
        check_tokens(index, self.out_features)  # beyond them lies padding
        lanes = self.stored.size(2)
        return self.stored[index // lanes, :, index % lanes].to(self.dtype)

    def pack(self, kernels: Kernels) -> Product:
        """Lay the weight out as these kernels want it, and compute with them from now on.

        They were built for the weight's dtype, or for bfloat16 where that rounds no number (`fits_bfloat16`).

        Returns:
            The kernels' product with this weight; valid as long as this layer lives.
        """
        if self._product is None:
            lanes = kernels.lanes
            blocks = -(-self.out_features // lanes)
            fill = blocks * lanes - self.out_features
            laid: Tensor | InterleavedWeight
            if isinstance(self.quantized, QuantizedWeight):
                self.quantized = laid = InterleavedWeight.of(self.quantized, lanes)
            else:
                padded = F.pad(self.stored.to(kernels.weights_dtype), (0, 0, 0, fill))
                self.stored = laid = padded.view(blocks, lanes, self.in_features).transpose(1, 2).contiguous()
            bias = None if self.bias is None else F.pad(self.bias.float(), (0, fill)).contiguous()
            self._kernels = kernels
            self._product = kernels.product(laid, bias, self.in_features, self.out_features)
        assert self._kernels is kernels, "packed for other kernels"
        return self._product

    def forward(self, x: Tensor) -> Tensor:
        differentiable = torch.is_grad_enabled() and x.requires_grad
        if self._product is None and self.quantized is not None and not differentiable:
            rows = self._unpacked(self.quantized).multiply(x.reshape(-1, self.in_features).float())
            return (rows if self.bias is None else rows + self.bias).view(*x.shape[:-1], -1).to(x.dtype)
        if self._product is None or differentiable:
            return F.linear(x, self.weight if self.rounded is None else self.stored, self.bias)
        rows = x.reshape(-1, self.in_features).float()
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        self._product(rows, out)
        return out.to(x.dtype)

    @staticmethod
    def _unpacked(weight: QuantizedWeight | InterleavedWeight) -> QuantizedWeight:
        return weight if isinstance(weight, QuantizedWeight) else weight.weight()


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
