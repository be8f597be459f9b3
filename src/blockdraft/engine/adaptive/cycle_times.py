"""How long cycles take, by their number of guesses: the lower quartile of the last that ran, beside a prior."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RECENT = 9  # cycles of a size that count
# By how much the logarithm of a time may be less than expected, and what that grows by with each cycle since the size
# ran: of a size that ran seldom (all its cycles may have met delays), and of one that ran more often.
SELDOM = 2
UNTRIED, UNTRIED_GROWTH = 1.2, 0.05
TRIED, TRIED_GROWTH = 0.1, 3e-4


class CycleTimes:
    """Seconds of the cycles of one number of rows.

    Arrays are by entry: 0 is a cycle that does not draft, 1 + i one that drafts `sizes[i]` guesses a row.

    Args:
        sizes: Numbers of guesses, rising from 0.
        prior: Seconds `[1 + len(sizes)]` that are expected before any cycle has run.
    """

    def __init__(self, sizes: Sequence[int], prior: NDArray[np.float64]) -> None:
        self._sizes, self._prior, self._expected = sizes, prior, prior
        self._recent = [deque[float](maxlen=RECENT) for _ in prior]
        self._quartiles = np.full(len(prior), np.nan)
        self._counts, self._last = np.zeros(len(prior)), np.zeros(len(prior))  # cycles so far; the newest one's number

    def learn(self, guesses: int | None, seconds: float, now: int) -> None:
        """Take in cycle `now`, in which each row had so many guesses; None did not draft."""
        entry = 0 if guesses is None else bisect(self._sizes, guesses)
        if guesses is not None and guesses != self._sizes[entry - 1]:  # stands for the nearest size below
            seconds *= self._expected[entry] / self.at(self._expected, guesses)
        self._recent[entry].append(seconds)
        # Other work of the machine delays some cycles, the longer ones more often; the others tell what counts.
        self._quartiles[entry] = sorted(self._recent[entry])[(len(self._recent[entry]) - 1) // 4]
        self._counts[entry] += 1
        self._last[entry] = now

    def at(self, seconds: NDArray[np.float64], guesses: float | None) -> float:
        """The entry of so many guesses, interpolated."""
        return float(seconds[0] if guesses is None else np.interp(guesses, self._sizes, seconds[1:]))

    def curve(self, seconds: NDArray[np.float64], last: int) -> list[float]:
        """Seconds by guesses, one by one, up to those of entry `last`."""
        found: list[float] = np.interp(range(self._sizes[last - 1] + 1), self._sizes, seconds[1:]).tolist()
        return found

    def correction(self) -> NDArray[np.float64]:
        """What the prior is multiplied by: the same factor as at the nearest sizes that have run."""
        [ran] = np.nonzero(self._counts)
        if not len(ran):
            return np.ones(len(self._prior))
        found: NDArray[np.float64] = np.exp(
            np.interp(range(len(self._prior)), ran, np.log(self._quartiles[ran] / self._prior[ran]))
        )
        return found

    def expected(self) -> NDArray[np.float64]:
        """Seconds of each entry. None takes longer than a larger one that has run, or less than a smaller one."""
        seconds = self._prior * self.correction()
        ran = np.where(self._counts > 0, seconds, np.inf)
        seconds = np.minimum(seconds, np.minimum.accumulate(ran[::-1])[::-1])
        self._expected = np.maximum.accumulate(seconds)
        return self._expected

    def least(self, now: int) -> NDArray[np.float64]:
        """What each entry takes if it is as much faster than was `expected` lately as it may be."""
        tried, age = self._counts > SELDOM, now - self._last
        doubt = np.where(
            tried,
            TRIED / np.sqrt(np.clip(self._counts, 1, RECENT)) + TRIED_GROWTH * age,
            UNTRIED + UNTRIED_GROWTH * age,
        )
        seconds = self._expected * np.exp(-doubt)
        return np.maximum(seconds, np.maximum.accumulate(np.where(tried, seconds, 0.0)))

    def affordable(self, seconds: float) -> int:
        """The last entry that takes less than so many seconds, or the next one if that has hardly run: what is
        expected of it may be wrong. At least one guess is affordable."""
        entry = int(np.count_nonzero(self._expected < seconds))
        entry = max(entry if entry < len(self._counts) and self._counts[entry] <= SELDOM else entry - 1, 2)
        return min(entry, len(self._counts) - 1)

    def learned(self) -> tuple[float, tuple[tuple[int, float], ...]] | None:
        """Seconds without drafting, and guesses and seconds of the sizes that have run; None if nothing has."""
        if not self._counts.any():
            return None
        seconds, ran = self.expected().tolist(), self._counts[1:] > 0
        points = zip(self._sizes, seconds[1:], ran, strict=True)
        return seconds[0], tuple((size, each) for size, each, known in points if known)
