"""How many tokens cycles yield, by their size: learned from the guesses that were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple
from weakref import WeakKeyDictionary

from blockdraft.engine.adaptive.cycle_times import Times
from blockdraft.engine.request import Request

MEMORY = 0.01  # weight of the newest cycle in running means of what all requests share
NOISE = 0.5  # variance of a cycle's tokens over those expected
DRIFT = 2e-4  # what the variance of their mean grows by in a cycle
SPREAD = 0.05  # variance of the means of different requests
SURE = 0.05  # variance of the mean of all from which on it is known well
FIRST_GUESS = 0.6  # share of guesses taken to be accepted before any has been tried
PRIOR = 10.0  # guesses that the mean of all positions counts for at each position


class Yield(NamedTuple):
    """Tokens of a request's cycles over those expected of their size.

    Attributes:
        variance: Of the mean, after the cycle `at`.
    """

    mean: float
    variance: float
    at: int


class Yields:
    """Tokens of the cycles of one engine.

    Args:
        block_size: Of the longest block.
        most: Most guesses of a row.
        knows: Whether the drafter itself says how many of its guesses it expects to be accepted.

    Attributes:
        begun: Whether a drafted cycle has been learned from.
        promised: Tokens of a row's cycle by its guesses, where the drafter does not know better.
        usual: By number of rows, of a drafter that knows: mean guesses and tokens of a row, and cycles.
        depth: Running mean of the guesses on the longest path.
    """

    def __init__(self, block_size: int, most: int, knows: bool) -> None:
        self._most, self._knows = most, knows
        # Tokens of a cycle over those expected of its size: of all requests, which a new one begins with, and of each.
        # The first cycles say little, so the mean begins as that of many that yielded what was expected.
        self._yielded = self._promises = PRIOR
        self._yields: WeakKeyDictionary[Request, Yield] = WeakKeyDictionary()
        self._doubt = NOISE  # variance of what is learned of all
        self._came_true = self._expected = PRIOR  # accepted guesses, and what the drafter expected of them
        self._accepted = [0.0] * block_size  # by position: guesses accepted, and guesses that could have been
        self._reached = [0.0] * block_size
        self.begun = False
        self.promised = self.chains()
        self.usual: dict[Times, tuple[float, float, int]] = {}
        self.depth = float(block_size)

    @property
    def trust(self) -> float:
        """Guesses that were accepted over those that the drafter expected to be."""
        return self._came_true / self._expected

    @property
    def sure(self) -> bool:
        """Whether so much is known that one cycle more says little."""
        return self._doubt < SURE

    def age(self, cycles: int) -> None:
        """Know a little less, as so many cycles have passed."""
        self._doubt += DRIFT * cycles

    def learn(
        self,
        times: Times,
        requests: Sequence[Request],
        guesses: int,
        deepest: Sequence[int],
        lengths: Sequence[int],
        expected: Sequence[float] | None,
        now: int,
        usual: bool,
    ) -> float:
        """Take in what was accepted in a cycle.

        Args:
            times: Of cycles of so many rows.
            guesses, deepest, lengths, expected: As `Controller.learn` has them.
            now: Number of the cycle.
            usual: False where more or fewer guesses than usual were tried; means of what is usual learn nothing then.

        Returns:
            The tokens that such a cycle can be expected to yield.
        """
        for depth, length in zip(deepest, lengths, strict=True):
            for position in range(min(length + 1, depth)):
                self._reached[position] = (1 - MEMORY) * self._reached[position] + 1
                self._accepted[position] = (1 - MEMORY) * self._accepted[position] + (position < length)
        if expected is not None:
            for hope, length in zip(expected, lengths, strict=True):
                if not isfinite(hope):  # a drafter that computes nonsense now may come to its senses
                    continue
                kept = 1 - MEMORY * min(hope, 1.0)
                self._expected = kept * self._expected + hope
                self._came_true = kept * self._came_true + length
        if self._knows and not usual:
            hopes = lengths if expected is None else [hope for hope in expected if isfinite(hope)]
            return len(requests) + sum(hopes) * self.trust
        weight = self._doubt / (self._doubt + NOISE)
        self._doubt *= 1 - weight
        self.depth += weight * (max(deepest) - self.depth)
        promised = self.promised[guesses]
        if self._knows:
            mean, promised, cycles = self.usual.get(times, (0.0, 0.0, 0))
            share = max(weight, 1 / (cycles + 1))
            mean += share * (guesses - mean)
            promised += share * (1 + sum(lengths) / len(lengths) - promised)
            self.usual[times] = mean, promised, cycles + 1
        for request, length in zip(requests, lengths, strict=True):
            relative, before = (1 + length) / promised, self.of(request, now)
            share = before.variance / (before.variance + NOISE)  # of the newest in their mean
            mean = before.mean + share * (relative - before.mean)
            self._yields[request] = Yield(mean, (1 - share) * before.variance, now)
            self._yielded = (1 - MEMORY) * self._yielded + relative
            self._promises = (1 - MEMORY) * self._promises + 1
        self.begun = True
        if not self._knows:
            self.promised = self.chains()
        return promised * sum(self._yields[request].mean for request in requests)

    def of(self, request: Request, now: int) -> Yield:
        """What is known of a request in cycle `now`; a new one begins as all are on average."""
        found = self._yields.get(request)
        if found is None:
            return Yield(self._yielded / self._promises, SPREAD, now)
        return found._replace(variance=found.variance + DRIFT * (now - found.at), at=now)

    def chains(self) -> list[float]:
        """Tokens that chains can be expected to yield, by their guesses, from what was accepted at each position.

        Positions that were seldom reached borrow from the others.
        """
        mean = (sum(self._accepted) + PRIOR * FIRST_GUESS) / (sum(self._reached) + PRIOR)
        found, total, survival = [1.0], 1.0, 1.0
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            survival *= (accepted + PRIOR * mean) / (reached + PRIOR)
            total += survival
            found.append(total)
        return found + [total] * (self._most + 1 - len(found))
