"""Likelihood of a text: a bound estimated from noise samples, with an interval, and exact at block size 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import torch

from blockdraft.errors import UsageError
from blockdraft_diffusion.losses import losses
from blockdraft_diffusion.model import DiffusionModel
from blockdraft_diffusion.noise import counted_noise
from blockdraft_diffusion.settings import LikelihoodSettings
from blockdraft_diffusion.text import TextTokens, sequence_length

LEVEL = 0.95  # confidence level of the interval


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a text.

    Attributes:
        perplexity: Perplexity of the predicted tokens; an upper bound unless `exact`.
        bits_per_token: The same in bits.
        low, high: 95 % confidence interval of the perplexity, from the spread of the draws.
        draws: Number of noise samples of the whole text.
        tokens: Number of predicted tokens.
        exact: Whether this is the likelihood itself and no bound, as with blocks of one token.
        by_block: Bits per token by the number of the block in its sequence.
        by_position: Bits per token by the position in the block.
    """

    perplexity: float
    bits_per_token: float
    low: float
    high: float
    draws: int
    tokens: int
    exact: bool
    by_block: list[float | None]
    by_position: list[float | None]


@torch.no_grad()
def likelihood(
    model: DiffusionModel,
    texts: Sequence[TextTokens],
    settings: LikelihoodSettings = LikelihoodSettings(),  # noqa: B008 (frozen)
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Likelihood:
    """Measure the likelihood of texts.

    Each text is cut into sequences. Each sequence begins with the last token of the one before, and its first token is
    given. So every token of a text but the first is predicted once.

    Raises:
        UsageError: There is no token to predict, or sequences are longer than the context.
        NumbersError: The model computes NaN or infinity.
    """
    length, size = sequence_length(model, settings.length), model.config.block_size
    sequences = [sequence for text in texts for sequence in _sequences(text, length)]
    tokens = sum(int(sequence.eligible.sum()) for sequence in sequences)
    if tokens == 0:
        raise UsageError("The text has no token to predict; it needs at least two, since the first is given.")
    generator, exact = torch.Generator().manual_seed(settings.seed), size == 1
    draws = 1 if exact else settings.draws
    batches = list(_batches(sequences, settings.batch))
    longest = max(len(sequence.ids) for sequence in sequences)
    sums = torch.zeros(draws, longest, dtype=torch.float64)
    for done in range(draws * len(batches)):
        draw, batch = divmod(done, len(batches))
        progress("perplexity", done, draws * len(batches))
        ids, eligible = (torch.stack(values) for values in zip(*batches[batch], strict=True))
        noise = counted_noise(eligible, size, generator)
        by_position = losses(model, ids.to(model.network.device), noise).sum(dim=0)
        model.check_finite(by_position)
        sums[draw, : len(by_position)] += by_position.double().cpu()
    progress("perplexity", draws * len(batches), draws * len(batches))
    counts = torch.zeros(longest, dtype=torch.int64)
    for sequence in sequences:
        counts[: len(sequence.ids)] += sequence.eligible
    return summarize(sums, counts, size)


def summarize(sums: torch.Tensor, counts: torch.Tensor, block_size: int) -> Likelihood:
    """Return the likelihood for sums of losses in nats.

    Args:
        sums: Sums by draw and position in the sequence, `[draws, L]`.
        counts: Number of predicted tokens at each position, `[L]`.
    """
    tokens, exact = int(counts.sum()), block_size == 1
    means = (sums.sum(dim=1) / tokens).tolist()
    nats, margin = fmean(means), 0.0
    if not exact:
        margin = t_quantile((1 + LEVEL) / 2, len(means) - 1) * stdev(means) / math.sqrt(len(means))
    positions, bits = torch.arange(len(counts)), sums.mean(dim=0) / math.log(2)

    def mean_bits(groups: torch.Tensor) -> list[float | None]:
        number = int(groups.max()) + 1
        group_bits = torch.zeros(number, dtype=torch.float64).index_add(0, groups, bits).tolist()
        group_counts = torch.zeros(number, dtype=torch.int64).index_add(0, groups, counts).tolist()
        return [total / count if count else None for total, count in zip(group_bits, group_counts, strict=True)]

    return Likelihood(
        perplexity=math.exp(nats),
        bits_per_token=nats / math.log(2),
        low=math.exp(nats - margin),
        high=math.exp(nats + margin),
        draws=len(means),
        tokens=tokens,
        exact=exact,
        by_block=mean_bits(positions // block_size),
        by_position=mean_bits(positions % block_size),
    )


def _sequences(text: TextTokens, length: int) -> Iterator[TextTokens]:
    for begin in range(0, len(text.ids) - 1, length - 1):
        eligible = text.eligible[begin : begin + length].clone()
        eligible[0] = False
        if eligible.any():
            yield TextTokens(text.ids[begin : begin + length], eligible)


def _batches(sequences: Sequence[TextTokens], size: int) -> Iterator[list[TextTokens]]:
    """Yield batches of sequences of equal length, so that none needs padding."""
    batch = list[TextTokens]()
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.ids), reverse=True):
        if batch and (len(batch) == size or len(sequence.ids) != len(batch[0].ids)):
            yield batch
            batch = []
        batch.append(sequence)
    yield batch


def t_quantile(level: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution.

    Expands around the normal quantile (Abramowitz and Stegun 26.7.5). The error is below 1 % from 3 degrees of freedom.
    """
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom**power) for power, term in enumerate(terms, 1))
