"""Noise: which tokens of a block are masked, and the weights of their losses in the likelihood bound."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Noise(NamedTuple):
    """Noise of B sequences of L tokens.

    Attributes:
        masked: Masked tokens, `[B, L]` bool.
        weights: Weights of their losses, `[B, L]` float32; 0 elsewhere.
    """

    masked: Tensor
    weights: Tensor


def stratified(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Sample stratified random numbers in (0, 1], float64: one per equal part of the interval, shuffled.

    Without the shuffle, the blocks of one sequence would all have about the same noise level.
    """
    count = math.prod(shape)
    strata = torch.randperm(count, generator=generator)
    return (1 - (strata + torch.rand(count, generator=generator, dtype=torch.float64)) / count).view(shape)


def training_noise(
    eligible_BL: Tensor, block_size: int, clip: tuple[float, float], generator: torch.Generator
) -> Noise:
    """Sample the noise of a training step: a time t in (0, 1] per block, and each token masked with probability t.

    Args:
        eligible_BL: Tokens that may be masked, bool.
        clip: Minimum and maximum time. An interval narrower than (0, 1) has less variance, but its loss no longer
            bounds the likelihood.
    """
    low, high = clip
    length = eligible_BL.size(1)
    times_BK = low + (high - low) * stratified((len(eligible_BL), -(-length // block_size)), generator)
    t = times_BK.repeat_interleave(block_size, dim=1)[:, :length]
    masked = (torch.rand(t.shape, generator=generator, dtype=torch.float64) < t) & eligible_BL
    # With these weights, the mean over uniform t is the bound.
    return Noise(masked, (1 / t).float().masked_fill(~masked, 0.0))


def counted_noise(eligible_BL: Tensor, block_size: int, generator: torch.Generator) -> Noise:
    """Mask k of the n eligible tokens of each block, k uniform from 1 to n, with weights n / k.

    The weighted losses have the same expectation as with continuous times, which only decide how many tokens are
    masked, but less variance. With blocks of one token the bound is the exact likelihood.
    """
    batch, length = eligible_BL.shape
    blocks = -(-length // block_size)
    eligible = F.pad(eligible_BL, (0, blocks * block_size - length)).view(batch, blocks, block_size)
    num_eligible = eligible.sum(dim=-1)
    count = (stratified((batch, blocks), generator) * num_eligible).ceil().long()
    keys = torch.rand(eligible.shape, generator=generator, dtype=torch.float64).masked_fill(~eligible, 2.0)
    masked = keys.argsort(dim=-1).argsort(dim=-1) < count[..., None]
    weights = (num_eligible / count.clamp(min=1))[..., None] * masked
    masked, weights = (values.reshape(batch, -1)[:, :length] for values in (masked, weights))
    return Noise(masked, weights.float())
