"""Estimates of the policy: the tokens of a step (`Acceptance`) and its seconds (`StepTimes`)."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np

from blockdraft.decode.step_time import Points, chain_tokens, interpolated
from blockdraft.engine.request import Request
from blockdraft.machine import OtherWork

# Acceptance. Evidence is counted in draft tokens or in tokens.
FADE = 0.98  # factor on evidence per step
NEWEST = 0.1  # weight of the newest step in running means
MIN_EVIDENCE = 5.0  # draft tokens; less evidence does not fade, so that a few new ones cannot decide alone
PRIOR, PRIOR_RATE = 10.0, 0.6  # weight of the assumed acceptance rate, and that rate
REQUEST_PRIOR = 40.0  # tokens; a request with fewer counts as nearly average

# Step times.
RECENT = 9  # steps of one size that count
MIN_SECONDS = 1e-9  # a coarse clock may report 0, and times are divisors
STALL = 1.25  # recent times count as at most this multiple of a newer one: what lies above it were stalls
QUIET_SECONDS = 0.5  # steps within this time are stored, or not, together
# How far the logarithm of a time may lie below its estimate: at once, with one step or with more, and what each further
# step and second without this size adds. It is large with one step, which may have been delayed.
RARE_MARGIN, RARE_GROWTH = 0.8, 0.05
KNOWN_MARGIN, KNOWN_GROWTH, KNOWN_GROWTH_SECONDS = 0.1, 3e-4, 0.1


class Acceptance:
    """Estimates how many tokens a step yields, from the draft tokens that were accepted lately.

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
        self._shares: WeakKeyDictionary[Request, tuple[float, float]] = WeakKeyDictionary()
        self._came_true = self._expected = PRIOR  # accepted draft tokens, and those that the drafter expected
        self.tokens = self.num_draft_tokens = 0.0
        self.depth = float(max_depth)
        self._chain_tokens: list[float] = []  # last result of `chain_tokens`
        self.chain_tokens()

    def age(self) -> None:
        """Fade the evidence by one step."""
        if self._all_reached > MIN_EVIDENCE:
            self._accepted = [FADE * count for count in self._accepted]
            self._reached = [FADE * count for count in self._reached]
            self._all_accepted, self._all_reached = FADE * self._all_accepted, FADE * self._all_reached

    def chain_tokens(self) -> list[float]:
        """Return the expected tokens of a step by draft tokens in its chain, from 0 on."""
        self._chain_tokens = chain_tokens(self._rates())
        return self._chain_tokens

    def upper_bounds(self) -> list[float]:
        """Return `chain_tokens` at acceptance rates two standard errors higher. It rises as evidence fades."""
        rate = self._all_accepted / self._all_reached
        error = 2 * math.sqrt(rate * (1 - rate) / self._all_reached)
        return chain_tokens(min(rate + error, 1.0) for rate in self._rates())

    def _rates(self) -> list[float]:
        """Return the acceptance rate by position. Positions with little evidence borrow from the others."""
        borrowed = PRIOR * self._all_accepted / self._all_reached
        return [(a + borrowed) / (r + PRIOR) for a, r in zip(self._accepted, self._reached, strict=True)]

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
                self._reached[position] += 1
            for position in range(count):
                self._accepted[position] += 1
            self._all_reached += reached
            self._all_accepted += count

    def learn_expected(self, expected: float | None, accepted: int) -> float:
        """Learn how well a drafter predicts acceptance. Return the tokens that such a step yields on average."""
        if expected is None or not math.isfinite(expected):
            return 1.0 + accepted
        fade = 1 - (1 - FADE) * min(expected, 1.0)
        self._expected = fade * self._expected + expected
        self._came_true = fade * self._came_true + accepted
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
    """Step time relative to the beginning, whatever the size of the step, because of other work on the machine.

    Attributes:
        times: The estimates of all batch sizes and drafters that share it.
        recoveries: How often other work has ended.
    """

    factor: float = 1.0
    recoveries: int = 0
    times: list[StepTimes] = field(default_factory=list)
    _others: OtherWork = field(default_factory=OtherWork)

    def check(self) -> None:
        """Let the steps of the last half second be stored if no other program disturbed them."""
        if self._others.seconds >= QUIET_SECONDS:
            quiet = self._others.disturbing_cores() is None
            for times in self.times:
                times.settle(quiet)
            self._others = OtherWork()


@dataclass
class _SizeTimes:
    """Recent steps of one size. Times are divided by the slowdown.

    Attributes:
        steps: Numbers of the recent steps.
        count: Steps so far.
        last_seen: Time of the last step, by the policy's clock.
        estimate: Lower quartile of the recent times.
        least: Lowest estimate so far, in seconds.
        slowed: Whether the estimate was twice the lowest one, and has not come back to it since.
        undecided, quiet: Seconds of recent steps that may have been disturbed by other programs, and of those that
            were not. They are not divided by the slowdown.
    """

    recent: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    count: int = 0
    last_seen: float = 0.0
    estimate: float = math.nan
    least: float = math.inf
    slowed: bool = False
    undecided: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether the estimate rests on more than one step."""
        return self.count > 1


class StepTimes:
    """Estimates the seconds of a step at one batch size, from recent steps and a prior.

    Other work on the machine delays steps and never makes one faster. So the estimate of a size is the lower quartile
    of its recent times, and slow times count less once a fast one shows that they were stalls. If a size that runs most
    of the time becomes faster or slower, the other sizes are expected to change by the same factor. If it took twice
    its least time and no longer does, other work has ended, and all sizes are expected to take their least times again.
    Sizes that have not run are corrected like their neighbors.

    Lists are by entry: entry 0 is a step without a draft, entry 1 + i one with `sizes[i]` draft tokens per sequence.
    The lists are short, so plain loops take a third of numpy's time.

    Args:
        sizes: Numbers of draft tokens, rising from 0.
        prior: Expected seconds without slowdown before any step has run, `[1 + len(sizes)]`.
        slowdown: Shared by all steps on this machine.
    """

    def __init__(self, sizes: Sequence[int], prior: Sequence[float], slowdown: Slowdown | None = None) -> None:
        self._sizes, self._prior, self._slowdown = sizes, prior, slowdown or Slowdown()
        self._slowdown.times.append(self)
        self._entries = [_SizeTimes() for _ in prior]
        self._relative: list[float] | None = None  # cached estimates of all entries, divided by the slowdown

    def learn(self, num_draft_tokens: int | None, seconds: float, step: int, now: float = 0.0) -> None:
        """Learn the time of step number `step`; None draft tokens means that it did not draft."""
        entry = 0 if num_draft_tokens is None else bisect(self._sizes, num_draft_tokens)
        seconds = max(seconds, MIN_SECONDS) / self._slowdown.factor
        if num_draft_tokens is not None and num_draft_tokens != self._sizes[entry - 1]:  # count as the next lower size
            seconds *= self.expected()[entry] / self.at(self.expected(), num_draft_tokens)
        size, before = self._entries[entry], self._entries[entry].estimate
        size.undecided = [*size.undecided[1 - RECENT :], seconds * self._slowdown.factor]
        size.recent = [*(min(time, STALL * seconds) for time in size.recent[1 - RECENT :]), seconds]
        size.steps = [*size.steps[1 - RECENT :], step]
        size.count += 1
        size.last_seen = now
        size.estimate = _lower_quartile(size.recent)
        if size.count >= RECENT and step - size.steps[0] < 2 * RECENT:  # it runs most of the time
            change = size.estimate / before
            self._slowdown.factor *= change
            size.recent, size.estimate = [time / change for time in size.recent], before
        self._relative = None
        absolute = size.estimate * self._slowdown.factor
        size.least = min(size.least, absolute)
        if absolute > 2 * size.least:
            size.slowed = True
        elif size.slowed and absolute < STALL * size.least:
            size.slowed = False
            self._slowdown.recoveries += 1
            for times in self._slowdown.times:
                times._recall_least()

    def _recall_least(self) -> None:
        """Expect each size to take its least time so far."""
        for size in self._entries:
            if size.count:
                size.estimate = min(size.estimate, size.least / self._slowdown.factor)
                size.recent = [size.estimate]
        self._relative = None

    def at(self, seconds: Sequence[float], num_draft_tokens: float | None) -> float:
        """Interpolate `seconds` at a number of draft tokens."""
        return seconds[0] if num_draft_tokens is None else interpolated(num_draft_tokens, self._sizes, seconds[1:])

    def curve(self, seconds: Sequence[float], last: int) -> list[float]:
        """Return seconds by draft tokens, one by one, up to the size of entry `last`."""
        curve: list[float] = np.interp(range(self._sizes[last - 1] + 1), self._sizes, seconds[1:]).tolist()
        return curve

    def correction(self) -> list[float]:
        """Return the factors on the prior: those of the nearest sizes that have run, interpolated in between."""
        return self._correction({entry: size.estimate for entry, size in enumerate(self._entries) if size.count})

    def _correction(self, estimates: Mapping[int, float]) -> list[float]:
        """Return the factors on the prior, given the estimates of some entries."""
        if not estimates:
            return [1.0] * len(self._prior)
        ran = list(estimates)
        factors = [seconds / self._prior[entry] for entry, seconds in estimates.items()]
        correction = [factors[0]] * ran[0]
        for entry, after, factor, next_factor in zip(ran, ran[1:], factors, factors[1:], strict=False):
            ratio = (next_factor / factor) ** (1 / (after - entry))
            correction += [factor * ratio**n for n in range(after - entry)]
        return correction + [factors[-1]] * (len(self._prior) - len(correction))

    def expected(self) -> list[float]:
        """Return the seconds of each entry, which never fall with size."""
        if self._relative is None:
            seconds, limit = [a * b for a, b in zip(self._prior, self.correction(), strict=True)], math.inf
            for entry in range(len(seconds) - 1, -1, -1):
                if self._entries[entry].count:
                    limit = min(limit, seconds[entry])
                seconds[entry] = min(seconds[entry], limit)
            self._relative = list(accumulate(seconds, max))
        return [self._slowdown.factor * seconds for seconds in self._relative]

    def least(self, step: int, now: float = 0.0) -> list[float]:
        """Return the least seconds that each entry may take. They fall with the time since it ran."""
        result, floor = [], 0.0
        for seconds, size in zip(self.expected(), self._entries, strict=True):
            age = step - (size.steps[-1] if size.steps else 0)
            if size.is_known:
                margin = KNOWN_MARGIN / math.sqrt(len(size.recent)) + KNOWN_GROWTH * age
                margin += KNOWN_GROWTH_SECONDS * (now - size.last_seen)
            else:
                margin = RARE_MARGIN + RARE_GROWTH * age
            result.append(max(seconds * math.exp(-margin), floor))
            if size.is_known:
                floor = result[-1]
        return result

    def affordable(self, limit: float, step: int = 0, now: float = 0.0) -> int:
        """Return the last entry that may be tried if a step may take `limit` seconds. One draft token always may.

        An entry is affordable if its expected time is below the limit, or its least time once it is known. The first
        entry above the limit is affordable too if it is not known, since its estimate may be wrong.
        """
        last = len(self._entries) - 1
        for entry, seconds, least in zip(range(last + 1), self.expected(), self.least(step, now), strict=True):
            known = self._entries[entry].is_known
            if (least if known else seconds) >= limit:
                return min(max(entry - known, 2), last)
        return last

    def settle(self, quiet: bool) -> None:
        """Keep the steps since the last call for `learned` if nothing disturbed them."""
        for size in self._entries:
            if quiet:
                size.quiet = [*size.quiet, *size.undecided][-RECENT:]
            size.undecided = []

    def learned(self) -> tuple[float, Points] | None:
        """Return the seconds without a draft, and those of each size that has run, in steps that nothing disturbed.

        None before the first such step.
        """
        estimates = {entry: _lower_quartile(size.quiet) for entry, size in enumerate(self._entries) if size.quiet}
        if not estimates:
            return None
        plain = self._prior[0] * self._correction(estimates)[0]
        return plain, tuple((self._sizes[entry - 1], seconds) for entry, seconds in estimates.items() if entry)


def _lower_quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[(len(seconds) - 1) // 4]
