"""How long cycles take, by their number of guesses: the lower quartile of the last that ran, beside a prior."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

RECENT = 9  # cycles of a size that count
LEAST_SECONDS = 1e-9  # of a cycle, also where a coarse clock did not move: times are divided by
USUAL = 2 * RECENT  # cycles during which `RECENT` of a size are enough to tell how fast the machine is at present
# By how much the logarithm of a time may be less than expected, and what that grows by with each cycle since the size
# ran: of a size that ran seldom (all its cycles may have met delays), and of one that ran more often.
SELDOM = 1
UNTRIED, UNTRIED_GROWTH = 0.8, 0.05
TRIED, TRIED_GROWTH = 0.1, 3e-4


@dataclass
class Pace:
    """How much slower cycles are than at first, whatever their size: other work slows all alike for a while.

    Attributes:
        factor: Product of the changes that the sizes in use have shown.
    """

    factor: float = 1.0


class CycleTimes:
    """Seconds of the cycles of one number of rows.

    Lists are by entry: 0 is a cycle that does not draft, 1 + i one that drafts `sizes[i]` guesses a row. They are so
    short that loops of Python take a third of numpy's time, which counts beside cycles of half a millisecond.

    Args:
        sizes: Numbers of guesses, rising from 0.
        prior: Seconds `[1 + len(sizes)]` that are expected before any cycle has run.
        pace: That of all cycles which run in turn with these.
    """

    def __init__(self, sizes: Sequence[int], prior: Sequence[float], pace: Pace | None = None) -> None:
        self._sizes, self._prior = sizes, prior
        self._recent = [deque[float](maxlen=RECENT) for _ in prior]
        self._quartiles = [math.nan] * len(prior)
        # A change of pace that the size in use shows is taken to hold for those that ran before it, too: each has the
        # factor of when it ran last.
        self._pace = Pace() if pace is None else pace
        self._paces = [self._pace.factor] * len(prior)
        self._ran = [deque[int](maxlen=RECENT) for _ in prior]  # numbers of the recent cycles
        self._counts, self._last = [0] * len(prior), [0] * len(prior)  # cycles so far; the newest one's number
        self._expected: list[float] | None = None  # as long as nothing is learned, at this pace:
        self._expected_at = 0.0

    def learn(self, draft_tokens: int | None, seconds: float, now: int) -> None:
        """Take in cycle `now`, in which each row had so many guesses; None did not draft."""
        entry, seconds = 0 if draft_tokens is None else bisect(self._sizes, draft_tokens), max(seconds, LEAST_SECONDS)
        if draft_tokens is not None and draft_tokens != self._sizes[entry - 1]:  # stands for the nearest size below
            seconds *= self.expected()[entry] / self.at(self.expected(), draft_tokens)
        recent, ran, before = self._recent[entry], self._ran[entry], self._quartiles[entry]
        if (change := self._pace.factor / self._paces[entry]) != 1:
            recent.extend([each * change for each in recent])
            before *= change
        recent.append(seconds)
        ran.append(now)
        # Other work of the machine delays some cycles, the longer ones more often; the others tell what counts.
        self._quartiles[entry] = sorted(recent)[(len(recent) - 1) // 4]
        self._counts[entry] += 1
        self._last[entry] = now
        if len(ran) == RECENT and now - ran[0] < USUAL:
            self._pace.factor *= self._quartiles[entry] / before
        self._paces[entry] = self._pace.factor
        self._expected = None

    def at(self, seconds: Sequence[float], draft_tokens: float | None) -> float:
        """The entry of so many guesses, interpolated."""
        entry = 0 if draft_tokens is None else bisect(self._sizes, draft_tokens)
        if draft_tokens is None or entry == len(self._sizes):
            return seconds[entry]
        before, after = self._sizes[entry - 1 : entry + 1]
        return seconds[entry] + (draft_tokens - before) / (after - before) * (seconds[entry + 1] - seconds[entry])

    def curve(self, seconds: Sequence[float], last: int) -> list[float]:
        """Seconds by guesses, one by one, up to those of entry `last`."""
        found: list[float] = np.interp(range(self._sizes[last - 1] + 1), self._sizes, seconds[1:]).tolist()
        return found

    def correction(self) -> list[float]:
        """What the prior is multiplied by: the same factor as at the nearest sizes that have run, or between theirs."""
        ran = [entry for entry, count in enumerate(self._counts) if count]
        if not ran:
            return [1.0] * len(self._prior)
        factors = [self._quartiles[n] * self._pace.factor / self._paces[n] / self._prior[n] for n in ran]
        found = [factors[0]] * ran[0]
        for entry, after, factor, next_factor in zip(ran, ran[1:], factors, factors[1:], strict=False):
            step = (next_factor / factor) ** (1 / (after - entry))
            found += [factor * step**n for n in range(after - entry)]
        return found + [factors[-1]] * (len(self._prior) - len(found))

    def expected(self) -> list[float]:
        """Seconds of each entry. None takes longer than a larger one that has run, or less than a smaller one."""
        if self._expected is None or self._expected_at != self._pace.factor:
            self._expected_at = self._pace.factor
            seconds, most = [a * b for a, b in zip(self._prior, self.correction(), strict=True)], math.inf
            for entry in range(len(seconds) - 1, -1, -1):
                if self._counts[entry]:
                    most = min(most, seconds[entry])
                seconds[entry] = min(seconds[entry], most)
            self._expected = list(accumulate(seconds, max))
        return self._expected

    def least(self, now: int) -> list[float]:
        """What each entry takes if it is as much faster than `expected` as it may be."""
        found, most = [], 0.0
        for seconds, count, last in zip(self.expected(), self._counts, self._last, strict=True):
            if tried := count > SELDOM:
                doubt = TRIED / math.sqrt(min(count, RECENT)) + TRIED_GROWTH * (now - last)
            else:
                doubt = UNTRIED + UNTRIED_GROWTH * (now - last)
            found.append(max(seconds * math.exp(-doubt), most))
            if tried:
                most = found[-1]
        return found

    def affordable(self, seconds: float) -> int:
        """The last entry that takes less than so many seconds, or the next one if that has hardly run: what is
        expected of it may be wrong. At least one guess is affordable."""
        entry = sum(each < seconds for each in self.expected())
        entry = max(entry if entry < len(self._counts) and self._counts[entry] <= SELDOM else entry - 1, 2)
        return min(entry, len(self._counts) - 1)

    def learned(self) -> tuple[float, tuple[tuple[int, float], ...]] | None:
        """Seconds without drafting, and guesses and seconds of the sizes that have run; None if nothing has."""
        if not any(self._counts):
            return None
        plain, *seconds = self.expected()
        points = zip(self._sizes, seconds, self._counts[1:], strict=True)
        return plain, tuple((size, each) for size, each, count in points if count)
