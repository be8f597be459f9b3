"""Linear layers for few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.errors import UsageError
from blockdraft.nn.quantized import InterleavedWeight, QuantizedWeight, joined_weights

PIECE = 1 << 20  # numbers that are laid out at once
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


@dataclass(frozen=True)
class LaidOut:
    """A weight `[out, in]` as kernels read it.

    Args:
        data: As `Kernels.product` takes it.
        outputs: Those beyond them are padding.
    """

    kernels: Kernels
    data: Tensor | InterleavedWeight
    outputs: int
    inputs: int


def lay_out(parts: Sequence[Tensor | QuantizedWeight], kernels: Kernels) -> LaidOut:
    """The output channels of weights `[out, in]`, one behind the other, as kernels read them. All are of few bits, or
    none, and may then be of any dtype. Beside the result this takes little memory."""
    inputs, lanes = parts[0].shape[1], kernels.lanes
    outputs = sum(part.shape[0] for part in parts)
    few = [part for part in parts if isinstance(part, QuantizedWeight)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    assert not few or not plain, "what is computed at once is either of few bits or not"
    if few:
        whole = few[0] if len(few) == 1 else joined_weights(few)
        return LaidOut(kernels, InterleavedWeight.of(whole, lanes), outputs, inputs)
    blocks, step = -(-outputs // lanes), max(1, PIECE // (lanes * inputs))
    data = torch.empty(blocks, inputs, lanes, dtype=kernels.weights_dtype)
    for begin in range(0, blocks, step):
        count = min(step, blocks - begin)
        rows = _rows(plain, begin * lanes, (begin + count) * lanes)
        if len(rows) < count * lanes:
            rows = F.pad(rows, (0, 0, 0, count * lanes - len(rows)))
        data[begin : begin + count] = rows.view(count, lanes, inputs).transpose(1, 2)
    return LaidOut(kernels, data, outputs, inputs)


def _rows(parts: Sequence[Tensor], begin: int, end: int) -> Tensor:
    """Some rows of several matrices, counted through."""
    found = []
    for part in parts:
        found.append(part[max(begin, 0) : max(end, 0)])
        begin, end = begin - len(part), end - len(part)
    some = [rows for rows in found if len(rows)]
    return some[0] if len(some) == 1 else torch.cat(some)


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` for inference, `[..., in]` to a new tensor `[..., out]`.

    Laid out for compiled kernels, by `pack` or beforehand, its sums have the same bits for a row alone and among
    others.

    Args:
        weight: `[out, in]`; with the bias, it can be read back.
        bias: `[out]`.

    Attributes:
        dtype: Of what is read back: that of the weight, or for one of few bits whatever the owner sets.
        rounded: How `cuda/rounded.py` has rounded the weight, or None.
    """

    rounded: str | None = None
    bias: Tensor | None

    def __init__(self, weight: Tensor | QuantizedWeight | LaidOut, bias: Tensor | None = None) -> None:
        super().__init__()
        # `[out, in]`; packed `[blocks, in, lanes]`, in which some output channels lie side by side. Or in few bits.
        self.stored: Tensor
        self.quantized: QuantizedWeight | InterleavedWeight | None = None
        self.dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
        self.register_buffer("bias", bias)
        self._kernels: Kernels | None = None
        self._product: Product | None = None
        if isinstance(weight, LaidOut):
            self.out_features, self.in_features = weight.outputs, weight.inputs
            self._take(weight)
            return
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, QuantizedWeight):
            self.quantized = weight
        else:
            self.register_buffer("stored", weight)

    @property
    def nbytes(self) -> int:
        """Memory that weight and bias take."""
        weight = self.stored.nbytes if self.quantized is None else self.quantized.nbytes
        return weight + (0 if self.bias is None else self.bias.nbytes)

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
            own = self.stored if self.quantized is None else self._unpacked(self.quantized)
            self._take(lay_out([own], kernels))
        assert self._kernels is kernels, "packed for other kernels"
        assert self._product is not None
        return self._product

    def _take(self, laid: LaidOut) -> None:
        """Compute with a weight that is laid out from now on."""
        data, kernels = laid.data, laid.kernels
        if isinstance(data, InterleavedWeight):
            self.quantized = data
        else:
            self.register_buffer("stored", data)
        fill = -self.out_features % kernels.lanes
        bias = None if self.bias is None else F.pad(self.bias.float(), (0, fill)).contiguous()
        self._kernels, self._product = kernels, kernels.product(data, bias, self.in_features, self.out_features)

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
