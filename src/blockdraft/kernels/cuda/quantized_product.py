"""Products with quantized weights on a GPU: Triton widens codes in registers, so memory is read in 4 or 8 bits.

Inputs are not quantized, because a block of draft tokens would change the numbers of its tokens. Products of many rows
widen the whole weight first, which costs less there than to widen it for each tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.nn.quantization import QuantizedWeight

MAX_ROWS = 64  # rows of a product in one pass over the weight
WIDENED = 4096  # output channels that are widened at a time, for more rows
MIN_TILE = 16  # the smallest size of a Triton product
COLUMNS, SPANNED = 32, 64  # outputs of a program, and bytes of each one's codes that it reads at a time


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    offsets,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    BITS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANNED: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, at = tl.arange(0, ROWS), tl.arange(0, SPANNED)
    halves: tl.constexpr = 8 // BITS
    width, groups = inputs // halves, inputs // GROUP
    known_row, known_column = row < rows, column < outputs
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, width, SPANNED):
        byte = first + at
        known = known_column[None, :] & (byte < width)[:, None]
        stored = tl.load(codes + column[None, :].to(tl.int64) * width + byte[:, None], mask=known, other=0)
        for half in tl.static_range(halves):
            group = byte // GROUP * halves + half
            place = column[None, :] * groups + group[:, None]
            if BITS == 4:
                code = (stored >> (4 * half)) & 15
                code = code.to(tl.float32) if HAS_OFFSET else code.to(tl.float32) - 16 * (code > 7).to(tl.float32)
            else:
                code = stored.to(tl.float32)
            weight = code * tl.load(scales + place, mask=known, other=0).to(tl.float32)
            if HAS_OFFSET:
                weight += tl.load(offsets + place, mask=known, other=0).to(tl.float32)
            source = group * GROUP + byte % GROUP
            own = tl.load(
                x + row[:, None] * x_stride + source[None, :],
                mask=known_row[:, None] & (byte < width)[None, :],
                other=0,
            )
            total = tl.dot(own, weight.to(own.dtype), total, input_precision="ieee")
    place = row[:, None] * outputs + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=known_row[:, None] & known_column[None, :])


@torch.library.custom_op("blockdraft::multiply_codes", mutates_args=())
def multiply_codes(x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int) -> Tensor:
    """Return `x @ weight.T`, `[n, in]` to `[n, out]`, for the tensors of `PackedCodes`.

    It is an operation of torch's, since torch.compile does not look into Triton's functions everywhere.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    if rows > MAX_ROWS:
        weight = PackedCodes(codes, scale, offset, bits)
        parts = (weight.channels(slice(first, first + WIDENED)) for first in range(0, outputs, WIDENED))
        return torch.cat([F.linear(x, part.dequantize().to(x.dtype)) for part in parts], dim=-1)
    out = x.new_empty(rows, outputs)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _multiply[(-(-outputs // COLUMNS),)](
            x, codes, scale, scale if offset is None else offset, out,
            rows, outputs, inputs, x.stride(0), BITS=bits, HAS_OFFSET=offset is not None,
            GROUP=inputs // scale.size(1), ROWS=max(MIN_TILE, 1 << (rows - 1).bit_length()),
            COLUMNS=COLUMNS, SPANNED=SPANNED,
        )  # fmt: skip
    return out


@multiply_codes.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int) -> Tensor:
    return x.new_empty(x.size(0), codes.size(0))  # len() would make torch.compile take the number for constant


@dataclass(frozen=True)
class PackedCodes:
    """A quantized weight `[out, in]` on a GPU, which takes the place of a `QuantizedWeight`.

    Args:
        codes: `[out, in]` int8; or with 4 bits `[out, in / 2]` uint8. A byte then holds the codes at the same place of
            two neighbouring groups, the first in its lower half.
        scale: `[out, in / group]` float16.
        offset: The same shape, or None.
        bits: 4 or 8.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int

    @classmethod
    def of(cls, weight: QuantizedWeight) -> PackedCodes:
        """Pack a weight. Check `fits` first."""
        scale, offset = weight.scale.float(), None if weight.offset is None else weight.offset.float()
        codes = weight.codes
        if weight.bits == 4:
            low, high = (codes & 15).to(torch.uint8).unflatten(1, (-1, 2, weight.group)).unbind(2)
            codes = (low | high << 4).flatten(1)
        return cls(codes, scale.half(), None if offset is None else offset.half(), weight.bits)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.codes.size(1) * 8 // self.bits))

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.size(1)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes)

    def to(self, device: torch.device) -> PackedCodes:
        offset = None if self.offset is None else self.offset.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), offset=offset)

    def channels(self, index: Tensor | slice) -> PackedCodes:
        """Return the output channels with these indices, `[n]` int64, or those of a slice."""
        offset = None if self.offset is None else self.offset[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], offset=offset)

    def dequantize(self) -> Tensor:
        """Return the weight `[out, in]` in float32."""
        codes = self.codes
        if self.bits == 4:
            halves = codes.unflatten(1, (-1, 1, self.group))
            codes = torch.cat([halves & 15, halves >> 4], dim=2).flatten(1).to(torch.int8)
            codes = codes if self.offset is not None else (codes ^ 8) - 8
        weight: Tensor = codes.float().unflatten(1, (-1, self.group)) * self.scale.float().unsqueeze(-1)
        if self.offset is not None:
            weight = weight + self.offset.float().unsqueeze(-1)
        return weight.flatten(1)

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T`, `[n, in]` to `[n, out]` in the dtype of x."""
        out: Tensor = multiply_codes(x, self.codes, self.scale, self.offset, self.bits)
        return out


def fits(weight: QuantizedWeight) -> bool:
    """Return whether the kernel multiplies by a weight."""
    groups, group = weight.scale.shape[1], weight.group
    even = weight.bits == 8 or groups % 2 == 0
    return not weight.floating and even and group >= MIN_TILE and group & (group - 1) == 0
