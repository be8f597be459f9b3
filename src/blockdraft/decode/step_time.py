"""The model of a step: its seconds, its tokens, and the draft tokens that yield the most tokens per second.

Seconds are interpolated between measured steps (`Costs`), and assumed before there are any. Tokens follow from
acceptance rates. A plan speeds decoding up by its tokens over its seconds relative to a plain step.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from operator import mul
from typing import TypeAlias

CONTEXT = 128  # committed tokens of each sequence in measured steps
DRAFT_PASS, DRAFT_TOKEN = 0.2, 0.05  # assumed seconds of a draft pass and of a draft token over those of a plain step
NODE_CPU, NODE = 0.15, 0.01  # assumed seconds of a further node, without a draft pass, over those of a step with one

Points: TypeAlias = tuple[tuple[int, float], ...]  # draft tokens per sequence, rising, and seconds of a step


@dataclass(frozen=True)
class Costs:
    """Seconds of steps. They are interpolated between the known sizes, and extrapolated beyond them.

    Attributes:
        batch_sizes: Batch sizes, rising.
        plain: Seconds of a plain step, by batch size.
        chain, tree: Steps that draft, by batch size; an empty tuple where nothing is known.
        date: When they were measured or learned, in seconds since 1970.
    """

    batch_sizes: tuple[int, ...]
    plain: tuple[float, ...]
    chain: tuple[Points, ...]
    tree: tuple[Points, ...]
    date: float = 0.0

    @classmethod
    def of(cls, known: Mapping[int, tuple[float, Points, Points]], date: float) -> Costs:
        """Return the costs of plain steps, chains and trees by batch size."""
        sizes = sorted(known)
        plain, chain, tree = zip(*(known[size] for size in sizes), strict=True)
        return cls(tuple(sizes), plain, chain, tree, date)

    def plain_step(self, batch_size: int) -> float:
        """Return the seconds of a plain step at this batch size."""
        return interpolated(batch_size, self.batch_sizes, self.plain)

    def knows(self, tree: bool) -> bool:
        """Return whether steps that draft chains, or trees, are known."""
        return any(self.tree if tree else self.chain)

    def drafted_steps(self, batch_size: int, most: int, tree: bool) -> list[float]:
        """Return the seconds of a step that drafts, by draft tokens per sequence from 0 to `most`.

        They are assumed if none are known.
        """
        if not self.knows(tree):
            plain = self.plain_step(batch_size)
            return [plain * ratio for ratio in assumed_steps(batch_size, most)]
        rows = zip(self.batch_sizes, self.tree if tree else self.chain, strict=True)
        curves = {size: tuple(zip(*points, strict=True)) for size, points in rows if points}
        return [
            interpolated(batch_size, [*curves], [interpolated(count, *curve) for curve in curves.values()])
            for count in range(most + 1)
        ]

    def updated(self, newer: Costs) -> Costs:
        """Return these costs, replaced by newer ones where the batch size is the same."""
        known: dict[int, tuple[float, Points, Points]] = {}
        for costs in (self, newer):
            for size, plain, chain, tree in zip(costs.batch_sizes, costs.plain, costs.chain, costs.tree, strict=True):
                _, old_chain, old_tree = known.get(size, (0.0, (), ()))
                known[size] = plain, chain or old_chain, tree or old_tree
        return Costs.of(known, newer.date)


UNKNOWN = Costs((1,), (1.0,), ((),), ((),))  # seconds over those of a plain step, before anything is measured


def interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return y at x. Before the first x the first y holds; beyond the last the slope goes on, but not down."""
    after = min(max(bisect(xs, x), 1), len(xs) - 1)
    if after == 0:  # a single point
        return ys[0]
    share = max((x - xs[after - 1]) / (xs[after] - xs[after - 1]), 0.0)
    rise = ys[after] - ys[after - 1]
    return ys[after - 1] + min(share, 1.0) * rise + max(share - 1, 0.0) * max(rise, 0.0)


def assumed_steps(
    batch_size: int, most: int, draft_pass: float = DRAFT_PASS, draft_token: float = DRAFT_TOKEN
) -> list[float]:
    """Return the assumed seconds of steps with 0 to `most` draft tokens per sequence, over those of a plain step."""
    return [1 + draft_pass + draft_token * batch_size * count for count in range(most + 1)]


def chain_tokens(rates: Iterable[float]) -> list[float]:
    """Return the expected tokens of a step by draft tokens in its chain, from 0 on, bonus included.

    Args:
        rates: Acceptance rate of each draft token if all before it are accepted.
    """
    return list(accumulate(accumulate(rates, mul), initial=1.0))


def block_tokens(rate: float, block_size: int) -> float:
    """Return the expected tokens of a step over a whole block whose draft tokens have the same acceptance rate."""
    return chain_tokens([rate] * (block_size - 1))[-1]


def best_count(path_probs: Sequence[Sequence[float]], step_seconds: Sequence[float], calibration: float = 1.0) -> int:
    """Return the number of draft tokens per sequence that yields the most tokens per second.

    This is the rule of CaDDTree (arXiv 2606.01813). Ties go to the smallest number.

    With n draft tokens a sequence commits an expected 1 + calibration * (sum of its first n path probabilities) tokens,
    bonus included. All sequences share n, since they share a forward. Every n is tried: times need not be convex.

    Args:
        path_probs: For each sequence and draft token the probability that it is accepted together with all before it on
            its path, in the order in which they are added. Sequences may have different numbers.
        step_seconds: Seconds of a step with 0, 1, 2, ... draft tokens per sequence. Other numbers are not considered.
        calibration: As in `Plan`.
    """
    assert len(step_seconds) > 0 and min(step_seconds) > 0, "every step takes time"
    accepted = accumulate(map(sum, zip_longest(*path_probs, fillvalue=0.0)), initial=0.0)
    rates = [
        (len(path_probs) + calibration * count) / seconds
        for count, seconds in zip(accepted, step_seconds, strict=False)
    ]
    return rates.index(max(rates))
