"""Quantized weights, how weights are quantized, and matrix products with them in integers.

A weight is `scale * codes + offset`, with a scale and an offset for each output channel and group of inputs. Inputs of
a product are quantized to int8 with a scale for each token and group, or run of groups with nested factors. So a large
input costs precision only there. Sums within it are sums of integers, which are the same in any order. So the result
for a token does not depend on what else is computed.

`quantize_weight` rounds each number to the nearest code. `quantize_weight_gptq` is GPTQ (arXiv 2210.17323): it
quantizes the columns of a weight one after the other, those with the largest inputs first, and adjusts the remaining
columns to compensate each error, as far as inputs are correlated.
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

MOST_CODE = 127  # largest code of an input
LEAST_INPUT = 1e-30  # a group whose largest number is not above this becomes 0
GROUPS = (128, 64, 32, 16, 8)  # sizes that `best_group` chooses from, the best first
LEAST_GROUP = GROUPS[-1]
MOST_GROUP = 65536  # largest group whose products compiled kernels add without overflow
MOST_NESTED = 256  # most inputs that share a unit, for the same reason
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
        assert self.group % LEAST_GROUP == 0, self.group
        if self.offset is not None:
            assert self.offset.shape == self.scale.shape, (self.offset.shape, self.scale.shape)
        for name, factors in (("scale", self.scale), ("offset", self.offset)):
            if isinstance(factors, Tensor):
                assert factors.dtype in (torch.float16, torch.float32), f"{name} is {factors.dtype}"
        assert len(spans(self.scale, self.offset)) < 2, "the units of scale and offset are of different groups"
        if self.offset is not None:
            assert isinstance(self.scale, NestedFactors) == isinstance(self.offset, NestedFactors), "only one is nested"
        assert not isinstance(self.scale, NestedFactors) or self.sharing <= MOST_NESTED, self.sharing

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
    nonzero = largest > LEAST_INPUT
    # torch computes number / tensor as number * (1 / tensor), which rounds twice. Tensor / tensor rounds once.
    inverse = torch.where(nonzero, torch.full_like(largest, MOST_CODE) / largest, 0.0)
    factor = torch.where(nonzero, largest / torch.full_like(largest, MOST_CODE), 0.0)
    codes = (parts * inverse.unsqueeze(-1)).round().clamp(-MOST_CODE, MOST_CODE)
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
        f"A weight of {inputs} inputs cannot be quantized, because no group of {LEAST_GROUP} to {GROUPS[0]} divides "
        "them. Leave quantize out."
    )


def check_group(inputs: int, group: int) -> None:
    """Raise a UsageError unless the group divides the inputs, and compiled kernels can read it."""
    if group < LEAST_GROUP or group % LEAST_GROUP:
        raise UsageError(f"group must be a multiple of {LEAST_GROUP}, got {group}.")
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


SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # ranges to try, as shares of the largest number
QUICK = (1.0, 0.9)  # ranges to try while a user waits for the model
DAMPING = 0.01  # share of the mean square of all inputs that is added to each, so that every input counts
ROUNDED_AT_ONCE = 1 << 18  # numbers to quantize at once, few enough for the processor's cache
BLOCK = 128  # columns whose errors are passed on at once


@dataclass(frozen=True)
class Grid:
    """Values of codes, `(code - zero) * scale` in each group.

    Args:
        scale: `[out, groups]` float32, rounded to float16 where its range allows.
        zero: Integers `[out, groups]` float32; None is 0.
        bits: 4 or 8.
    """

    scale: Tensor
    zero: Tensor | None
    bits: int

    @property
    def limits(self) -> tuple[int, int]:
        if self.zero is not None:
            return 0, (1 << self.bits) - 1
        return (-8, 7) if self.bits == 4 else (-MOST_CODE, MOST_CODE)

    def codes(self, parts: Tensor) -> Tensor:
        """Return the nearest codes of numbers `[out, groups, n]`."""
        shifted = parts * torch.where(self.scale != 0, 1 / self.scale, 0.0).unsqueeze(-1)
        if self.zero is not None:
            shifted = shifted + self.zero.unsqueeze(-1)
        return shifted.round_().clamp_(*self.limits)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes `[out, groups, n]`."""
        shifted = codes if self.zero is None else codes - self.zero.unsqueeze(-1)
        return shifted * self.scale.unsqueeze(-1)

    def column(self, group: int) -> Grid:
        """Return the grid of one group."""
        zero = None if self.zero is None else self.zero[:, group, None]
        return Grid(self.scale[:, group, None], zero, self.bits)

    def weight(self, codes: Tensor) -> QuantizedWeight:
        """Return the quantized weight with codes `[out, in]`."""
        offset = None if self.zero is None else -self.scale * self.zero
        if self.bits == 8 and offset is not None:
            codes, offset = codes - 128, offset + 128 * self.scale
        return QuantizedWeight(codes.to(torch.int8), narrow(self.scale), offset, self.bits)


def best_grid(
    parts: Tensor,
    bits: int,
    importance: Tensor | None = None,
    zero_points: bool = False,
    shares: Sequence[float] = SHRUNK,
) -> Grid:
    """Return the grid with the least squared error, among grids with smaller and smaller ranges.

    Args:
        parts: Numbers `[out, groups, n]` float32.
        importance: Weights of the squared errors `[groups, n]`; None is equal weights.
        zero_points: Whether ranges span from the least to the largest number, instead of being symmetric about 0.
        shares: Ranges to try, as shares of the largest number. With 8 bits only the first is tried.

    Raises:
        UsageError: A number is NaN or infinite.
    """
    best, least = None, torch.empty(0)
    for share in shares if bits == 4 else shares[:1]:
        for grid in _grids(parts, bits, share, zero_points):
            error = (grid.values(grid.codes(parts)) - parts).square_()
            error = error.sum(-1) if importance is None else (error * importance).sum(-1)
            if best is None:
                best, least = grid, error
                continue
            better = error < least
            least = torch.where(better, error, least)
            zero = None if grid.zero is None or best.zero is None else torch.where(better, grid.zero, best.zero)
            best = Grid(torch.where(better, grid.scale, best.scale), zero, bits)
    assert best is not None
    if not bool(best.scale.isfinite().all()):
        raise UsageError("A weight holds NaN or infinity, which cannot be quantized. Repair its checkpoint.")
    return best


def _grids(parts: Tensor, bits: int, share: float, zero_points: bool) -> list[Grid]:
    if zero_points:
        lowest, highest = (share * end for end in (parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)))
        most = (1 << bits) - 1
        scale = _in_half((highest - lowest) / most)
        zero = torch.where(scale != 0, -lowest / scale, 0.0).round().clamp(0, most)
        return [Grid(scale, zero, bits)]
    extreme = share * parts.gather(-1, parts.abs().argmax(-1, keepdim=True)).squeeze(-1)
    if bits == 8:
        return [Grid(_in_half(extreme.abs() / MOST_CODE), None, bits)]
    # 4 bits go from -8 to 7. In a smaller range the largest number may be at either end.
    return [Grid(_in_half(extreme / end), None, bits) for end in (-8, 7)]


def _in_half(scale: Tensor) -> Tensor:
    """Round scales to float16, unless one is out of its range."""
    half = scale.half()
    fits = bool(half.isfinite().all()) and bool(((half != 0) == (scale != 0)).all())
    return half.float() if fits else scale


def quantize_weight(
    weight: Tensor, bits: int, group: int, zero_points: bool = False, shares: Sequence[float] = SHRUNK
) -> QuantizedWeight:
    """Quantize a weight `[out, in]`, each number to the nearest code.

    Args:
        bits, zero_points, shares: As in `best_grid`.
        group: Inputs that share a scale.

    Raises:
        UsageError: The group does not divide the inputs, or a number is NaN or infinite.
    """
    check_group(weight.size(1), group)
    parts_of_weight = []
    for channels in weight.split(max(1, ROUNDED_AT_ONCE // weight.size(1))):
        parts = channels.float().unflatten(1, (-1, group))
        grid = best_grid(parts, bits, None, zero_points, shares)
        parts_of_weight.append(grid.weight(grid.codes(parts).flatten(1)))
    return concatenate_weights(parts_of_weight)


def quantize_weight_gptq(
    weight: Tensor, moments: Tensor, bits: int, group: int, zero_points: bool = False
) -> QuantizedWeight:
    """Quantize a weight `[out, in]` so that its products with typical inputs change little (GPTQ).

    Args:
        moments: `[in, in]`, the sum of `x x^T` over the inputs x.
        bits, zero_points: As in `best_grid`.
        group: Inputs that share a scale.

    Raises:
        UsageError: The group does not divide the inputs, or a number is NaN or infinite.
    """
    check_group(weight.size(1), group)
    count = weight.size(1)
    moments = moments.float().clone()
    squares = moments.diagonal()
    squares += DAMPING * squares.mean() + torch.finfo(torch.float32).tiny
    grid = best_grid(weight.float().unflatten(1, (-1, group)), bits, squares.view(-1, group), zero_points)
    order = squares.argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    # Row i of `spread` is how later columns compensate an error in column i.
    spread = torch.linalg.cholesky(inverse, upper=True)
    remaining, codes = weight.float()[:, order], torch.empty_like(weight, dtype=torch.float32)
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        errors = torch.zeros(len(weight), end - begin)
        for i in range(begin, end):
            own = grid.column(int(order[i]) // group)
            numbers = remaining[:, i, None, None]
            chosen = own.codes(numbers)
            codes[:, order[i]] = chosen[:, 0, 0]
            error = (remaining[:, i] - own.values(chosen)[:, 0, 0]) / spread[i, i]
            remaining[:, i:end] -= torch.outer(error, spread[i, i:end])
            errors[:, i - begin] = error
        remaining[:, end:] -= errors @ spread[begin:end, end:]
    return grid.weight(codes)
