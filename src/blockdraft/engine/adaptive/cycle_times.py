"""How long cycles take, by their size: learned from the cycles that run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

# Variances are those of logarithms: 0.01 is a tenth more or less, 0.5 is twice as much or half.
NOISE = 0.01  # of one cycle's time
DRIFT = 5e-5  # what a size's grows by in a cycle, since machines get other work and contexts grow
COMMON_DRIFT = 1e-4  # the same for what all sizes have in common
SETTLING = 3  # cycles that set the common scale only; the fastest of them counts, as the first ones warm up
VISIBLE = 0.01  # change of a logarithm that is worth a new curve
SURPRISE = 0.3  # a cycle that took so much longer than expected counts once others of its size in a row do as well:
UNSURE, KEPT = 2, 4  # so many where little is known of the size, and else
INFORMS = 0.04  # variance above which a size's newest cycle says something of other sizes
ALIKE, NEAR = (
    0.6,
    0.7,
)  # correlation of errors of two sizes, and what it loses where one has twice as many nodes or rows
OPTIMISM = 2.0  # standard deviations below what is expected, for the least that a cycle may take
UNKNOWN = 0.9  # variance from which on nothing is known of a size, not even from stored costs
REACH = 2  # sizes are tried up to about so many times the largest known one
EXACT, COARSE = 16, 4  # sizes are told apart up to 16 guesses, then in steps of a quarter


class Pace:
    """Times of the cycles of one engine.

    Rows are told apart in steps of half a binary logarithm. Where a number of rows is new, what has been learned of the
    nearest one corrects the prior.

    Args:
        prior: For a number of rows: seconds without drafting, seconds with it by number of guesses, and the variance
            of these numbers.
        most: Most guesses of a row.
    """

    def __init__(self, prior: Callable[[int], tuple[float, Sequence[float], float]], most: int) -> None:
        self._prior = prior
        self._sizes = sizes(most)
        self._times: dict[int, Times] = {}
        self._common = math.inf  # logarithm of what all times are multiplied by
        self.now = 0  # cycles so far

    def of(self, rows: int) -> Times:
        """The times of cycles of so many rows."""
        step = round(2 * math.log2(rows))
        if step not in self._times:
            plain, curve, variance = self._prior(round(2 ** (step / 2)))
            new = Times(self._sizes, [plain, *(curve[size] for size in self._sizes)], variance)
            if self._times:
                near = min(self._times, key=lambda other: abs(other - step))
                new.follow(self._times[near], NEAR ** (abs(near - step) / 2))
            self._times[step] = new
        return self._times[step]

    def learn(self, rows: int, guesses: int | None, seconds: float) -> None:
        """Take in a cycle.

        Args:
            guesses: Of a row; None where the cycle did not draft.
        """
        self.now += 1
        times, reading = self.of(rows), math.log(seconds)
        if self.now <= SETTLING:
            self._common = min(self._common, times.error(guesses, reading))
        else:
            self._common += times.learn(guesses, reading - self._common, self.now)

    def learned(self) -> dict[int, tuple[float, list[tuple[int, float]]]]:
        """By rows the seconds of a plain cycle, and the guesses and seconds of cycles of the sizes that are known."""
        scale = math.exp(self._common) if self.now else 1.0
        found = {}
        for step, times in sorted(self._times.items()):
            plain, curve = times.expected()
            found[round(2 ** (step / 2))] = plain * scale, [(size, curve[size] * scale) for size in times.known()]
        return found


class Times:
    """Times of cycles of one number of rows, over what all times have in common.

    Each size has the logarithm of its time and the variance of this estimate, as in a Kalman filter: one that was never
    or long ago tried believes its newest cycle, one that is often tried takes in a little of each.

    Args:
        sizes: Numbers of guesses.
        seconds: Of a cycle that does not draft, then of one that does, by `sizes`.
        variance: Of these numbers.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], variance: float) -> None:
        self._sizes = sizes
        self._steps = [0.0, *(math.log2(size + 1) for size in sizes)]
        self._prior = [math.log(each) for each in seconds]
        self._levels = list(self._prior)
        self._variances = [variance] * len(seconds)
        self._seen = [0] * len(seconds)  # the cycle in which each was last tried
        self._slow: list[list[float]] = [[] for _ in seconds]  # the last readings, as long as they are surprising
        self._moved = math.inf  # what levels have changed by since the last curve

    def follow(self, near: Times, correlation: float) -> None:
        """Correct the prior as that of another number of rows was corrected."""
        for entry, prior in enumerate(self._prior):
            self._levels[entry] = prior + correlation * (near._levels[entry] - near._prior[entry])
            self._variances[entry] -= correlation**2 * max(self._variances[entry] - near._variances[entry], 0.0)

    def learn(self, guesses: int | None, reading: float, now: int) -> float:
        """Take in a cycle, the number `now`; returns what the common part changes by."""
        entry = self._entry(guesses)
        error = self.error(guesses, reading)
        variance = self._variances[entry] = self._variance(entry, now)
        self._seen[entry] = now
        if error <= SURPRISE:
            self._slow[entry].clear()
        else:  # a stray delay, unless it lasts
            slow = self._slow[entry] = [*self._slow[entry], error + self._levels[entry]][-KEPT:]
            if len(slow) < (UNSURE if variance > INFORMS else KEPT):
                return 0.0
            error = min(slow) - self._levels[entry]
        if abs(error) > SURPRISE:  # no noise: what was known of the size no longer holds
            variance = self._variances[entry] = max(variance, INFORMS)
        total = variance + COMMON_DRIFT + NOISE
        if entry and variance > INFORMS:
            self._inform(entry, error / total)
            self._moved = math.inf  # more sizes may be known now
        self._levels[entry] += variance / total * error
        self._variances[entry] -= variance**2 / total
        self._moved += abs(variance / total * error)
        return COMMON_DRIFT / total * error

    def _inform(self, entry: int, error: float) -> None:
        """Let a size of which little was known tell those near it."""
        variance = self._variances[entry]
        for other in range(1, len(self._levels)):
            if other != entry:
                shared = ALIKE * NEAR ** abs(self._steps[other] - self._steps[entry])
                shared *= math.sqrt(self._variances[other] * variance)
                self._levels[other] += shared * error
                self._variances[other] -= shared**2 / (variance + COMMON_DRIFT + NOISE)

    def error(self, guesses: int | None, reading: float) -> float:
        """By how much a logarithm of seconds is above what was expected."""
        entry = self._entry(guesses)
        expected = self._levels[entry]
        if guesses is not None and self._sizes[entry - 1] != guesses:  # one in between stands for the nearest
            _, curve = self.expected()
            if max(guesses, self._sizes[entry - 1]) < len(curve):
                expected += math.log(curve[guesses] / curve[self._sizes[entry - 1]])
        return reading - expected

    def known(self) -> list[int]:
        """Numbers of guesses of which something is known."""
        return [size for size, variance in zip(self._sizes, self._variances[1:], strict=True) if variance < UNKNOWN]

    def expected(self) -> tuple[float, list[float]]:
        """Seconds of a cycle that does not draft, and of one that does by guesses a row, as far as sizes are tried."""
        if self._moved > VISIBLE:
            self._moved = 0.0
            self._rising = isotonic(self._levels, [1 / variance for variance in self._variances])
            self._curve = self._interpolated(self._rising)
        return self._curve

    def least(self, now: int) -> tuple[float, list[float]]:
        """The least that these may be, given how well they are known."""
        self.expected()
        found, floor = [], -math.inf
        for entry, level in enumerate(self._rising):  # no size takes less than a smaller one may
            floor = max(floor, level - OPTIMISM * math.sqrt(self._variance(entry, now)))
            found.append(floor)
        return self._interpolated(found)

    def _entry(self, guesses: int | None) -> int:
        """Where the nearest size stands."""
        if guesses is None:
            return 0
        at = bisect_left(self._sizes, guesses)
        return 1 + at - (at > 0 and self._sizes[at] - guesses > guesses - self._sizes[at - 1])

    def _variance(self, entry: int, now: int) -> float:
        return self._variances[entry] + DRIFT * (now - self._seen[entry])

    def _interpolated(self, levels: list[float]) -> tuple[float, list[float]]:
        limit = min(REACH * max(self.known(), default=0) + 2, self._sizes[-1])
        seconds = [math.exp(level) for level in levels]
        if limit <= EXACT:
            return seconds[0], seconds[1 : limit + 2]
        curve: list[float] = np.interp(range(limit + 1), self._sizes, seconds[1:]).tolist()
        return seconds[0], curve


def sizes(most: int) -> list[int]:
    """Numbers of guesses of which times are kept, from 0 to `most`."""
    found = [0]
    while found[-1] < most:
        found.append(min(found[-1] + (1 if found[-1] < EXACT else found[-1] // COARSE), most))
    return found


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


def best_guesses(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """Guesses, at least one, that yield the most tokens over time; both are by their number."""
    best, best_rate = 1, 0.0
    for guesses in range(1, min(len(tokens), len(seconds))):
        rate = tokens[guesses] / seconds[guesses]
        if rate > best_rate:
            best, best_rate = guesses, rate
    return best


def seconds_at(curve: Sequence[float], guesses: float) -> float:
    """An entry of a curve, interpolated; beyond its end the last one."""
    below = min(int(guesses), len(curve) - 1)
    above = min(below + 1, len(curve) - 1)
    return curve[below] + (guesses - int(guesses)) * (curve[above] - curve[below])
