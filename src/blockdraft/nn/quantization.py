"""Quantized weights, and matrix products with them in integers. `quantize_weight.py` makes them.

A weight is `scale * codes + offset`, with a scale and an offset for each output channel and group of inputs. Inputs of
a product are quantized to int8 with a scale for each token and group, or run of groups with nested factors. So a large
input costs precision only there. Sums within it are sums of integers, which are the same in any order. So the result
for a token does not depend on what else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import UsageError

MAX_CODE = 127  # largest code of an input
MIN_INPUT = 1e-30  # a group whose largest number is not above this becomes 0
GROUPS = (128, 64, 32, 16, 8)  # sizes that `best_group` chooses from, the best first
MIN_GROUP = GROUPS[-1]
MAX_GROUP = 65536  # largest group whose products compiled kernels add without overflow
MAX_NESTED = 256  # most inputs that share a unit, for the same reason
NESTED_BASE = 32  # added to 8-bit codes of nested factors
PIECE = 1 << 20  # codes to interleave at once
HIGH_BITS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]  # places of the high bits of 6-bit codes
# Twice the values of the 4-bit floating-point numbers E2M1, by their bits.
FLOAT4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


@dataclass(frozen=True)
class NestedFactors:
    """Scales or offsets of groups, as integers times a unit that several groups share.

    Args:
        numbers: `[out, groups]` int8.
        unit: `[out, units]` float16, one for each run of `span` groups, a power of two from 2 on.
    """

    numbers: Tensor
    unit: Tensor

    def __post_init__(self) -> None:
        assert self.numbers.dtype == torch.int8 and self.unit.dtype == torch.float16, (self.numbers, self.unit)
        assert self.numbers.size(1) == self.unit.size(1) * self.span, self.unit.shape
        assert self.span > 1 and self.span.bit_count() == 1, self.span

    @property
    def span(self) -> int:
        """Number of groups that share a unit."""
        return self.numbers.size(1) // self.unit.size(1)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.unit.nbytes

    def float(self) -> Tensor:
        """Return the factors, `[out, groups]` float32. No product is rounded."""
        products: Tensor = self.numbers.float().unflatten(1, (-1, self.span)) * self.unit.float().unsqueeze(-1)
        return products.flatten(1)


# Scales or offsets `[out, groups]`: in float32, in float16 where that represents them exactly, or nested.
Factors: TypeAlias = Tensor | NestedFactors


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight `[out, in]`.

    Args:
        codes: `[out, in]` int8. With 4 bits from -8 to 7, or from 0 to 15 if there is an offset or if they are
            `floating`. With 8 bits and nested factors from -32 to 31.
        scale: `[out, in / group]`. If it is nested, at most 256 inputs share a unit.
        offset: The same shape; None is 0. It is nested if the scale is, with as many units.
        bits: 4 or 8.
        floating: Whether codes are indices of `FLOAT4`. Then there are 4 bits, no nested scales, and no offset.
    """

    codes: Tensor
    scale: Factors
    offset: Factors | None
    bits: int
    floating: bool = False

    def __post_init__(self) -> None:
        assert not self.floating or (self.bits == 4 and self.offset is None and isinstance(self.scale, Tensor))
        assert self.bits in (4, 8) and self.codes.dtype == torch.int8, (self.bits, self.codes.dtype)
        assert len(self.scale.shape) == 2 and self.scale.shape[0] == len(self.codes), (self.scale.shape, self.shape)
        assert self.codes.size(1) == self.scale.shape[1] * self.group, (self.scale.shape, self.codes.shape)
        assert self.group % MIN_GROUP == 0, self.group
        if self.offset is not None:
            assert self.offset.shape == self.scale.shape, (self.offset.shape, self.scale.shape)
        for name, factors in (("scale", self.scale), ("offset", self.offset)):
            if isinstance(factors, Tensor):
                assert factors.dtype in (torch.float16, torch.float32), f"{name} is {factors.dtype}"
        assert len(spans(self.scale, self.offset)) < 2, "the units of scale and offset are of different groups"
        if self.offset is not None:
            assert isinstance(self.scale, NestedFactors) == isinstance(self.offset, NestedFactors), "only one is nested"
        assert not isinstance(self.scale, NestedFactors) or self.sharing <= MAX_NESTED, self.sharing

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.codes.size(1) // self.scale.shape[1]

    @property
    def sharing(self) -> int:
        """Number of inputs that share a factor when they are quantized."""
        return self.group * (self.scale.span if isinstance(self.scale, NestedFactors) else 1)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def stored_bits(self) -> int:
        """Bits of a packed code."""
        return 6 if self.bits == 8 and isinstance(self.scale, NestedFactors) else self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of the weight once it is packed."""
        factors = self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes)
        return self.codes.numel() * self.stored_bits // 8 + factors

    @property
    def integers(self) -> Tensor:
        """The numbers `[out, in]` int8 that scales are multiplied with."""
        return FLOAT4[self.codes.int()] if self.floating else self.codes

    def dequantize(self) -> Tensor:
        """Return the weight `[out, in]` in float32."""
        codes = self.integers.float().unflatten(1, (-1, self.group))
        weight: Tensor = codes * self.scale.float().unsqueeze(-1)
        if self.offset is not None:
            weight = weight + self.offset.float().unsqueeze(-1)
        return weight.flatten(1)

    def channels(self, index: Tensor | slice) -> QuantizedWeight:
        """Return the output channels with these indices, `[n]` int64, or those of a slice on the same memory."""
        scale = _map_factors(self.scale, lambda part: part[index])
        offset = None if self.offset is None else _map_factors(self.offset, lambda part: part[index])
        return QuantizedWeight(self.codes[index], scale, offset, self.bits, self.floating)

    def multiply(self, x: Tensor) -> Tensor:
        """Return `quantized(x) @ weight.T`, `[n, in]` to `[n, out]` float32, as the compiled kernels do."""
        codes, factor = quantize_inputs(x, self.sharing)
        if isinstance(self.scale, NestedFactors):
            return self._multiply_nested(codes.double().unflatten(1, (-1, self.sharing)), factor)
        out, integers = x.new_zeros(len(x), len(self.codes)), self.integers
        own_scale, own_offset = self.scale.float(), None if self.offset is None else self.offset.float()
        for number in range(own_scale.size(1)):
            part = slice(number * self.group, (number + 1) * self.group)
            scale = factor[:, number, None]
            # Sums of integers below 2^24 are exact in float32.
            sums = codes[:, part] @ integers[:, part].float().T
            out = out + sums * (own_scale[:, number] * scale)
            if own_offset is not None:
                out = out + own_offset[:, number] * (codes[:, part].sum(1, keepdim=True) * scale)
        return out

    def _multiply_nested(self, codes: Tensor, factor: Tensor) -> Tensor:
        """Multiply codes of inputs, `[n, units, in / units]` float64, whose sums are exact, with their factors."""
        own = self.codes.double().unflatten(1, (-1, self.group))
        out = factor.new_zeros(len(codes), len(own))
        for factors, times in ((self.scale, own), (self.offset, torch.ones_like(own))):
            if not isinstance(factors, NestedFactors):
                continue
            scaled = (times * factors.numbers.unsqueeze(-1)).view(len(own), -1, self.sharing)
            for number in range(factors.unit.size(1)):
                sums = (codes[:, number] @ scaled[:, number].T).float()
                out = out + sums * (factors.unit[:, number].float() * factor[:, number, None])
        return out


def quantize_inputs(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the codes of inputs `[n, in]`, integers from -127 to 127, and the factor of each group, `[n, in / group]`.

    Both are float32. The factor of a group with a non-finite number is NaN.
    """
    parts = x.float().unflatten(1, (-1, group))
    largest = parts.abs().amax(-1)
    nonzero = largest > MIN_INPUT
    # torch computes number / tensor as number * (1 / tensor), which rounds twice. Tensor / tensor rounds once.
    inverse = torch.where(nonzero, torch.full_like(largest, MAX_CODE) / largest, 0.0)
    factor = torch.where(nonzero, largest / torch.full_like(largest, MAX_CODE), 0.0)
    codes = (parts * inverse.unsqueeze(-1)).round().clamp(-MAX_CODE, MAX_CODE)
    finite = parts.isfinite().all(-1)
    return torch.where(finite.unsqueeze(-1), codes, 0.0).flatten(1), torch.where(finite, factor, torch.nan)


def best_group(inputs: int) -> int:
    """Return the largest group up to 128 that divides a number of inputs.

    Raises:
        UsageError: No group does.
    """
    for group in GROUPS:
        if inputs % group == 0:
            return group
    raise UsageError(
        f"A weight of {inputs} inputs cannot be quantized, because no group of {MIN_GROUP} to {GROUPS[0]} divides "
        "them. Leave quantize out."
    )


def check_group(inputs: int, group: int) -> None:
    """Raise a UsageError unless the group divides the inputs, and compiled kernels can read it."""
    if group < MIN_GROUP or group % MIN_GROUP:
        raise UsageError(f"group must be a multiple of {MIN_GROUP}, got {group}.")
    if inputs % group:
        fitting = ", ".join(str(size) for size in GROUPS if inputs % size == 0)
        raise UsageError(f"Groups of {group} do not divide {inputs} inputs; {fitting or 'no supported group'} would.")


def concatenate_weights(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate quantized weights along the output dimension.

    Mixed bit widths are widened, and group sizes are reduced to their greatest common divisor, so values stay exact.
    """
    floating, group = all(part.floating for part in parts), gcd(*(part.group for part in parts))
    bits = max(8 if part.floating and not floating else part.bits for part in parts)
    shifted = any(part.offset is not None for part in parts)
    codes, offsets = [], list[Factors]()
    for part in parts:
        own, offset = part.codes if floating else part.integers, part.offset
        if offset is None and bits == 4 and shifted:
            own, offset = own + 8, -8 * part.scale.float()
        codes.append(own)
        offsets.append(_map_factors(part.scale, torch.zeros_like) if offset is None else offset)
    times = [part.group // group for part in parts]
    scale = _concatenate_factors([part.scale for part in parts], times)
    offset = _concatenate_factors(offsets, times) if shifted else None
    if offset is not None and isinstance(scale, NestedFactors) != isinstance(offset, NestedFactors):
        scale, offset = narrow(scale.float()), narrow(offset.float())
    return QuantizedWeight(torch.cat(codes), scale, offset, bits, floating)


def _concatenate_factors(parts: Sequence[Factors], times: Sequence[int]) -> Factors:
    """Concatenate factors, each group's repeated for the groups that it is split into."""
    repeated = [
        NestedFactors(part.numbers.repeat_interleave(count, 1), part.unit)
        for part, count in zip(parts, times, strict=True)
        if isinstance(part, NestedFactors) and count.bit_count() == 1
    ]
    if len(repeated) == len(parts) and len(spans(*repeated)) == 1:
        numbers, units = torch.cat([part.numbers for part in repeated]), torch.cat([part.unit for part in repeated])
        return NestedFactors(numbers, units)
    return narrow(torch.cat([part.float().repeat_interleave(n, 1) for part, n in zip(parts, times, strict=True)]))


def spans(*factors: Factors | None) -> set[int]:
    """Return the spans of those factors that are nested."""
    return {factor.span for factor in factors if isinstance(factor, NestedFactors)}


def _map_factors(factors: Factors, function: Callable[[Tensor], Tensor]) -> Factors:
    """Apply a function to the tensors of factors."""
    if isinstance(factors, Tensor):
        return function(factors)
    return NestedFactors(function(factors.numbers), function(factors.unit))


def narrow(factors: Tensor) -> Tensor:
    """Return scales or offsets as float16 if that represents all of them exactly, else as float32."""
    half = factors.half()
    return half if torch.equal(half.float(), factors.float()) else factors.float()


@dataclass(frozen=True)
class InterleavedWeight:
    """A `QuantizedWeight` packed for compiled kernels, with `lanes` output channels side by side.

    Args:
        codes: uint8. With 8 bits `[blocks, in / 4, lanes, 4]`; with 4 bits `[blocks, in / 8, lanes, 4]`, of each 8
            inputs the first 4 in the low halves of bytes, from 0 to 15. If `floating`, they are indices of `FLOAT4`.
            8-bit codes with nested factors take 6 bits, from 0 to 63: `[blocks, in / 16 * 3, lanes, 4]`, of each 16
            inputs the low 4 bits as above, then the high 2 bits of each 4 inputs that are 4 apart.
        scale, offset: `[blocks, in / group, lanes]`, as in `QuantizedWeight`; units `[blocks, units, lanes]`.
        bits, floating: As in `QuantizedWeight`.
        outputs: Number of output channels. The last block is padded with zeros.
    """

    codes: Tensor
    scale: Factors
    offset: Factors | None
    bits: int
    outputs: int
    floating: bool = False

    @classmethod
    def of(cls, weight: QuantizedWeight, lanes: int) -> InterleavedWeight:
        """Pack a weight."""
        count, inputs = weight.shape
        blocks = -(-count // lanes)
        words = torch.empty(blocks, inputs * weight.stored_bits // 32, lanes, 4, dtype=torch.uint8)
        step, base = max(1, PIECE // (lanes * inputs)), _base(weight)
        for begin in range(0, blocks, step):  # pieces need little extra memory
            codes = weight.codes[begin * lanes : (begin + step) * lanes] + base
            assert base != NESTED_BASE or not bool((codes & -2 * NESTED_BASE).any()), "codes of over 6 bits"
            piece = F.pad(codes, (0, 0, 0, -len(codes) % lanes)).view(torch.uint8)
            if base == NESTED_BASE:
                fours = piece.view(-1, lanes, inputs // 16, 4, 4)
                low, high = _paired_halves(fours & 15), (fours >> 4 << HIGH_BITS).sum(3, True, dtype=torch.uint8)
                parts = torch.cat([low, high], 3).flatten(2, 3)
            elif weight.bits == 4:
                parts = _paired_halves(piece.view(-1, lanes, inputs // 4, 4))
            else:
                parts = piece.view(-1, lanes, inputs // 4, 4)
            words[begin : begin + step] = parts.transpose(1, 2)
        interleave = partial(_in_blocks, blocks=blocks, lanes=lanes)
        scale = _map_factors(weight.scale, interleave)
        offset = None if weight.offset is None else _map_factors(weight.offset, interleave)
        return cls(words, scale, offset, weight.bits, count, weight.floating)

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name: "weight", "scale", and if present "scale_unit", "offset" and "offset_unit"."""
        tensors = {"weight": self.codes}
        for name, factors in (("scale", self.scale), ("offset", self.offset)):
            if isinstance(factors, NestedFactors):
                tensors |= {name: factors.numbers, f"{name}_unit": factors.unit}
            elif factors is not None:
                tensors[name] = factors
        return tensors

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, Tensor], bits: int, outputs: int, floating: bool = False
    ) -> InterleavedWeight:
        """Return the weight with these `tensors`."""
        scale, offset = (
            NestedFactors(tensors[name], tensors[f"{name}_unit"]) if f"{name}_unit" in tensors else tensors.get(name)
            for name in ("scale", "offset")
        )
        assert scale is not None
        return cls(tensors["weight"], scale, offset, bits, outputs, floating)

    def blocks(self, begin: int, end: int) -> InterleavedWeight:
        """Return some blocks of output channels, on the same memory."""
        lanes, own = self.codes.size(2), slice(begin, end)
        scale = _map_factors(self.scale, lambda part: part[own])
        offset = None if self.offset is None else _map_factors(self.offset, lambda part: part[own])
        outputs = min(end * lanes, self.outputs) - begin * lanes
        return replace(self, codes=self.codes[own], scale=scale, offset=offset, outputs=outputs)

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.codes.size(1) * 32 // self.stored_bits // self.scale.shape[1]

    @property
    def stored_bits(self) -> int:
        """As in `QuantizedWeight`."""
        return 6 if self.bits == 8 and isinstance(self.scale, NestedFactors) else self.bits

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def channels(self, index: Tensor) -> QuantizedWeight:
        """Return the output channels with these indices, `[n]` int64."""
        block, lane = index // self.codes.size(2), index % self.codes.size(2)
        codes = self.codes[block, :, lane]
        if self.stored_bits == 6:
            low, high = codes.unflatten(1, (-1, 3)).split([2, 1], 2)
            codes = _apart(low) | (high >> HIGH_BITS & 3) << 4
        elif self.bits == 4:
            codes = _apart(codes)
        codes = codes - _base(self)
        scale = _map_factors(self.scale, lambda part: part[block, :, lane])
        offset = None if self.offset is None else _map_factors(self.offset, lambda part: part[block, :, lane])
        return QuantizedWeight(codes.flatten(1).view(torch.int8), scale, offset, self.bits, self.floating)

    def weight(self) -> QuantizedWeight:
        """Return the weight unpacked."""
        return self.channels(torch.arange(self.outputs))


def _base(weight: QuantizedWeight | InterleavedWeight) -> int:
    """Return the number that is added to codes where kernels need them to be 0 or more."""
    if weight.bits == 4:
        return 8 if weight.offset is None and not weight.floating else 0
    return NESTED_BASE if isinstance(weight.scale, NestedFactors) else 0


def _paired_halves(codes: Tensor) -> Tensor:
    """Put each two fours of 4-bit codes `[..., fours, 4]` into one, the second into the high halves of bytes."""
    low, high = codes.unflatten(-2, (-1, 2)).unbind(-2)
    pairs: Tensor = low | high << 4
    return pairs


def _apart(codes: Tensor) -> Tensor:
    """Undo `_paired_halves`."""
    return torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)


def _in_blocks(factors: Tensor, blocks: int, lanes: int) -> Tensor:
    """Return factors `[out, groups]` as `[blocks, groups, lanes]`."""
    padded = F.pad(factors, (0, 0, 0, blocks * lanes - len(factors)))
    return padded.view(blocks, lanes, -1).transpose(1, 2).contiguous()
