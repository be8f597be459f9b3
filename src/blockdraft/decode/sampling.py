"""Sampling of tokens from distributions, and the random numbers that decide."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def draw(probs_BNV: Tensor, uniforms_BN: Tensor) -> Tensor:
    """Sample one token from each distribution by inverting its cumulative sum.

    Args:
        probs_BNV: Distributions `[B, N, V]`, which need not be normalised.
        uniforms_BN: Numbers in [0, 1), float64, one per distribution. The same number always gives the same token, so
            the caller decides which draws are coupled.

    Returns:
        Token ids `[B, N]`, int64; never a token of probability 0.
    """
    cumulative = exact(probs_BNV).cumsum(dim=-1)
    # Rounding could push the threshold up to the total, beyond the last token that has mass.
    share = uniforms_BN.to(cumulative.device).clamp(max=1 - 1e-15).unsqueeze(-1)
    return torch.searchsorted(cumulative, cumulative[..., -1:] * share, right=True).squeeze(-1)


def exact(values: Tensor) -> Tensor:
    """Return the values in float64, on the CPU if their device has no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


class RandomNumbers:
    """Generates the uniform numbers of one request: number i decides output token i, however often it is requested.

    A number belongs to a position of the output and not to a moment. So the same seed gives the same tokens with any
    drafter that chooses its draft tokens, any block size and any neighbors in the batch. Sampled draft tokens, and the
    tests whether to accept them, need numbers of their own (`fresh`). With these the tokens of a seed depend on the
    drafter, and only their distribution does not.
    """

    CHUNK = 256  # numbers generated at once; another size would change what a seed gives

    def __init__(self, seed: int | None) -> None:
        # Not from torch's generator, whose state torch.compile restores behind what other threads have drawn meanwhile.
        self._seed = secrets.randbits(62) if seed is None else seed
        self._generator = torch.Generator()
        self._generator.manual_seed(self._seed)
        self._numbers = np.empty(0)

    def at(self, positions: Sequence[int]) -> Tensor:
        """Return numbers in [0, 1) for these output positions, float64."""
        while len(self._numbers) <= max(positions):
            new = torch.rand(self.CHUNK, generator=self._generator, dtype=torch.float64)
            self._numbers = np.concatenate([self._numbers, new.numpy()])
        return torch.from_numpy(self._numbers[list(positions)])

    def fresh(self, start: int, count: int) -> Tensor:
        """Return numbers in [0, 1) for what one step samples besides the output tokens, `[count]` float64.

        They are independent of those of `at` and of every other start. A smaller count gives the first of them.

        Args:
            start: Output tokens committed before the step. Each step commits at least one, so no start recurs.
        """
        bits = np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(start,)))
        return torch.from_numpy(np.random.Generator(bits).random(count))
