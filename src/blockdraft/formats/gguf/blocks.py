"""Tensor types of GGUF files: convert their bytes to tensors, or to a `QuantizedWeight` with the same values.

The layouts are those of `ggml-common.h` and of `gguf.quants`, whose tables are used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import gguf
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4, NVFP4
from torch import Tensor

from blockdraft.nn.quantization import (
    Factors,
    InterleavedWeight,
    NestedFactors,
    QuantizedWeight,
    concatenate_weights,
    narrow,
)

Reader: TypeAlias = Callable[[Tensor], Tensor | QuantizedWeight]
USUAL_BYTE = 120  # as an exponent of MXFP4 it is a float16
PIECE = 1 << 22  # values of grid types that are expanded at once

# Each function takes the bytes of a tensor, `[matrix rows, blocks, bytes of a block]` uint8.


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.flatten(-2).view(dtype)


def _halves(raw: Tensor) -> Tensor:
    """Read pairs of bytes as float16, `[..., 2 n]` to `[..., n]`."""
    return raw.contiguous().view(torch.float16)


def _numbers(raw: Tensor, bits: int, size: int) -> Tensor:
    """Unpack numbers of `bits` bits to int8, `[..., n]` to `[..., n * 8 / bits]`.

    Of each `size` bytes the lowest bits come first, then the next.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(-1)
    numbers: Tensor = raw.unflatten(-1, (-1, 1, size)) >> shifts & (1 << bits) - 1
    return numbers.flatten(-3).view(torch.int8)


def _weight(codes: Tensor, scale: Factors, offset: Factors | None, bits: int) -> QuantizedWeight:
    scale = scale.flatten(1) if isinstance(scale, Tensor) else scale
    offset = offset.flatten(1) if isinstance(offset, Tensor) else offset
    return QuantizedWeight(codes.flatten(1), scale, offset, bits)


def _nested(numbers: Tensor, unit: Tensor) -> NestedFactors:
    """Return 8-bit factors `[matrix rows, blocks, groups]` times a float16 `[matrix rows, blocks, 1]`."""
    return NestedFactors(numbers.to(torch.int8).flatten(1), unit.flatten(1))


def _q4_0(raw: Tensor) -> QuantizedWeight:
    return _weight(_numbers(raw[..., 2:], 4, 16) - 8, _halves(raw[..., :2]), None, 4)


def _q4_1(raw: Tensor) -> QuantizedWeight:
    factors = _halves(raw[..., :4])
    return _weight(_numbers(raw[..., 4:], 4, 16), factors[..., :1], factors[..., 1:], 4)


def _q5_0(raw: Tensor) -> QuantizedWeight:
    codes = _numbers(raw[..., 6:], 4, 16) | _numbers(raw[..., 2:6], 1, 1) << 4
    return _weight(codes - 16, _halves(raw[..., :2]), None, 8)


def _q5_1(raw: Tensor) -> QuantizedWeight:
    codes, factors = _numbers(raw[..., 8:], 4, 16) | _numbers(raw[..., 4:8], 1, 1) << 4, _halves(raw[..., :4])
    return _weight(codes, factors[..., :1], factors[..., 1:], 8)


def _q8_0(raw: Tensor) -> QuantizedWeight:
    return _weight(raw[..., 2:].contiguous().view(torch.int8), _halves(raw[..., :2]), None, 8)


def _q2_k(raw: Tensor) -> QuantizedWeight:
    """Read Q2_K: 16 groups of 16 values per block.

    Scale and offset of a group are factors of the block times 4-bit numbers.
    """
    units = _halves(raw[..., 80:])
    scale, offset = _nested(raw[..., :16] & 15, units[..., :1]), _nested(raw[..., :16] >> 4, -units[..., 1:])
    return _weight(_numbers(raw[..., 16:80], 2, 32), scale, offset, 4)


def _q3_k(raw: Tensor) -> QuantizedWeight:
    """Read Q3_K: 16 groups of 16 values per block, with 6-bit scales; a code is low bits - 4 * (1 - high bit)."""
    codes = _numbers(raw[..., 32:96], 2, 32) + 4 * _numbers(raw[..., :32], 1, 32) - 4
    scales = _numbers(raw[..., 96:104], 4, 8) | _numbers(raw[..., 104:108], 2, 4) << 4
    return _weight(codes, _nested(scales - 32, _halves(raw[..., 108:])), None, 4)


def _factors(raw: Tensor) -> tuple[NestedFactors, NestedFactors]:
    """Return scales and offsets of Q4_K and Q5_K, 8 of each per block: factors of the block times 6-bit numbers."""
    units = _halves(raw[..., :4])
    low, mins, high = raw[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([low & 63, high & 15 | low >> 2 & 48], -1)
    mins = torch.cat([mins & 63, high >> 4 | mins >> 2 & 48], -1)
    return _nested(scales, units[..., :1]), _nested(mins, -units[..., 1:])


def _q4_k(raw: Tensor) -> QuantizedWeight:
    return _weight(_numbers(raw[..., 16:], 4, 32), *_factors(raw), 4)


def _q5_k(raw: Tensor) -> QuantizedWeight:
    codes = _numbers(raw[..., 48:], 4, 32) | _numbers(raw[..., 16:48], 1, 32) << 4
    return _weight(codes, *_factors(raw), 8)


def _q6_k(raw: Tensor) -> QuantizedWeight:
    """Read Q6_K: 16 groups of 16 values per block, with 6-bit codes."""
    codes = (_numbers(raw[..., :128], 4, 64) | _numbers(raw[..., 128:192], 2, 32) << 4) - 32
    return _weight(codes, _nested(raw[..., 192:208].contiguous().view(torch.int8), _halves(raw[..., 208:])), None, 8)


def _tq1_0(raw: Tensor) -> QuantizedWeight:
    """Read TQ1_0: 256 values -1, 0 or 1 per block, 5 to a byte, or 4 to each of the last."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(-1)
    bytes_of = [(raw[..., :32], 32, 5), (raw[..., 32:48], 16, 5), (raw[..., 48:52], 4, 4)]
    shifted = [(part.unflatten(-1, (-1, 1, size)) * powers[:count]).flatten(-3) for part, size, count in bytes_of]
    codes = (torch.cat(shifted, -1).short() * 3 >> 8).to(torch.int8) - 1
    return _weight(codes, _halves(raw[..., 52:]), None, 4)


def _tq2_0(raw: Tensor) -> QuantizedWeight:
    return _weight(_numbers(raw[..., :64], 2, 32) - 1, _halves(raw[..., 64:]), None, 4)


def _by_table(table: Sequence[int], codes: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.int8)[codes.int()]


def _iq4_nl(raw: Tensor) -> QuantizedWeight:
    return _weight(_by_table(IQ4_NL.kvalues, _numbers(raw[..., 2:], 4, 16)), _halves(raw[..., :2]), None, 8)


def _iq4_xs(raw: Tensor) -> QuantizedWeight:
    """Read IQ4_XS: 8 groups of 32 values per block, with 6-bit scales. Codes of nested factors are smaller."""
    scales = _numbers(raw[..., 4:8], 4, 1) | _numbers(raw[..., 2:4], 2, 1) << 4
    codes = _by_table(IQ4_NL.kvalues, _numbers(raw[..., 8:], 4, 16))
    return _weight(codes, (scales - 32) * _halves(raw[..., :2]).float(), None, 8)


def _mxfp4(raw: Tensor) -> QuantizedWeight:
    scale = torch.from_numpy(MXFP4.e8m0_to_fp32_half(raw[..., :1].numpy()))
    return QuantizedWeight(_numbers(raw[..., 1:], 4, 16).flatten(1), narrow(scale).flatten(1), None, 4, floating=True)


def _nvfp4(raw: Tensor) -> QuantizedWeight:
    scale = torch.from_numpy(NVFP4.ue4m3_to_fp32(raw[..., :4].numpy())).half()  # exact
    return QuantizedWeight(_numbers(raw[..., 4:], 4, 8).flatten(1), scale.flatten(1), None, 4, floating=True)


def _by_grid(
    kind: str, unit: float, sizes: Callable[[Tensor], Tensor], factor: Callable[[Tensor], Tensor] | None = None
) -> Reader:
    """Return the reader of a type whose codes are signed points of an integer grid; `gguf` has the grids.

    Args:
        unit: Scale of a group over `factor * (2 * size + 1)`.
        sizes: Sizes of a block's groups.
        factor: Factor of a block as two bytes; None is the first two.
    """

    def read(raw: Tensor) -> QuantizedWeight:
        half = _halves(raw[..., :2] if factor is None else factor(raw))
        scale = (half.float() * (2 * sizes(raw) + 1) * unit).flatten(1)
        inputs = raw.size(1) * GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        codes, step = torch.empty(len(raw), inputs, dtype=torch.int8), max(1, PIECE // inputs)
        for begin in range(0, len(raw), step):
            piece = slice(begin, begin + step)
            numbers = gguf.dequantize(raw[piece].flatten(1).numpy(), GGMLQuantizationType[kind])
            quotients = torch.from_numpy(numbers).unflatten(1, (scale.size(1), -1)) / scale[piece].unsqueeze(-1)
            codes[piece] = quotients.nan_to_num(0, 0, 0).round().flatten(1)
        return _weight(codes, scale, None, 8)

    return read


def _iq1_m_sizes(raw: Tensor) -> Tensor:
    words = raw[..., 48::2].int() | raw[..., 49::2].int() << 8
    return (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9]) & 7).flatten(-2)


def _iq1_m_factor(raw: Tensor) -> Tensor:
    """Return four bits of each of four words."""
    parts = raw[..., 49::2] >> 4
    return parts[..., ::2] | parts[..., 1::2] << 4


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READERS: dict[str, Reader] = {
    **{kind: _plain(dtype) for kind, dtype in FLOATS.items()},
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ3_S": _by_grid("IQ3_S", 1, lambda raw: _numbers(raw[..., 106:], 4, 1)),
    "IQ3_XXS": _by_grid("IQ3_XXS", 1 / 4, lambda raw: raw[..., 69::4] >> 4),
    "IQ2_S": _by_grid("IQ2_S", 1 / 8, lambda raw: _numbers(raw[..., 74:], 4, 1)),
    "IQ2_XS": _by_grid("IQ2_XS", 1 / 8, lambda raw: _numbers(raw[..., 66:], 4, 1)),
    "IQ2_XXS": _by_grid("IQ2_XXS", 1 / 8, lambda raw: raw[..., 9::8] >> 4),
    "IQ1_S": _by_grid("IQ1_S", 1 / 8, lambda raw: raw[..., 35::2] >> 4 & 7),
    "IQ1_M": _by_grid("IQ1_M", 1 / 8, _iq1_m_sizes, _iq1_m_factor),
}
INDICES: dict[str, Reader] = {"I64": _plain(torch.int64)}  # no weights


def empty_interleaved(kinds: Sequence[str], outputs: int, inputs: int, lanes: int) -> InterleavedWeight:
    """Return a packed weight for matrices of quantized types, whose numbers are not set. Outputs fill its blocks."""
    parts = list[QuantizedWeight]()
    for kind in kinds:  # one block of each, all of as many values
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        block = READERS[kind](torch.full((1, 1, size), USUAL_BYTE, dtype=torch.uint8))
        assert isinstance(block, QuantizedWeight), kind
        parts.append(block)
    block_of_each = InterleavedWeight.of(concatenate_weights(parts), lanes)
    tensors = {
        name: tensor.new_empty(outputs // lanes, tensor.size(1) * inputs // values, *tensor.shape[2:])
        for name, tensor in block_of_each.tensors().items()
    }
    return InterleavedWeight.of_tensors(tensors, block_of_each.bits, outputs, block_of_each.floating)


@cache
def usual_block(kind: str) -> QuantizedWeight:
    """Return a quantized matrix of one block as it is read."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    block = READERS[kind](torch.full((1, 1, size), USUAL_BYTE, dtype=torch.uint8))
    assert isinstance(block, QuantizedWeight), kind
    return block


def bytes_held(kind: str) -> float:
    """Return the bytes of memory per value of a quantized matrix once it is read."""
    block = usual_block(kind)
    return block.nbytes / block.codes.numel()
