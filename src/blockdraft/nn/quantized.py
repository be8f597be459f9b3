"""Weights of few bits, and products with them in integers.

A weight is `scale * codes + offset`, with a scale and an offset for each output channel and group of inputs. Inputs of
a product are rounded to int8 with a scale for each token and group, so that an input of large numbers costs precision
in its own group only. Sums within a group are of integers and so the same in any order: the result of a token does not
depend on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError

MOST_CODE = 127  # largest code of an input
LEAST_INPUT = 1e-30  # a group whose largest number is no larger is rounded to 0
GROUPS = (128, 64, 32, 16, 8)  # sizes that `best_group` chooses from, the best first
LEAST_GROUP = GROUPS[-1]
MOST_GROUP = 65536  # largest group whose products compiled kernels add up without an overflow
PIECE = 1 << 20  # codes that are interleaved at once


@dataclass(frozen=True)
class NestedFactors:
    """Scales or offsets of groups as whole numbers times a unit, which several groups share.

    Args:
        numbers: `[out, groups]` int8.
        unit: `[out, units]` float16, each of as many groups in order, a power of two.
    """

    numbers: Tensor
    unit: Tensor

    def __post_init__(self) -> None:
        assert self.numbers.dtype == torch.int8 and self.unit.dtype == torch.float16, (self.numbers, self.unit)
        assert self.numbers.size(1) == self.unit.size(1) * self.span and self.span.bit_count() == 1, self.unit.shape

    @property
    def span(self) -> int:
        """Groups that share a unit."""
        return self.numbers.size(1) // self.unit.size(1)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.unit.nbytes

    def float(self) -> Tensor:
        """The factors, `[out, groups]` float32; no product is rounded."""
        products: Tensor = self.numbers.float().unflatten(1, (-1, self.span)) * self.unit.float().unsqueeze(-1)
        return products.flatten(1)


# Scales or offsets `[out, groups]`: in float32, in float16 where that represents them exactly, or nested.
Factors: TypeAlias = Tensor | NestedFactors


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[out, in]` in few bits.

    Args:
        codes: `[out, in]` int8; with 4 bits from -8 to 7, or from 0 to 15 where there is an offset.
        scale: `[out, in / group]`.
        offset: The same; None is 0. Nested ones have as many units as a nested scale has.
        bits: 4 or 8.
    """

    codes: Tensor
    scale: Factors
    offset: Factors | None
    bits: int

    def __post_init__(self) -> None:
        assert self.bits in (4, 8) and self.codes.dtype == torch.int8, (self.bits, self.codes.dtype)
        assert len(self.scale.shape) == 2 and self.scale.shape[0] == len(self.codes), (self.scale.shape, self.shape)
        assert self.codes.size(1) == self.scale.shape[1] * self.group, (self.scale.shape, self.codes.shape)
        assert self.group % LEAST_GROUP == 0, self.group
        if self.offset is not None:
            assert self.offset.shape == self.scale.shape, (self.offset.shape, self.scale.shape)
        for name, each in (("scale", self.scale), ("offset", self.offset)):
            if isinstance(each, Tensor):
                assert each.dtype in (torch.float16, torch.float32), f"{name} is {each.dtype}, not float16 or float32"
        assert len(spans(self.scale, self.offset)) < 2, "the units of scale and offset are of different groups"

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.size(1) // self.scale.shape[1]

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
        scale, offset = (
            None if each is None else _changed(each, lambda part: part[index]) for each in (self.scale, self.offset)
        )
        assert scale is not None
        return QuantizedWeight(self.codes[index], scale, offset, self.bits)

    def multiply(self, x: Tensor) -> Tensor:
        """`round(x) @ weight.T`, `[n, in]` float32 to `[n, out]`: the slow twin of the compiled kernels."""
        codes, factor = round_inputs(x, self.group)
        out = x.new_zeros(len(x), len(self.codes))
        own_scale, own_offset = self.scale.float(), None if self.offset is None else self.offset.float()
        for number in range(own_scale.size(1)):
            part = slice(number * self.group, (number + 1) * self.group)
            scale = factor[:, number, None]
            # Sums of integers below 2^24 are exact in float32.
            sums = codes[:, part] @ self.codes[:, part].float().T
            out = out + sums * (own_scale[:, number] * scale)
            if own_offset is not None:
                out = out + own_offset[:, number] * (codes[:, part].sum(1, keepdim=True) * scale)
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
    codes, offsets = [], list[Factors]()
    for part in parts:
        own, offset = part.codes, part.offset
        if offset is None and bits == 4 and shifted:
            own, offset = own + 8, -8 * part.scale.float()
        codes.append(own)
        offsets.append(_changed(part.scale, torch.zeros_like) if offset is None else offset)
    times = [part.group // group for part in parts]
    scale = _joined([part.scale for part in parts], times)
    return QuantizedWeight(torch.cat(codes), scale, _joined(offsets, times) if shifted else None, bits)


def _joined(parts: Sequence[Factors], times: Sequence[int]) -> Factors:
    """Factors one behind the other, those of each group repeated for the groups that it is split into."""
    repeated = [
        NestedFactors(part.numbers.repeat_interleave(count, 1), part.unit)
        for part, count in zip(parts, times, strict=True)
        if isinstance(part, NestedFactors) and count.bit_count() == 1
    ]
    if len(repeated) == len(parts) and len(spans(*repeated)) == 1:
        return NestedFactors(
            *(torch.cat(own) for own in zip(*((one.numbers, one.unit) for one in repeated), strict=True))
        )
    return narrow(torch.cat([part.float().repeat_interleave(n, 1) for part, n in zip(parts, times, strict=True)]))


def spans(*factors: Factors | None) -> set[int]:
    """Numbers of groups that share a unit, of those that are nested."""
    return {each.span for each in factors if isinstance(each, NestedFactors)}


def _changed(factors: Factors, change: Callable[[Tensor], Tensor]) -> Factors:
    """Factors with something done to each tensor."""
    if isinstance(factors, Tensor):
        return change(factors)
    return NestedFactors(change(factors.numbers), change(factors.unit))


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
        scale, offset: `[blocks, in / group, lanes]`, as in `QuantizedWeight`; units `[blocks, units, lanes]`.
        bits: As in `QuantizedWeight`.
        outputs: Number of output channels; the last block is filled up with zeros.
    """

    codes: Tensor
    scale: Factors
    offset: Factors | None
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
        scale, offset = (
            None if each is None else _changed(each, partial(_in_blocks, blocks=blocks, lanes=lanes))
            for each in (weight.scale, weight.offset)
        )
        assert scale is not None
        return cls(words, scale, offset, weight.bits, count)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors: "weight", "scale", and where there are such, "scale_unit", "offset" and "offset_unit"."""
        found = {"weight": self.codes}
        for name, factors in (("scale", self.scale), ("offset", self.offset)):
            if isinstance(factors, NestedFactors):
                found |= {name: factors.numbers, f"{name}_unit": factors.unit}
            elif factors is not None:
                found[name] = factors
        return found

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], bits: int, outputs: int) -> InterleavedWeight:
        """The weight whose `tensors` these are."""
        scale, offset = (
            NestedFactors(tensors[name], tensors[f"{name}_unit"]) if f"{name}_unit" in tensors else tensors.get(name)
            for name in ("scale", "offset")
        )
        assert scale is not None
        return cls(tensors["weight"], scale, offset, bits, outputs)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.size(1) * 32 // self.bits // self.scale.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def channels(self, index: Tensor) -> QuantizedWeight:
        """Some output channels, `[n]` int64."""
        block, lane = index // self.codes.size(2), index % self.codes.size(2)
        codes = self.codes[block, :, lane]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 2) - (8 if self.offset is None else 0)
        scale, offset = (
            None if each is None else _changed(each, lambda part: part[block, :, lane])
            for each in (self.scale, self.offset)
        )
        assert scale is not None
        return QuantizedWeight(codes.flatten(1).view(torch.int8), scale, offset, self.bits)

    def weight(self) -> QuantizedWeight:
        """The weight before it was packed."""
        return self.channels(torch.arange(self.outputs))


def _in_blocks(factors: Tensor, blocks: int, lanes: int) -> Tensor:
    """Factors `[out, groups]` as `[blocks, groups, lanes]`."""
    padded = F.pad(factors, (0, 0, 0, blocks * lanes - len(factors)))
    return padded.view(blocks, lanes, -1).transpose(1, 2).contiguous()
