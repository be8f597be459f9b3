"""How weights are rounded to few bits: scales that fit best, and errors that make up for each other.

`compensated` is GPTQ (arXiv 2210.17323): the inputs of a weight are rounded one after the other, those that matter most
first, and what one loses is made up for, as far as the inputs of a text go together, by those that are still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.nn.quantized import MOST_CODE, QuantizedWeight, check_group, joined_weights, narrow

SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # ends of the range that are tried, as shares of the largest number
DAMPING = 0.01  # of the mean square of an input, added to each, so that none is taken for silent
QUICK = (1.0, 0.9)  # the same where a model is waited for
PIECE = 1 << 18  # numbers that are rounded at once, few enough for a cache of the processor
BLOCK = 128  # inputs whose errors are handed on to the others at once


@dataclass(frozen=True)
class Grid:
    """What the codes of each group stand for: `(code - zero) * scale`.

    Args:
        scale: `[out, groups]` float32 that float16 holds, where it can.
        zero: Whole numbers `[out, groups]` float32; None where they are 0.
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
        """Of numbers `[out, groups, n]`."""
        shifted = parts * torch.where(self.scale != 0, 1 / self.scale, 0.0).unsqueeze(-1)
        if self.zero is not None:
            shifted = shifted + self.zero.unsqueeze(-1)
        return shifted.round_().clamp_(*self.limits)

    def values(self, codes: Tensor) -> Tensor:
        """The inverse of `codes`."""
        shifted = codes if self.zero is None else codes - self.zero.unsqueeze(-1)
        return shifted * self.scale.unsqueeze(-1)

    def column(self, group: int) -> Grid:
        """That of one group."""
        zero = None if self.zero is None else self.zero[:, group, None]
        return Grid(self.scale[:, group, None], zero, self.bits)

    def weight(self, codes: Tensor) -> QuantizedWeight:
        """The weight of codes `[out, in]`."""
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
    """The grid whose squared error is least, among some of which the range is shrunk.

    Args:
        parts: Numbers `[out, groups, n]` float32.
        importance: Of the inputs, `[groups, n]`; None is the same for all.
        zero_points: Let ranges begin and end where the numbers do, instead of about 0.
        shares: Ends of the range that are tried, as shares of the largest number; with 8 bits the first one alone.
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
    # 4 bits have one more place below 0 than above: -8 to 7. Shrunk, the largest number may be at either end.
    return [Grid(_in_half(extreme / end), None, bits) for end in (-8, 7)]


def _in_half(scale: Tensor) -> Tensor:
    """Scales rounded to float16, unless they need a wider range."""
    half = scale.half()
    fits = bool(half.isfinite().all()) and bool(((half != 0) == (scale != 0)).all())
    return half.float() if fits else scale


def rounded(
    weight: Tensor, bits: int, group: int, zero_points: bool = False, shares: Sequence[float] = SHRUNK
) -> QuantizedWeight:
    """A weight `[out, in]`, each number rounded to the nearest code.

    Args:
        zero_points, shares: As in `best_grid`.

    Raises:
        UsageError: The group does not divide the inputs.
    """
    check_group(weight.size(1), group)
    found = []
    for rows in weight.split(max(1, PIECE // weight.size(1))):
        parts = rows.float().unflatten(1, (-1, group))
        grid = best_grid(parts, bits, None, zero_points, shares)
        found.append(grid.weight(grid.codes(parts).flatten(1)))
    return joined_weights(found)


def compensated(weight: Tensor, moments: Tensor, bits: int, group: int, zero_points: bool = False) -> QuantizedWeight:
    """A weight `[out, in]`, rounded so that its products with the inputs of a text change little.

    Args:
        moments: `[in, in]`, the sum of `x x^T` over the inputs x.
        zero_points: As in `best_grid`.

    Raises:
        UsageError: The group does not divide the inputs.
    """
    check_group(weight.size(1), group)
    count = weight.size(1)
    moments = moments.float().clone()
    squares = moments.diagonal()
    squares += DAMPING * squares.mean() + torch.finfo(torch.float32).tiny
    grid = best_grid(weight.float().unflatten(1, (-1, group)), bits, squares.view(-1, group), zero_points)
    order = squares.argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    # Row i says how an error at input i is made up for by those behind it.
    spread = torch.linalg.cholesky(inverse, upper=True)
    left, codes = weight.float()[:, order], torch.empty_like(weight, dtype=torch.float32)
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        errors = torch.zeros(len(weight), end - begin)
        for i in range(begin, end):
            own = grid.column(int(order[i]) // group)
            numbers = left[:, i, None, None]
            chosen = own.codes(numbers)
            codes[:, order[i]] = chosen[:, 0, 0]
            error = (left[:, i] - own.values(chosen)[:, 0, 0]) / spread[i, i]
            left[:, i:end] -= torch.outer(error, spread[i, i:end])
            errors[:, i - begin] = error
        left[:, end:] -= errors @ spread[begin:end, end:]
    return grid.weight(codes)
