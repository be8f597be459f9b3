"""Estimates that the policy learns while decoding: how many tokens steps yield, and how long they take."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

import numpy as np

from blockdraft.engine.request import Request

# Acceptance. Evidence is counted in draft tokens or in tokens.
FADE = 0.98  # factor on evidence per step
NEWEST = 0.1  # weight of the newest step in running means
MIN_EVIDENCE = 5.0  # draft tokens whose evidence never fades, so that a few new ones cannot decide alone
PRIOR = 10.0  # weight of the assumed acceptance rate
PRIOR_RATE = 0.6
REQUEST_PRIOR = 40.0  # tokens during which a request counts as average, since a few unlucky steps mean nothing

# Step times.
RECENT = 9  # steps of one size that count
MIN_SECONDS = 1e-9  # a coarse clock may report 0, and times are divisors
STEADY = 2 * RECENT  # steps within which `RECENT` of one size show the machine's present speed
# How far the logarithm of a time may lie below its estimate: now, and more with each step since the size ran. A size
# that ran only `RARE` times has the larger margin, since a delay may have met all of its steps.
RARE, RARE_MARGIN, RARE_GROWTH = 1, 0.8, 0.05
KNOWN_MARGIN, KNOWN_GROWTH = 0.1, 3e-4


class Acceptance:
    """Estimates how many tokens a step yields.

    Args:
        max_depth: Most draft tokens on a path.

    Attributes:
        tokens, num_draft_tokens, depth: Running means per sequence for drafters that choose the number of draft tokens
            themselves: tokens of a step, draft tokens, and length of the longest path. `tokens` is 0 before the first
            step.
    """

    def __init__(self, max_depth: int) -> None:
        self._accepted, self._reached = [0.0] * max_depth, [0.0] * max_depth  # draft tokens by position
        self._all_accepted, self._all_reached = PRIOR * PRIOR_RATE, PRIOR
        self._weight = 1.0  # of a new draft token: it grows instead of all the others fading
        self._shares: WeakKeyDictionary[Request, tuple[float, float]] = WeakKeyDictionary()
        self._came_true = self._expected = PRIOR  # accepted draft tokens, and those that the drafter expected
        self.tokens = self.num_draft_tokens = 0.0
        self.depth = float(max_depth)
        self._chain_tokens: list[float] = []  # last result of `chain_tokens`
        self.chain_tokens()

    def age(self) -> None:
        """Fade the evidence by one step."""
        if self._all_reached > MIN_EVIDENCE * self._weight:
            self._weight /= FADE

    def chain_tokens(self) -> list[float]:
        """Return the expected tokens of a step by draft tokens in its chain, from 0 on.

        Positions that were seldom reached borrow from the others.
        """
        self._chain_tokens = list(accumulate(accumulate(self._rates(), mul), initial=1.0))
        return self._chain_tokens

    def upper_bounds(self) -> list[float]:
        """Return `chain_tokens` at acceptance rates two standard errors higher. It rises as evidence fades."""
        rate = self._all_accepted / self._all_reached
        error = 2 * math.sqrt(rate * (1 - rate) * self._weight / self._all_reached)
        return list(accumulate(accumulate((min(rate + error, 1.0) for rate in self._rates()), mul), initial=1.0))

    def _rates(self) -> list[float]:
        """Return the acceptance rate by position."""
        if self._weight > 1e9:
            scale, self._weight = self._weight, 1.0
            self._accepted, self._reached = ([n / scale for n in counts] for counts in (self._accepted, self._reached))
            self._all_accepted, self._all_reached = self._all_accepted / scale, self._all_reached / scale
        prior = PRIOR * self._weight
        shared = prior * self._all_accepted / self._all_reached
        return [(a + shared) / (r + prior) for a, r in zip(self._accepted, self._reached, strict=True)]

    @property
    def calibration(self) -> float:
        """Accepted draft tokens over those that the drafter expected to be accepted."""
        return self._came_true / self._expected

    def share(self, request: Request) -> float:
        """Return the tokens of a request's steps relative to the average request."""
        tokens, expected = self._shares.get(request, (REQUEST_PRIOR, REQUEST_PRIOR))
        return tokens / expected

    def learn_chains(self, requests: Sequence[Request], depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from the chain of each request: its length, and how many of its draft tokens were accepted."""
        for request, depth, count in zip(requests, depths, accepted, strict=True):
            self._learn_share(request, 1 + count, self._chain_tokens[depth])
            reached = min(count + 1, depth)
            for position in range(reached):
                self._reached[position] += self._weight
            for position in range(count):
                self._accepted[position] += self._weight
            self._all_reached += reached * self._weight
            self._all_accepted += count * self._weight

    def learn_expected(self, expected: float | None, accepted: int) -> float:
        """Learn how far a drafter's expectation can be trusted. Return the tokens that such a step yields."""
        if expected is None or not math.isfinite(expected):
            return 1.0 + accepted
        kept = 1 - (1 - FADE) * min(expected, 1.0)
        self._expected = kept * self._expected + expected
        self._came_true = kept * self._came_true + accepted
        return 1 + self.calibration * expected

    def learn_choice(self, tokens: dict[Request, float], num_draft_tokens: int, depth: int) -> None:
        """Learn from a step in which the drafter chose the number of draft tokens.

        Args:
            tokens: Tokens of each request.
            depth: Length of the longest path of all.
        """
        weight = NEWEST if self.tokens else 1.0
        self.tokens += weight * (sum(tokens.values()) / len(tokens) - self.tokens)
        self.num_draft_tokens += weight * (num_draft_tokens - self.num_draft_tokens)
        # Rises faster than it falls: a path that was cut does not show how far it would have paid.
        self.depth += (0.5 if depth > self.depth else NEWEST) * (depth - self.depth)
        for request, count in tokens.items():
            self._learn_share(request, count, self.tokens)

    def _learn_share(self, request: Request, tokens: float, expected: float) -> None:
        old_tokens, old_expected = self._shares.get(request, (REQUEST_PRIOR, REQUEST_PRIOR))
        fade = FADE if old_expected > REQUEST_PRIOR else 1.0
        self._shares[request] = fade * old_tokens + tokens, fade * old_expected + expected


@dataclass
class Slowdown:
    """Slowdown of all steps since the first, whatever their size, because of other work on the machine."""

    factor: float = 1.0


class StepTimes:
    """Estimates the seconds of a step at one batch size: the lower quartile of recent steps, or a corrected prior.

    Lists are by entry: entry 0 is a step without a draft, entry 1 + i one with `sizes[i]` draft tokens per sequence.
    The lists are short, so plain loops take a third of numpy's time.

    Args:
        sizes: Numbers of draft tokens, rising from 0.
        prior: Expected seconds before any step has run, `[1 + len(sizes)]`.
        slowdown: Shared by all steps that run interleaved with these.
    """

    def __init__(self, sizes: Sequence[int], prior: Sequence[float], slowdown: Slowdown | None = None) -> None:
        self._sizes, self._prior = sizes, prior
        self._recent = [deque[float](maxlen=RECENT) for _ in prior]
        self._quartiles = [math.nan] * len(prior)
        self._slowdown = Slowdown() if slowdown is None else slowdown
        self._slowdowns = [self._slowdown.factor] * len(prior)  # when each entry ran last
        self._ran = [deque[int](maxlen=RECENT) for _ in prior]  # numbers of the recent steps
        self._counts, self._last = [0] * len(prior), [0] * len(prior)
        self._expected: list[float] | None = None  # cached at this slowdown:
        self._expected_at = 0.0

    def learn(self, num_draft_tokens: int | None, seconds: float, step: int) -> None:
        """Learn the time of step number `step`; None draft tokens means that it did not draft."""
        entry = 0 if num_draft_tokens is None else bisect(self._sizes, num_draft_tokens)
        seconds = max(seconds, MIN_SECONDS)
        if num_draft_tokens is not None and num_draft_tokens != self._sizes[entry - 1]:  # count as the next lower size
            seconds *= self.expected()[entry] / self.at(self.expected(), num_draft_tokens)
        recent, ran, quartile = self._recent[entry], self._ran[entry], self._quartiles[entry]
        if (change := self._slowdown.factor / self._slowdowns[entry]) != 1:
            recent.extend([other * change for other in recent])
            quartile *= change
        recent.append(seconds)
        ran.append(step)
        # Other work delays some steps, the longer ones more often. The low quartile ignores such delays.
        self._quartiles[entry] = sorted(recent)[(len(recent) - 1) // 4]
        self._counts[entry] += 1
        self._last[entry] = step
        if len(ran) == RECENT and step - ran[0] < STEADY:
            self._slowdown.factor *= self._quartiles[entry] / quartile
        self._slowdowns[entry] = self._slowdown.factor
        self._expected = None

    def at(self, seconds: Sequence[float], num_draft_tokens: float | None) -> float:
        """Interpolate `seconds` at a number of draft tokens."""
        entry = 0 if num_draft_tokens is None else bisect(self._sizes, num_draft_tokens)
        if num_draft_tokens is None or entry == len(self._sizes):
            return seconds[entry]
        low, high = self._sizes[entry - 1 : entry + 1]
        return seconds[entry] + (num_draft_tokens - low) / (high - low) * (seconds[entry + 1] - seconds[entry])

    def curve(self, seconds: Sequence[float], last: int) -> list[float]:
        """Return seconds by draft tokens, one by one, up to the size of entry `last`."""
        curve: list[float] = np.interp(range(self._sizes[last - 1] + 1), self._sizes, seconds[1:]).tolist()
        return curve

    def correction(self) -> list[float]:
        """Return the factors on the prior: those of the nearest sizes that have run, interpolated in between."""
        ran = [entry for entry, count in enumerate(self._counts) if count]
        if not ran:
            return [1.0] * len(self._prior)
        factors = [self._quartiles[n] * self._slowdown.factor / self._slowdowns[n] / self._prior[n] for n in ran]
        correction = [factors[0]] * ran[0]
        for entry, after, factor, next_factor in zip(ran, ran[1:], factors, factors[1:], strict=False):
            ratio = (next_factor / factor) ** (1 / (after - entry))
            correction += [factor * ratio**n for n in range(after - entry)]
        return correction + [factors[-1]] * (len(self._prior) - len(correction))

    def expected(self) -> list[float]:
        """Return the seconds of each entry, which never fall with size."""
        if self._expected is None or self._expected_at != self._slowdown.factor:
            self._expected_at = self._slowdown.factor
            seconds, limit = [a * b for a, b in zip(self._prior, self.correction(), strict=True)], math.inf
            for entry in range(len(seconds) - 1, -1, -1):
                if self._counts[entry]:
                    limit = min(limit, seconds[entry])
                seconds[entry] = min(seconds[entry], limit)
            self._expected = list(accumulate(seconds, max))
        return self._expected

    def least(self, step: int) -> list[float]:
        """Return the least seconds that each entry may take, by how much is known of it at step number `step`."""
        result, floor = [], 0.0
        for seconds, count, last in zip(self.expected(), self._counts, self._last, strict=True):
            known = count > RARE
            if known:
                margin = KNOWN_MARGIN / math.sqrt(min(count, RECENT)) + KNOWN_GROWTH * (step - last)
            else:
                margin = RARE_MARGIN + RARE_GROWTH * (step - last)
            result.append(max(seconds * math.exp(-margin), floor))
            if known:
                floor = result[-1]
        return result

    def affordable(self, seconds: float) -> int:
        """Return the last entry that takes less than `seconds`, or the next one if it has hardly run.

        The estimate of a size that has hardly run may be wrong. One draft token is always affordable.
        """
        entry = sum(time < seconds for time in self.expected())
        entry = max(entry if entry < len(self._counts) and self._counts[entry] <= RARE else entry - 1, 2)
        return min(entry, len(self._counts) - 1)

    def learned(self) -> tuple[float, tuple[tuple[int, float], ...]] | None:
        """Return the seconds without a draft, and those of each size that has run.

        Return None before the first step.
        """
        if not any(self._counts):
            return None
        plain, *seconds = self.expected()
        sizes = zip(self._sizes, seconds, self._counts[1:], strict=True)
        return plain, tuple((size, time) for size, time, count in sizes if count)
