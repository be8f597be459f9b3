"""Noise: which tokens of a block are masked, and their weights in the bound on the likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.text import Tokens

ALL_TIMES = (0.001, 1.0)
WIDTHS, STEP = (0.5, 0.6, 0.7, 0.8, 0.9), 0.05
LEAST = 8  # blocks that an interval must hold for its variance to count


@dataclass(frozen=True)
class Schedule:
    """Noise schedule: the probability m(t) that a token is masked at time t in (0, 1], which rises from 0 to 1.

    Attributes:
        rate: m.
        weight: m' / m, the weight of a masked token's loss with which the mean over uniform t is the bound.
    """

    rate: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]


SCHEDULES = {
    "linear": Schedule(lambda t: t, lambda t: 1 / t),
    "square": Schedule(lambda t: t.square(), lambda t: 2 / t),
    "root": Schedule(lambda t: t.sqrt(), lambda t: 0.5 / t),
    "logarithmic": Schedule(lambda t: torch.log2(1 + t), lambda t: 1 / ((1 + t) * torch.log1p(t))),
    "cosine": Schedule(
        lambda t: 1 - torch.cos(t * math.pi / 2),
        lambda t: math.pi / 2 * torch.sin(t * math.pi / 2) / (1 - torch.cos(t * math.pi / 2)),
    ),
}


class Noise(NamedTuple):
    """Noise of B rows of L tokens.

    Attributes:
        masked: Tokens that are hidden, `[B, L]` bool.
        weights: Weights of their losses, `[B, L]` float32; 0 elsewhere.
    """

    masked: Tensor
    weights: Tensor


def stratified(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Stratified random numbers in (0, 1], float64: one in each of as many equal parts of the interval, shuffled.

    Without the shuffle, the blocks of one row would all have about the same noise level.
    """
    count = math.prod(shape)
    places = torch.randperm(count, generator=generator)
    return (1 - (places + torch.rand(count, generator=generator, dtype=torch.float64)) / count).view(shape)


def training_noise(
    eligible_BL: Tensor,
    block_size: int,
    schedule: str,
    clip: tuple[float, float],
    generator: torch.Generator,
    complementary: bool = False,
) -> Noise:
    """Noise of a training step: each block samples a time t, and masks each of its tokens with probability m(t).

    Args:
        eligible_BL: Tokens that may be masked, bool.
        schedule: A key of `SCHEDULES`.
        clip: Least and largest time. Narrower than (0, 1), the loss is no longer a bound on the likelihood, but has
            less variance.
        complementary: As in `noise_at`.
    """
    low, high = clip
    shape = len(eligible_BL), -(-eligible_BL.size(1) // block_size)
    times_BK = low + (high - low) * stratified(shape, generator)
    return noise_at(times_BK, eligible_BL, block_size, schedule, generator, complementary)


def noise_at(
    times_BK: Tensor,
    eligible_BL: Tensor,
    block_size: int,
    schedule: str,
    generator: torch.Generator,
    complementary: bool = False,
) -> Noise:
    """Noise of blocks at given times.

    Args:
        times_BK: Float64 in (0, 1], one for each block.
        eligible_BL, schedule: As in `training_noise`.
        complementary: Append as many rows in which exactly the other tokens are masked, at time 1 - t, so that each
            token is learned once. Needs the linear schedule.

    Returns:
        Noise of B rows, or of 2 * B if `complementary`.
    """
    assert not complementary or schedule == "linear"
    length = eligible_BL.size(1)
    t = times_BK.repeat_interleave(block_size, dim=1)[:, :length]
    chosen = torch.rand(t.shape, generator=generator, dtype=torch.float64) < SCHEDULES[schedule].rate(t)
    masked, weights = chosen & eligible_BL, SCHEDULES[schedule].weight(t)
    if complementary:
        masked = torch.cat([masked, ~chosen & eligible_BL])
        weights = torch.cat([weights, 1 / (1 - t).clamp(min=1e-9)])  # no division by 0 at t = 1
    return Noise(masked, weights.float().masked_fill(~masked, 0.0))


def counted_noise(eligible_BL: Tensor, block_size: int, generator: torch.Generator) -> Noise:
    """Noise that masks k of the n eligible tokens of each block, k from 1 to n equally likely, with weights n / k.

    The expectation of the weighted losses is the same bound as over continuous times of any schedule, where the time
    only decides how many tokens are masked, but with less variance. In blocks of one token there is no choice, and the
    bound is the likelihood itself.
    """
    batch, length = eligible_BL.shape
    blocks = -(-length // block_size)
    eligible = F.pad(eligible_BL, (0, blocks * block_size - length)).view(batch, blocks, block_size)
    able = eligible.sum(dim=-1)
    count = (stratified((batch, blocks), generator) * able).ceil().long()
    keys = torch.rand(eligible.shape, generator=generator, dtype=torch.float64).masked_fill(~eligible, 2.0)
    masked = keys.argsort(dim=-1).argsort(dim=-1) < count[..., None]
    weights = (able / count.clamp(min=1))[..., None] * masked
    masked, weights = (each.reshape(batch, -1)[:, :length] for each in (masked, weights))
    return Noise(masked, weights.float())


def intervals() -> list[tuple[float, float]]:
    """Intervals that are compared: all times first, then windows of each width."""
    found = [ALL_TIMES]
    for width in WIDTHS:
        starts = (STEP * place for place in range(round((1 - width) / STEP) + 1))
        found += [(max(round(start, 2), ALL_TIMES[0]), round(start + width, 2)) for start in starts]
    return found


def steadiest(times: Tensor, losses: Tensor) -> tuple[float, float]:
    """Interval of times in which the losses of blocks vary least (arXiv 2503.09573).

    The paper samples times anew for each interval. One uniform sample serves all of them, since its times inside an
    interval are uniform there too.

    Args:
        times: Time of each block, `[K]` float64, uniform from 0 to 1.
        losses: Mean loss of each block's tokens, `[K]`, weighted as in the bound.
    """
    variances = dict[tuple[float, float], float]()
    for low, high in intervals():
        inside = losses[(times >= low) & (times <= high)].double()
        if len(inside) >= LEAST:
            variances[low, high] = torch.var(inside).item()
    return min(variances, key=variances.__getitem__, default=ALL_TIMES)


def steadiest_of(
    model: DiffusionModel,
    batches: Iterable[Tokens],
    schedule: str,
    generator: torch.Generator,
    compute: Callable[[DiffusionModel, Tensor, Noise], Tensor],
) -> tuple[float, float]:
    """`steadiest` over the blocks of some batches.

    Args:
        batches: Batches of `[B, L]` tokens.
        schedule: A key of `SCHEDULES`.
        generator: Source of the noise.
        compute: `losses`, or a function with the same results.
    """
    size, found_times, found_losses = model.config.block_size, [], []
    for ids, eligible in batches:
        times = stratified((len(ids), -(-ids.size(1) // size)), generator)
        noise = noise_at(times, eligible, size, schedule, generator)
        blocks = torch.arange(ids.size(1)) // size
        sums = torch.zeros(times.shape).index_add(1, blocks, compute(model, ids, noise).float().cpu())
        able = torch.zeros(times.shape).index_add(1, blocks, eligible.float())
        found_times.append(times[able > 0])
        found_losses.append((sums / able)[able > 0])
    return steadiest(torch.cat(found_times), torch.cat(found_losses))
