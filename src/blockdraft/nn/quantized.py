"""Weights of few bits, and products with them in integers.

A weight is `scale * codes + offset`, with a scale and an offset for each output channel and group of inputs. Inputs of
a product are rounded to int8 with a scale for each token and group, so that an input of large numbers costs precision
in its own group only. Sums within a group are of integers and so the same in any order: the result of a token does not
depend on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError

MOST_CODE = 127  # largest code of an input
LEAST_INPUT = 1e-30  # a group whose largest number is no larger is rounded to 0
GROUPS = (128, 64, 32, 16, 8)  # sizes that `best_group` chooses from, the best first
LEAST_GROUP = GROUPS[-1]
MOST_GROUP = 65536  # largest group whose products compiled kernels add up without an overflow
FACTORS = (torch.float16, torch.float32)  # dtypes of scales and offsets
PIECE = 1 << 20  # codes that are interleaved at once


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[out, in]` in few bits.

    Args:
        codes: `[out, in]` int8; with 4 bits from -8 to 7, or from 0 to 15 where there is an offset.
        scale: `[out, in / group]` float32, or float16 where that represents it exactly.
        offset: The same; None is 0.
        bits: 4 or 8.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int

    def __post_init__(self) -> None:
        assert self.bits in (4, 8) and self.codes.dtype == torch.int8, (self.bits, self.codes.dtype)
        assert self.scale.ndim == 2 and len(self.scale) == len(self.codes), (self.scale.shape, self.codes.shape)
        assert self.codes.size(1) == self.scale.size(1) * self.group, (self.scale.shape, self.codes.shape)
        assert self.group % LEAST_GROUP == 0, self.group
        if self.offset is not None:
            assert self.offset.shape == self.scale.shape, (self.offset.shape, self.scale.shape)
        for name, each in (("scale", self.scale), ("offset", self.offset)):
            assert each is None or each.dtype in FACTORS, f"{name} is {each.dtype}, not float16 or float32"

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.size(1) // self.scale.size(1)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with codes of 4 bits two to a byte."""
        factors = self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes)
        return self.codes.numel() * self.bits // 8 + factors

    def dequantize(self) -> Tensor:
        """The weight's numbers, `[out, in]` float32."""
        codes = self.codes.float().unflatten(1, (-1, self.group))
        weight: Tensor = codes * self.scale.float().unsqueeze(-1)
        if self.offset is not None:
            weight = weight + self.offset.float().unsqueeze(-1)
        return weight.flatten(1)

    def channels(self, index: Tensor) -> QuantizedWeight:
        """Some output channels, `[n]` int64."""
        offset = None if self.offset is None else self.offset[index]
        return QuantizedWeight(self.codes[index], self.scale[index], offset, self.bits)

    def multiply(self, x: Tensor) -> Tensor:
        """`round(x) @ weight.T`, `[n, in]` float32 to `[n, out]`: the slow twin of the compiled kernels."""
        codes, factor = round_inputs(x, self.group)
        out = x.new_zeros(len(x), len(self.codes))
        for number in range(self.scale.size(1)):
            part = slice(number * self.group, (number + 1) * self.group)
            scale = factor[:, number, None]
            # Sums of integers below 2^24 are exact in float32.
            sums = codes[:, part] @ self.codes[:, part].float().T
            out = out + sums * (self.scale[:, number].float() * scale)
            if self.offset is not None:
                out = out + self.offset[:, number].float() * (codes[:, part].sum(1, keepdim=True) * scale)
        return out


def round_inputs(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes of inputs `[n, in]`, whole numbers from -127 to 127, and the factor of each group, `[n, in / group]`; all
    float32. The factor of a group with a number that is not finite is NaN."""
    parts = x.float().unflatten(1, (-1, group))
    largest = parts.abs().amax(-1)
    some = largest > LEAST_INPUT
    # Torch divides a number by a tensor as number * (1 / tensor), which rounds twice; tensor by tensor it rounds once.
    inverse = torch.where(some, torch.full_like(largest, MOST_CODE) / largest, 0.0)
    factor = torch.where(some, largest / torch.full_like(largest, MOST_CODE), 0.0)
    codes = (parts * inverse.unsqueeze(-1)).round().clamp(-MOST_CODE, MOST_CODE)
    finite = parts.isfinite().all(-1)
    return torch.where(finite.unsqueeze(-1), codes, 0.0).flatten(1), torch.where(finite, factor, torch.nan)


def best_group(inputs: int) -> int:
    """Largest group up to 128 that divides a number of inputs.

    Raises:
        UsageError: No group does.
    """
    for group in GROUPS:
        if inputs % group == 0:
            return group
    raise UsageError(
        f"A weight of {inputs} inputs cannot be rounded, since no group of {LEAST_GROUP} to {GROUPS[0]} divides them; "
        "leave quantize out."
    )


def check_group(inputs: int, group: int) -> None:
    """Raise a UsageError unless the group divides the inputs, and compiled kernels can read it."""
    if group < LEAST_GROUP or group % LEAST_GROUP:
        raise UsageError(f"group is {group}; it must be a multiple of {LEAST_GROUP}.")
    if inputs % group:
        fitting = ", ".join(str(size) for size in GROUPS if inputs % size == 0)
        raise UsageError(
            f"Groups of {group} do not divide {inputs} inputs; {fitting or 'no group that we have'} would."
        )


def joined_weights(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Output channels of weights one behind the other. Where bits or groups differ, all get the most bits and the
    greatest common group; no number changes."""
    bits, group = max(part.bits for part in parts), gcd(*(part.group for part in parts))
    shifted = any(part.offset is not None for part in parts)
    codes, scales, offsets = [], [], []
    for part in parts:
        own, scale, offset = part.codes, part.scale.float(), part.offset
        if offset is not None:
            offset = offset.float()
        else:
            signed = bits == 4 and shifted
            own, offset = (own + 8, -8 * scale) if signed else (own, torch.zeros_like(scale))
        codes.append(own)
        scales.append(scale.repeat_interleave(part.group // group, 1))
        offsets.append(offset.repeat_interleave(part.group // group, 1))
    offset = narrow(torch.cat(offsets)) if shifted else None
    return QuantizedWeight(torch.cat(codes), narrow(torch.cat(scales)), offset, bits)


def narrow(factors: Tensor) -> Tensor:
    """Scales or offsets as float16 if that represents all of them exactly, else as float32."""
    half = factors.half()
    return half if torch.equal(half.float(), factors.float()) else factors.float()


@dataclass(frozen=True)
class InterleavedWeight:
    """A `QuantizedWeight` packed for compiled kernels, with `lanes` output channels side by side.

    Args:
        codes: uint8. With 8 bits `[blocks, in / 4, lanes, 4]`; with 4 bits `[blocks, in / 8, lanes, 4]`, of each 8
            inputs the first 4 in the low halves of bytes, from 0 to 15.
        scale, offset: `[blocks, in / group, lanes]`, as in `QuantizedWeight`.
        bits: As in `QuantizedWeight`.
        outputs: Number of output channels; the last block is filled up with zeros.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int
    outputs: int

    @classmethod
    def of(cls, weight: QuantizedWeight, lanes: int) -> InterleavedWeight:
        count, inputs = weight.shape
        blocks = -(-count // lanes)
        words = torch.empty(blocks, inputs * weight.bits // 32, lanes, 4, dtype=torch.uint8)
        step = max(1, PIECE // (lanes * inputs))
        for begin in range(0, blocks, step):  # pieces take little memory beside the whole
            codes = weight.codes[begin * lanes : (begin + step) * lanes]
            codes = codes + 8 if weight.bits == 4 and weight.offset is None else codes
            piece = F.pad(codes, (0, 0, 0, -len(codes) % lanes)).view(torch.uint8)
            if weight.bits == 4:
                low, high = piece.view(-1, lanes, inputs // 8, 2, 4).unbind(3)
                parts = low | high << 4
            else:
                parts = piece.view(-1, lanes, inputs // 4, 4)
            words[begin : begin + step] = parts.transpose(1, 2)
        factors = (
            None if each is None else _blocks_of(each, blocks, lanes).transpose(1, 2).contiguous()
            for each in (weight.scale, weight.offset)
        )
        scale, offset = factors
        assert scale is not None
        return cls(words, scale, offset, weight.bits, count)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.size(1) * 32 // self.bits // self.scale.size(1)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes)

    def channels(self, index: Tensor) -> QuantizedWeight:
        """Some output channels, `[n]` int64."""
        block, lane = index // self.codes.size(2), index % self.codes.size(2)
        codes = self.codes[block, :, lane]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 2) - (8 if self.offset is None else 0)
        offset = None if self.offset is None else self.offset[block, :, lane]
        return QuantizedWeight(codes.flatten(1).view(torch.int8), self.scale[block, :, lane], offset, self.bits)

    def weight(self) -> QuantizedWeight:
        """The weight before it was packed."""
        return self.channels(torch.arange(self.outputs))


def _blocks_of(factors: Tensor, blocks: int, lanes: int) -> Tensor:
    """Factors `[out, groups]` as `[blocks, lanes, groups]`."""
    return F.pad(factors, (0, 0, 0, blocks * lanes - len(factors))).view(blocks, lanes, -1)
