"""How many tokens cycles yield: learned from the guesses that were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite, sqrt
from operator import mul
from weakref import WeakKeyDictionary

from blockdraft.engine.request import Request

FADE = 0.98  # what is left of evidence one cycle later
NEWEST = 0.1  # weight of the newest cycle in means of what drafters chose
LEAST = 5.0  # guesses whose evidence stays in any case, so that a few new ones never decide alone
PRIOR = 10.0  # guesses, or tokens, that count for what is taken before anything is known
PRIOR_OF_REQUEST = 40.0  # tokens for which a request is taken to be like the others: a few unlucky cycles are no sign
FIRST_DRAFT_TOKEN = 0.6  # share of guesses that is taken to be accepted then


class Acceptance:
    """Tokens of the cycles of one engine.

    Args:
        most: Most guesses on a path.

    Attributes:
        tokens, draft_tokens, depth: Of drafters that set the number of their guesses: means of a row's tokens, guesses,
            and guesses on the longest path. `tokens` is 0 before the first cycle.
    """

    def __init__(self, most: int) -> None:
        self._accepted, self._reached = [0.0] * most, [0.0] * most  # guesses by position
        self._all_accepted, self._all_reached = PRIOR * FIRST_DRAFT_TOKEN, PRIOR  # of all positions
        self._weight = 1.0  # of a new guess: it rises, in the place of all the others fading
        self._shares: WeakKeyDictionary[Request, tuple[float, float]] = WeakKeyDictionary()
        self._came_true = self._expected = PRIOR  # guesses accepted, and those that the drafter expected to be
        self.tokens = self.draft_tokens = 0.0
        self.depth = float(most)
        self._promised: list[float] = []  # what `chains` told last
        self.chains()

    def age(self) -> None:
        """Let evidence fade, as a cycle has passed."""
        if self._all_reached > LEAST * self._weight:
            self._weight /= FADE

    def upper_bounds(self) -> list[float]:
        """Tokens that chains yield if more guesses are accepted, by two standard errors, than `chains` expects. As
        evidence fades, this rises."""
        rate = self._all_accepted / self._all_reached
        more = 2 * sqrt(rate * (1 - rate) * self._weight / self._all_reached)
        return list(accumulate(accumulate((min(rate + more, 1.0) for rate in self._rates()), mul), initial=1.0))

    def chains(self) -> list[float]:
        """Tokens that a chain can be expected to yield, by its guesses from 0 on. Positions that were seldom reached
        borrow from the others."""
        self._promised = list(accumulate(accumulate(self._rates(), mul), initial=1.0))
        return self._promised

    def _rates(self) -> list[float]:
        """Share of guesses that are accepted, by position."""
        if self._weight > 1e9:
            scale, self._weight = self._weight, 1.0
            self._accepted, self._reached = ([each / scale for each in one] for one in (self._accepted, self._reached))
            self._all_accepted, self._all_reached = self._all_accepted / scale, self._all_reached / scale
        prior = PRIOR * self._weight
        shared = prior * self._all_accepted / self._all_reached
        return [(a + shared) / (r + prior) for a, r in zip(self._accepted, self._reached, strict=True)]

    @property
    def calibration(self) -> float:
        """Guesses that were accepted over those that the drafter expected to be."""
        return self._came_true / self._expected

    def share(self, request: Request) -> float:
        """Tokens of a request's cycles over those of all requests."""
        yielded, promised = self._shares.get(request, (PRIOR_OF_REQUEST, PRIOR_OF_REQUEST))
        return yielded / promised

    def learn_paths(self, requests: Sequence[Request], depths: Sequence[int], lengths: Sequence[int]) -> None:
        """Take in a path of each request, of `depths` guesses, of which the first `lengths` were accepted."""
        for request, depth, length in zip(requests, depths, lengths, strict=True):
            self._learn_share(request, 1 + length, self._promised[depth])
            for position in range(reached := min(length + 1, depth)):
                self._reached[position] += self._weight
            for position in range(length):
                self._accepted[position] += self._weight
            self._all_reached += reached * self._weight
            self._all_accepted += length * self._weight

    def learn_expected(self, expected: float | None, length: int) -> float:
        """Take in what a drafter expected to be accepted of a row; returns the tokens that such a cycle yields."""
        if expected is None or not isfinite(expected):  # who computes nonsense now may come to his senses
            return 1.0 + length
        kept = 1 - (1 - FADE) * min(expected, 1.0)
        self._expected = kept * self._expected + expected
        self._came_true = kept * self._came_true + length
        return 1 + self.calibration * expected

    def learn_usual(self, tokens: dict[Request, float], draft_tokens: int, depth: int) -> None:
        """Take in a cycle of a drafter that set the number of its guesses.

        Args:
            tokens: Of each request.
            depth: Of the longest path of all.
        """
        weight = NEWEST if self.tokens else 1.0
        self.tokens += weight * (sum(tokens.values()) / len(tokens) - self.tokens)
        self.draft_tokens += weight * (draft_tokens - self.draft_tokens)
        # It rises faster than it falls: a path that was cut short does not tell how far it would have paid.
        self.depth += (0.5 if depth > self.depth else NEWEST) * (depth - self.depth)
        for request, each in tokens.items():
            self._learn_share(request, each, self.tokens)

    def _learn_share(self, request: Request, tokens: float, promised: float) -> None:
        yielded, before = self._shares.get(request, (PRIOR_OF_REQUEST, PRIOR_OF_REQUEST))
        fade = FADE if before > PRIOR_OF_REQUEST else 1.0
        self._shares[request] = fade * yielded + tokens, fade * before + promised
