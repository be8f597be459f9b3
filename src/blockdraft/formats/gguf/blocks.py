"""Tensor types of GGUF files: converts their bytes to tensors, or to a `QuantizedWeight` of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from blockdraft.nn.quantized import QuantizedWeight

Reader: TypeAlias = Callable[[Tensor], Tensor | QuantizedWeight]

# Each function takes the bytes of a tensor, `[matrix rows, blocks, bytes of a block]` uint8.


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.flatten(-2).view(dtype)


def _halves(raw: Tensor) -> Tensor:
    """Reads pairs of bytes as float16, `[..., 2 n]` to `[..., n]`."""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """Numbers of 4 bits, `[..., n]` to `[..., 2 n]`: those of the low halves of the bytes, then those of the high."""
    return torch.cat([raw & 15, raw >> 4], -1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bits of the bytes, the lowest first, each worth 16, `[..., n]` to `[..., 8 n]`."""
    return (raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _signed(codes: Tensor, zero: int, scale: Tensor, bits: int) -> QuantizedWeight:
    """Weight `scale * (codes - zero)`."""
    return QuantizedWeight(codes.view(torch.int8).flatten(1) - zero, _halves(scale).flatten(1), None, bits)


def _shifted(codes: Tensor, factors: Tensor, bits: int) -> QuantizedWeight:
    """Weight `scale * codes + offset`; `factors` holds both as float16."""
    scale, offset = _halves(factors).unbind(-1)
    return QuantizedWeight(codes.view(torch.int8).flatten(1), scale.contiguous(), offset.float(), bits)


def _q4_0(raw: Tensor) -> QuantizedWeight:
    return _signed(_nibbles(raw[..., 2:]), 8, raw[..., :2], 4)


def _q4_1(raw: Tensor) -> QuantizedWeight:
    return _shifted(_nibbles(raw[..., 4:]), raw[..., :4], 4)


def _q5_0(raw: Tensor) -> QuantizedWeight:
    return _signed(_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6]), 16, raw[..., :2], 8)


def _q5_1(raw: Tensor) -> QuantizedWeight:
    return _shifted(_nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]), raw[..., :4], 8)


def _q8_0(raw: Tensor) -> QuantizedWeight:
    return QuantizedWeight(raw[..., 2:].flatten(1).view(torch.int8), _halves(raw[..., :2]).flatten(1), None, 8)


def _q4_k(raw: Tensor) -> QuantizedWeight:
    """Reads Q4_K: 8 groups of 32 values per block. Scale and offset of a group are factors of the block times 6-bit
    numbers."""
    factors = _halves(raw[..., :4]).float()
    low, mins, high = raw[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([low & 63, high & 15 | low >> 2 & 48], -1)
    mins = torch.cat([mins & 63, high >> 4 | mins >> 2 & 48], -1)
    parts = raw[..., 16:].unflatten(-1, (4, 32))
    codes = torch.stack([parts & 15, parts >> 4], -2)  # low halves of the bytes hold one group, high halves the next
    offset = -(factors[..., 1:] * mins)
    return QuantizedWeight(
        codes.flatten(1).view(torch.int8), (factors[..., :1] * scales).flatten(1), offset.flatten(1), 4
    )


def _q6_k(raw: Tensor) -> QuantizedWeight:
    """Reads Q6_K: 16 groups of 16 values per block, with 6-bit codes."""
    low, high, scales = (
        raw[..., :128].unflatten(-1, (2, 1, 64)),
        raw[..., 128:192].unflatten(-1, (2, 1, 32)),
        raw[..., 192:208],
    )
    low = (low >> torch.tensor([[0], [4]], dtype=torch.uint8) & 15).flatten(-3)
    high = (high >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3).flatten(-3)
    codes = (low | high << 4).view(torch.int8) - 32
    scale = _halves(raw[..., 208:]).float() * scales.contiguous().view(torch.int8)
    return QuantizedWeight(codes.flatten(1), scale.flatten(1), None, 8)


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READERS: dict[str, Reader] = {
    **{kind: _plain(dtype) for kind, dtype in FLOATS.items()},
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
INDICES: dict[str, Reader] = {"I64": _plain(torch.int64)}  # no weights
