"""How long cycles take, by their size: learned from the cycles that run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

NOISE = 0.01  # variance of the logarithm of one cycle's time
DRIFT = 5e-5  # what the variance of a size's time grows by in a cycle, since machines and contexts change
SHARED = 0.0001  # variance of what the sizes have in common, such as other work of the machine
SETTLING = 3  # cycles that set the common scale only; the fastest of them counts, as the first ones warm up
OPTIMISM = 2.0  # standard deviations below what is expected, for the least that a cycle may take
KNOWN = 0.9  # variance below which a size is known, be it from stored costs
SURPRISE = 0.3
NEAR = 0.6
REACH = 2  # sizes are tried up to so many times the largest known one
EVERY, COARSE = 16, 4  # sizes are told apart up to 16 guesses, then in steps of a quarter


def sizes(most: int) -> list[int]:
    """Numbers of guesses of which times are kept, from 0 to `most`."""
    found = [0]
    while found[-1] < most:
        step = 1 if found[-1] < EVERY else found[-1] // COARSE
        found.append(min(found[-1] + step, most))
    return found


class Times:
    """Times of the cycles of one number of rows, over the common pace.

    Each size has the logarithm of its time and the variance of this estimate, as in a Kalman filter: a size that was
    never or long ago tried believes its newest cycle, one that is often tried takes in a little of each. Of two
    readings in a row the shorter counts: a stray delay is no news, and what lasts is there again in the next reading.

    Args:
        sizes: Numbers of guesses.
        seconds: Of a cycle that does not draft, then of one that does, by `sizes`.
        variances: Of their logarithms.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], variances: Sequence[float]) -> None:
        self._sizes = sizes
        self.levels = [math.log(each) for each in seconds]
        self.variances = list(variances)
        self._seen = [0] * len(self.levels)  # the cycle in which each was last tried
        self._before = list(self.levels)  # the reading before
        self._steps = [0.0, *(math.log2(size + 1) for size in sizes)]
        self._shown: list[float] | None = None  # levels that the curve is made of

    def learn(self, guesses: int | None, seconds: float, pace: float, now: int) -> float:
        """Take in a cycle.

        Args:
            guesses: Of a row; None where the cycle did not draft.
            pace: Logarithm of what all times have in common.
            now: Number of the cycle.

        Returns:
            What the pace changes by.
        """
        entry, reading = self._entry(guesses), math.log(seconds) - pace
        if entry and self._sizes[entry - 1] != guesses:  # a size in between stands for the nearest
            plain, curve = self.expected()
            reading += math.log(curve[self._sizes[entry - 1]] / curve[guesses or 0])
        self._seen[entry], variance = now, self._variance(entry, now)
        self.variances[entry] = variance
        before, self._before[entry] = self._before[entry], reading
        if reading > self.levels[entry] + SURPRISE:
            if before <= self.levels[entry] + SURPRISE:
                return 0.0
            reading = min(reading, before)
        error, total = reading - self.levels[entry], variance + SHARED + NOISE
        if entry and variance > 4 * NOISE:
            self._inform(entry, error / total)
        self.levels[entry] += variance / total * error
        self.variances[entry] -= variance**2 / total
        return SHARED / total * error

    def _inform(self, entry: int, error: float) -> None:
        """Let a size that was little known tell those near it."""
        for other in range(1, len(self.levels)):
            if other != entry:
                near = NEAR ** abs(self._steps[other] - self._steps[entry])
                shared = near * math.sqrt(self.variances[other] * self.variances[entry])
                self.levels[other] += shared * error
                self.variances[other] -= shared**2 / (self.variances[entry] + SHARED + NOISE)

    def settle(self, guesses: int | None, seconds: float) -> float:
        """The pace that explains a cycle."""
        return math.log(seconds) - self.levels[self._entry(guesses)]

    def expected(self) -> tuple[float, list[float]]:
        """Times of a cycle that does not draft, and of one that does by guesses a row."""
        if self._shown is None or max(abs(a - b) for a, b in zip(self.levels, self._shown, strict=True)) > 0.003:
            self._shown = list(self.levels)
            self._rising = isotonic(self.levels, [1 / variance for variance in self.variances])
            self._curve = self._interpolated(self._rising)
        return self._curve

    def least(self, now: int) -> tuple[float, list[float]]:
        """The least that they may be, given how well they are known."""
        self.expected()
        found, floor = [], -math.inf
        for entry, level in enumerate(self._rising):  # no size takes less than a smaller one may
            floor = max(floor, level - OPTIMISM * math.sqrt(self._variance(entry, now)))
            found.append(floor)
        return self._interpolated(found)

    def _entry(self, guesses: int | None) -> int:
        if guesses is None:
            return 0
        at = bisect_left(self._sizes, guesses)
        return 1 + at - (at > 0 and self._sizes[at] - guesses > guesses - self._sizes[at - 1])

    def _variance(self, entry: int, now: int) -> float:
        return self.variances[entry] + DRIFT * (now - self._seen[entry])

    def _interpolated(self, levels: list[float]) -> tuple[float, list[float]]:
        known = [size for size, variance in zip(self._sizes, self.variances[1:], strict=True) if variance < KNOWN]
        limit = min(REACH * max(known, default=0) + 2, self._sizes[-1])
        seconds = [math.exp(level) for level in levels]
        if limit <= EVERY:
            return seconds[0], seconds[1 : limit + 2]
        curve: list[float] = np.interp(range(limit + 1), self._sizes, seconds[1:]).tolist()
        return seconds[0], curve


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The rising sequence that is closest to these values, by weighted squares: more work never takes less time."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, others, members = pools.pop()
            value = (value * weight + other * others) / (weight + others)
            weight, count = weight + others, count + members
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


class Pace:
    """Times of the cycles of one engine.

    Rows are told apart in steps of a half of their binary logarithm. Numbers of rows that have not been seen begin
    with the times of the nearest ones that have, moved by what the prior says of the two.

    Args:
        prior: For a number of rows: seconds without drafting, seconds with it by number of guesses, and the variance
            of their logarithms.
        most: Most guesses of a row.
    """

    def __init__(self, prior: Callable[[int], tuple[float, Sequence[float], float]], most: int) -> None:
        self._prior = prior
        self._sizes = sizes(most)
        self._times: dict[int, Times] = {}
        self._pace = math.inf
        self.now = 0

    def of(self, rows: int) -> Times:
        step = round(2 * math.log2(rows))
        if step not in self._times:
            self._times[step] = self._begin(step)
        return self._times[step]

    def _begin(self, step: int) -> Times:
        plain, curve, variance = self._prior(round(2 ** (step / 2)))
        seconds = [plain, *(curve[size] for size in self._sizes)]
        return Times(self._sizes, seconds, [variance] * len(seconds))

    def learn(self, rows: int, guesses: int | None, seconds: float) -> None:
        self.now += 1
        times = self.of(rows)
        if self.now <= SETTLING:
            self._pace = min(self._pace, times.settle(guesses, seconds))
        else:
            self._pace += times.learn(guesses, seconds, self._pace, self.now)
