"""Logits to probabilities, and the only place where tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.types import SamplingParams


def probabilities(logits_BNV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The target's distribution p under each row's sampling parameters.

    Args:
        logits_BNV: Logits `[B, N, V]`, any float dtype.
        params: One entry a row. Temperature comes first, then top-k, then top-p, as in transformers.

    Returns:
        `[B, N, V]` float32, each row summing to 1; one-hot where the temperature is 0. Of equal logits the lowest
        token id wins, and top-k keeps the lower ids.
    """
    return torch.stack([_row_probabilities(logits, p) for logits, p in zip(logits_BNV, params, strict=True)])


def _row_probabilities(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    if params.temperature == 0:
        best_N1 = logits_NV.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits_NV, dtype=torch.float32).scatter_(-1, best_N1, 1.0)
    logits_NV = logits_NV.float()
    # The maximum goes first, so that no temperature, however low, overflows.
    scores = (logits_NV - logits_NV.max(dim=-1, keepdim=True).values) / params.temperature
    if params.top_k == 0 and params.top_p == 1:
        return scores.softmax(dim=-1)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    if 0 < params.top_k < scores.size(-1):
        scores[..., params.top_k :] = -torch.inf
    probs = scores.softmax(dim=-1)
    # A token stays if the tokens before it do not reach top_p yet; the first one always stays.
    probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= params.top_p, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, probs)


def draw(probs_BNV: Tensor, uniforms_BN: Tensor) -> Tensor:
    """Draw one token from each distribution by inverting its cumulative sum.

    Args:
        probs_BNV: Distributions `[B, N, V]`.
        uniforms_BN: Numbers in [0, 1), float64, one a distribution. The same number always gives the same token, so
            that the caller decides which draws are coupled.

    Returns:
        Token ids `[B, N]`, int64; never a token of probability 0.
    """
    probs_BNV = probs_BNV.cpu() if probs_BNV.device.type == "mps" else probs_BNV  # which has no float64
    cumulative = probs_BNV.double().cumsum(dim=-1)
    threshold = uniforms_BN.to(cumulative.device).unsqueeze(-1) * cumulative[..., -1:]
    # Rounding could push the threshold up to the total, hence past the last token that has mass.
    threshold = threshold.minimum(cumulative[..., -1:] * (1 - 1e-15))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


class RandomNumbers:
    """The uniform numbers of one request: number i decides output token i, whoever asks and how often.

    Because a number belongs to a position and not to a moment, the same seed gives the same tokens with any drafter,
    block size or neighbours.
    """

    CHUNK = 256  # numbers drawn at once; part of what a seed means

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        self._generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
        self._numbers = torch.empty(0, dtype=torch.float64)

    def at(self, positions: Tensor) -> Tensor:
        """Numbers in [0, 1) for these output positions, any shape, float64."""
        while len(self._numbers) <= int(positions.max()):
            new = torch.rand(self.CHUNK, generator=self._generator, dtype=torch.float64)
            self._numbers = torch.cat([self._numbers, new])
        return self._numbers[positions]
