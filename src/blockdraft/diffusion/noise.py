"""Noise: how many tokens of a block are masked, which, and what each of them weighs in the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """The probability m(t) that a token is masked at the time t in (0, 1], which rises from 0 to 1.

    Attributes:
        rate: m.
        weight: m' / m: what the loss of a masked token weighs, so that the mean over uniform t is the bound.
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
    """Attributes:
    masked: `[B, L]` bool.
    weights: `[B, L]` float32, of the losses of masked tokens; 0 elsewhere.
    """

    masked: Tensor
    weights: Tensor


def stratified(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers in (0, 1], float64, one in each of as many equal parts of the interval as there are, in random order.

    Their order matters: left as they are, the blocks of a row would all have about one noise level.
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
    """Each block of each row gets a time t, and each of its tokens is masked with the probability m(t).

    Args:
        eligible_BL: Bool; which tokens may be masked.
        schedule: A key of `SCHEDULES`.
        clip: The times that are drawn lie between these two. Less than (0, 1) is no bound on the likelihood any more,
            but learns with less variance.
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
    """The noise of blocks whose times are known.

    Args:
        times_BK: Float64 in (0, 1], one for each block.
        eligible_BL, schedule: As in `training_noise`.
        complementary: Follow the rows by as many others in which just those are masked that here are not, at the time
            1 - t; so each token is learned once. It takes the linear schedule.

    Returns:
        Of B rows, or of 2 * B.
    """
    assert not complementary or schedule == "linear"
    length = eligible_BL.size(1)
    t = times_BK.repeat_interleave(block_size, dim=1)[:, :length]
    chosen = torch.rand(t.shape, generator=generator, dtype=torch.float64) < SCHEDULES[schedule].rate(t)
    masked, weights = chosen & eligible_BL, SCHEDULES[schedule].weight(t)
    if complementary:
        masked = torch.cat([masked, ~chosen & eligible_BL])
        weights = torch.cat([weights, 1 / (1 - t).clamp(min=1e-9)])  # at t = 1 nothing is left to weigh
    return Noise(masked, weights.float().masked_fill(~masked, 0.0))


def counted_noise(eligible_BL: Tensor, block_size: int, generator: torch.Generator) -> Noise:
    """Mask k of the n eligible tokens of each block, with k from 1 to n equally likely, each weighing n / k.

    In the mean over k and over which tokens these are, the weighted losses are the bound, just as over continuous times
    of any schedule: the time of the latter only decides how many are masked. But they vary less. Blocks of one token
    leave no choice, and there the bound is the likelihood itself.
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
