"""Likelihood of a text: a bound from samples of the noise, with an interval, and exact at block size 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import torch

from blockdraft.diffusion.losses import losses
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.noise import Noise, counted_noise
from blockdraft.diffusion.settings import LikelihoodSettings
from blockdraft.diffusion.text import Tokens, row_length
from blockdraft.errors import UsageError

LEVEL = 0.95  # confidence level of the interval


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a text.

    Attributes:
        perplexity: Perplexity of the predicted tokens; an upper bound unless `exact`.
        bits_per_token: The same in bits.
        low, high: 95 % confidence interval of the perplexity, by the spread of the draws.
        draws: Number of samples of the noise for the whole text.
        tokens: Number of predicted tokens.
        exact: Whether this is no bound but the likelihood itself, as with blocks of one token.
        by_block: Bits per token by the number of the block in its row.
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
    texts: Sequence[Tokens],
    settings: LikelihoodSettings = LikelihoodSettings(),  # noqa: B008 (frozen)
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    compute: Callable[[DiffusionModel, torch.Tensor, Noise], torch.Tensor] = losses,
) -> Likelihood:
    """Measure the likelihood of texts.

    Each text is cut into rows, each of which begins with the last token of the one before. The first token of a row is
    given, so every token but the first of its text is predicted once.

    Args:
        compute: `losses`, or a function with the same results.

    Raises:
        UsageError: There is no token to predict, or rows are longer than the context.
        NumbersError: The model computes numbers that are not finite.
    """
    length, size = row_length(model, settings.length), model.config.block_size
    rows = [row for text in texts for row in _rows(text, length)]
    tokens = sum(int(row.eligible.sum()) for row in rows)
    if tokens == 0:
        raise UsageError("The text has no token to predict: it takes two at least, the first of which is given.")
    generator, exact = torch.Generator().manual_seed(settings.seed), size == 1
    draws = 1 if exact else settings.draws
    batches = list(_batches(rows, settings.batch))
    longest = max(len(row.ids) for row in rows)
    sums = torch.zeros(draws, longest, dtype=torch.float64)
    for done in range(draws * len(batches)):
        draw, batch = divmod(done, len(batches))
        progress("perplexity", done, draws * len(batches))
        ids, eligible = (torch.stack(each) for each in zip(*batches[batch], strict=True))
        noise = counted_noise(eligible, size, generator)
        found = compute(model, ids.to(model.network.device), noise).sum(dim=0)
        model.check_finite(found)
        sums[draw, : len(found)] += found.double().cpu()
    progress("perplexity", draws * len(batches), draws * len(batches))
    counts = torch.zeros(longest, dtype=torch.int64)
    for row in rows:
        counts[: len(row.ids)] += row.eligible
    return _summary(sums, counts, tokens, size, exact)


def _summary(sums: torch.Tensor, counts: torch.Tensor, tokens: int, size: int, exact: bool) -> Likelihood:
    """Likelihood from the sums of the losses in nats.

    Args:
        sums: By draw and position in the row, `[draws, L]`.
        counts: Predicted tokens at each position, `[L]`.
        tokens: Their number.
        size: Tokens of a block.
    """
    means = (sums.sum(dim=1) / tokens).tolist()
    nats, around = fmean(means), 0.0
    if not exact:
        around = t_quantile((1 + LEVEL) / 2, len(means) - 1) * stdev(means) / math.sqrt(len(means))
    positions, bits = torch.arange(len(counts)), sums.mean(dim=0) / math.log(2)

    def table(groups: torch.Tensor) -> list[float | None]:
        number = int(groups.max()) + 1
        totals = torch.zeros(number, dtype=torch.float64).index_add(0, groups, bits).tolist()
        found = torch.zeros(number, dtype=torch.int64).index_add(0, groups, counts).tolist()
        return [total / count if count else None for total, count in zip(totals, found, strict=True)]

    return Likelihood(
        perplexity=math.exp(nats),
        bits_per_token=nats / math.log(2),
        low=math.exp(nats - around),
        high=math.exp(nats + around),
        draws=len(means),
        tokens=tokens,
        exact=exact,
        by_block=table(positions // size),
        by_position=table(positions % size),
    )


def _rows(text: Tokens, length: int) -> Iterator[Tokens]:
    for begin in range(0, len(text.ids) - 1, length - 1):
        eligible = text.eligible[begin : begin + length].clone()
        eligible[0] = False
        if eligible.any():
            yield Tokens(text.ids[begin : begin + length], eligible)


def _batches(rows: Sequence[Tokens], size: int) -> Iterator[list[Tokens]]:
    """Batches of rows of one length, so that none needs padding."""
    found = list[Tokens]()
    for row in sorted(rows, key=lambda row: len(row.ids), reverse=True):
        if found and (len(found) == size or len(row.ids) != len(found[0].ids)):
            yield found
            found = []
        found.append(row)
    yield found


def t_quantile(level: float, freedom: int) -> float:
    """Quantile of Student's t distribution, by its expansion around the normal one (Abramowitz and Stegun 26.7.5); the
    error is below 1 % from 3 degrees of freedom on."""
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom**power) for power, term in enumerate(terms, 1))
