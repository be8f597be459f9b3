"""How weights are quantized: `quantize_weight` rounds each number to the nearest code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import MAX_CODE, QuantizedWeight, check_group, concatenate_weights, narrow

SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # ranges to try, as shares of the largest number
QUICK = (1.0, 0.9)  # ranges to try while a user waits for the model
ROUNDED_AT_ONCE = 1 << 18  # numbers to quantize at once, few enough for the processor's cache


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
        return (-8, 7) if self.bits == 4 else (-MAX_CODE, MAX_CODE)

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
        return [Grid(_in_half(extreme.abs() / MAX_CODE), None, bits)]
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
