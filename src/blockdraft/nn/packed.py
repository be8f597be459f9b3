"""Linear layers for few inputs at a time, with optionally packed weights for compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import InterleavedWeight, QuantizedWeight, concatenate_weights

PIECE = 1 << 20  # numbers to pack at once
# Multiplies x `[n, in]` by one weight and writes to `[n, out]`. Both are float32; `out` and each x[i] are contiguous.
Product = Callable[[Tensor, Tensor], None]


class Kernels(Protocol):
    """Compiled matrix products with weights whose output channels are interleaved in groups of `lanes`."""

    @property
    def lanes(self) -> int: ...

    @property
    def weights_dtype(self) -> torch.dtype: ...

    @property
    def torch_threads(self) -> AbstractContextManager[None]:
        """Context in which torch's own operations run between products of few rows."""

    def product(self, weight: Tensor | InterleavedWeight, bias: Tensor | None, inputs: int, outputs: int) -> Product:
        """Return the product with one weight.

        Args:
            weight: `[blocks, inputs, lanes]` in `weights_dtype`, or a quantized weight.
            bias: `[blocks * lanes]` float32, or None.
        """


class DeviceWeight(Protocol):
    """A quantized weight `[out, in]` with products of its own on its device, where nothing waits for the host."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def bits(self) -> int: ...

    def channels(self, index: Tensor | slice) -> DeviceWeight:
        """Return the output channels with these indices, `[n]` int64, or those of a slice."""

    def dequantize(self) -> Tensor:
        """Return the weight `[out, in]` in float32."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T`, `[n, in]` to `[n, out]` in the dtype of x."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[out, in]` packed for kernels.

    Args:
        kernels: The kernels.
        data: Weight in the form of `Kernels.product`.
        outputs: Number of output channels without padding.
        inputs: Number of inputs.
    """

    kernels: Kernels
    data: Tensor | InterleavedWeight
    outputs: int
    inputs: int

    @property
    def form(self) -> tuple[object, ...]:
        """What packed weights must have in common to be joined."""
        data = self.data
        if isinstance(data, Tensor):
            return (data.dtype,)
        return data.bits, data.floating, *((name, part.size(1)) for name, part in data.tensors().items())


def pack_weights(parts: Sequence[Tensor | QuantizedWeight], kernels: Kernels) -> PackedWeight:
    """Concatenate weights `[out, in]` along the output dimension and pack them for kernels.

    Either all are quantized, or none, and then of any dtype. This needs little memory besides the result.
    """
    inputs, lanes = parts[0].shape[1], kernels.lanes
    outputs = sum(part.shape[0] for part in parts)
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    assert not quantized or not plain, "weights of one product are all quantized or all unquantized"
    if quantized:
        whole = quantized[0] if len(quantized) == 1 else concatenate_weights(quantized)
        return PackedWeight(kernels, InterleavedWeight.of(whole, lanes), outputs, inputs)
    blocks, step = -(-outputs // lanes), max(1, PIECE // (lanes * inputs))
    data = torch.empty(blocks, inputs, lanes, dtype=kernels.weights_dtype)
    for begin in range(0, blocks, step):
        count = min(step, blocks - begin)
        channels = _channels(plain, begin * lanes, (begin + count) * lanes)
        if len(channels) < count * lanes:
            channels = F.pad(channels, (0, 0, 0, count * lanes - len(channels)))
        data[begin : begin + count] = channels.view(count, lanes, inputs).transpose(1, 2)
    return PackedWeight(kernels, data, outputs, inputs)


def join_packed(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Concatenate packed weights of one form along the output dimension. All but the last must fill their blocks."""
    first, outputs = parts[0], sum(part.outputs for part in parts)
    assert all(part.outputs % part.kernels.lanes == 0 for part in parts[:-1]), "only the last has padding"
    if isinstance(first.data, Tensor):
        plain = [part.data for part in parts if isinstance(part.data, Tensor)]
        return PackedWeight(first.kernels, torch.cat(plain), outputs, first.inputs)
    tensors = [part.data.tensors() for part in parts if isinstance(part.data, InterleavedWeight)]
    whole = {name: torch.cat([own[name] for own in tensors]) for name in tensors[0]}
    data = InterleavedWeight.of_tensors(whole, first.data.bits, outputs, first.data.floating)
    return PackedWeight(first.kernels, data, outputs, first.inputs)


def _channels(parts: Sequence[Tensor], begin: int, end: int) -> Tensor:
    """Return the output channels `begin` to `end` of concatenated weights."""
    slices = []
    for part in parts:
        slices.append(part[max(begin, 0) : max(end, 0)])
        begin, end = begin - len(part), end - len(part)
    slices = [channels for channels in slices if len(channels)]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


class PackedLinear(nn.Module):
    """Linear layer for inference: `x @ weight.T + bias`, `[..., in]` to a new tensor `[..., out]`.

    Once packed for compiled kernels, a node's sums have the same bits alone and among others.

    Args:
        weight: `[out, in]`; like the bias, it can be read back.
        bias: `[out]`.

    Attributes:
        dtype: Dtype in which the weight is read back: its own, or for a quantized weight the one that the owner sets.
        rounded: Kind of quantization by `cuda/rounded.py`, or None.
    """

    rounded: str | None = None
    bias: Tensor | None

    def __init__(
        self, weight: Tensor | QuantizedWeight | DeviceWeight | PackedWeight, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        # `[out, in]`, or packed `[blocks, in, lanes]`; unset for a quantized weight.
        self.stored: Tensor
        self.quantized: QuantizedWeight | InterleavedWeight | DeviceWeight | None = None
        self.dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
        self.register_buffer("bias", bias)
        self._kernels: Kernels | None = None
        self._product: Product | None = None
        if isinstance(weight, PackedWeight):
            self.out_features, self.in_features = weight.outputs, weight.inputs
            self._take(weight)
            return
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, Tensor):
            self.register_buffer("stored", weight)
        else:
            self.quantized = weight

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        weight = self.stored.nbytes if self.quantized is None else self.quantized.nbytes
        return weight + (0 if self.bias is None else self.bias.nbytes)

    @property
    def bits(self) -> int | None:
        """Bits of a quantized weight; else None."""
        return None if self.quantized is None else self.quantized.bits

    @property
    def weight(self) -> Tensor:
        """Weight `[out, in]`; a copy if it is packed or quantized."""
        if self.rounded is not None:
            return self.stored.dequantize()
        if self.quantized is not None:
            return self._unpacked(self.quantized).dequantize().to(self.dtype)
        weight = self.stored
        if self._kernels is not None:
            weight = weight.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
        return weight.to(self.dtype)

    @property
    def kernels(self) -> Kernels | None:
        """Kernels that the weight is packed for."""
        return self._kernels

    def part(self, begin: int, end: int) -> PackedLinear:
        """Return the layer of some output channels, on the same memory. Packed ones fill whole blocks."""
        weight: Tensor | QuantizedWeight | DeviceWeight | PackedWeight
        if self._kernels is None:
            own = slice(begin, end)
            weight = self.stored[own] if self.quantized is None else self._unpacked(self.quantized).channels(own)
        else:
            lanes = self._kernels.lanes
            assert begin % lanes == end % lanes == 0, (begin, end, lanes)
            first, last, whole = begin // lanes, end // lanes, self.quantized
            data = whole.blocks(first, last) if isinstance(whole, InterleavedWeight) else self.stored[first:last]
            weight = PackedWeight(self._kernels, data, end - begin, self.in_features)
        part = PackedLinear(weight, None if self.bias is None else self.bias[begin:end])
        part.dtype = self.dtype
        return part

    def lookup(self, tokens: Tensor) -> Tensor:
        """Look up entries of an embedding table, the weights of output channels: `[...]` int64 to `[..., in]`."""
        if self.quantized is not None:
            if isinstance(self.quantized, QuantizedWeight | InterleavedWeight):
                check_tokens(tokens, self.out_features)
            return self.quantized.channels(tokens.reshape(-1)).dequantize().view(*tokens.shape, -1).to(self.dtype)
        if self._kernels is None:
            return F.embedding(tokens, self.stored).to(self.dtype)
        check_tokens(tokens, self.out_features)  # later channels are padding
        lanes = self.stored.size(2)
        return self.stored[tokens // lanes, :, tokens % lanes].to(self.dtype)

    def pack(self, kernels: Kernels) -> Product:
        """Pack the weight for kernels, and compute with them from now on.

        Args:
            kernels: Kernels for the weight's dtype, or for bfloat16 if that is exact (`fits_bfloat16`).

        Returns:
            The kernels' product with this weight, valid as long as this layer lives.
        """
        if self._product is None:
            own = self.stored if self.quantized is None else self._unpacked(self.quantized)
            assert isinstance(own, Tensor | QuantizedWeight), "on another device"
            self._take(pack_weights([own], kernels))
        assert self._kernels is kernels, "packed for other kernels"
        assert self._product is not None
        return self._product

    def _take(self, packed: PackedWeight) -> None:
        """Use a packed weight from now on."""
        data, kernels = packed.data, packed.kernels
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
            flat, own = x.reshape(-1, self.in_features), self._unpacked(self.quantized)
            products = own.multiply(flat.float() if isinstance(own, QuantizedWeight) else flat)
            return (products if self.bias is None else products + self.bias).view(*x.shape[:-1], -1).to(x.dtype)
        if self._product is None or differentiable:
            return F.linear(x, self.weight if self.rounded is None else self.stored, self.bias)
        flat = x.reshape(-1, self.in_features).float()
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        out = flat.new_empty(*x.shape[:-1], self.out_features)
        self._product(flat, out)
        return out.to(x.dtype)

    @staticmethod
    def _unpacked(weight: QuantizedWeight | InterleavedWeight | DeviceWeight) -> QuantizedWeight | DeviceWeight:
        return weight.weight() if isinstance(weight, InterleavedWeight) else weight


def check_tokens(tokens: Tensor, count: int) -> None:
    """Raise a UsageError unless all token ids, int64, are from 0 to below `count`."""
    wrong = tokens[(tokens < 0) | (tokens >= count)]
    if len(wrong):
        raise UsageError(
            f"Token id {int(wrong[0])} is none of the {count} that the model knows; "
            "use the tokenizer that it was trained with."
        )


def fits_bfloat16(weight: Tensor) -> bool:
    """Return whether bfloat16 represents a weight exactly, as for a bfloat16 checkpoint that was read as float32."""
    return torch.equal(weight.bfloat16().to(weight.dtype), weight)
