"""How far to draft in the next cycle, so that drafting pays and never costs.

The decision looks at committed tokens, at the drafter's probabilities and at measured times, never at a guess sampled
at random that it would then drop: a token that is dropped because of what it is would shift the distribution of the
output.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from blockdraft.decode.proposal import Plan
from blockdraft.drafters import Drafter
from blockdraft.engine.adaptive.acceptance import Acceptance
from blockdraft.engine.adaptive.cycle_times import CycleTimes, Pace
from blockdraft.engine.adaptive.stored_costs import Costs, prior
from blockdraft.engine.request import Request
from blockdraft.types import Drafting, RequestDrafting

SIZES = (0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191)  # guesses a row that are told apart
MAX_DRAFT_TOKENS = 256  # of a tree whose budget is chosen each cycle
MARGIN = 1.01  # gain below which a change is not worth its risk
SPARE_DEPTH = 1.25  # slots of a draft pass over the depth that paid lately
HOLD = 16  # most cycles that a decision holds, since thinking takes time
HOLD_GROWTH = 8  # cycles after which it holds for one more
EXPLORE = 0.01  # share of the cycles that trials may lose
CREDIT, DEBT = 2.0, 1.0  # cycles that they may lose to begin with, and save up; the most that is owed
FRESH = 0.5  # cycles more that they may lose with each further number of rows, whose times are not known
TOO_LONG = 2.5  # times the best cycle: a trial that is expected to take longer is left out


@dataclass(frozen=True)
class Decision:
    """How far to draft for some cycles.

    Attributes:
        draft_tokens: Most of a row; 0 does not draft.
        curve: Seconds of a cycle by guesses a row, for a drafter that sets their number.
        trial: Whether this is not the best by what is known, but may be.
        seconds, tokens: Of all rows in a cycle that is the best by what is known.
    """

    draft_tokens: int
    curve: list[float] | None
    trial: bool
    seconds: float
    tokens: float


class Controller:
    """Plans the cycles of one engine.

    A fixed block size or tree budget is used as it is. With "auto" each cycle is planned from the times of the cycles
    before, and from how many of their guesses were accepted:

    - Of a few sizes of chains, and none, that one is taken whose expected tokens over its expected time are the most.
    - A drafter that knows probabilities gets the time of a cycle by its number of guesses, and returns as many as
      maximise the expected tokens over time (CaDDTree, arXiv 2606.01813). How far its probabilities can be trusted is
      learned, and so is how long a block is of use: a shorter one makes a cheaper draft pass. Drafting pauses while the
      tokens that it yields of late, over their time, are fewer than plain decoding yields.
    - Now and then there is a trial: the cycle that would be the best if all took the least time that they may, or a
      drafted one while drafting pauses. What trials lose is counted, and the next one waits until the loss is a small
      share of the time.

    Requests with bounds of their own take part in cycles, and what is accepted of them teaches nothing.

    Args:
        costs: What was stored of the machine, if anything; called when it is first needed.
        now: Seconds since 1970, for the date of what was learned.
        paces: Shared by controllers whose cycles run in turn, by number of rows as in `_times`.
    """

    def __init__(
        self,
        drafter: Drafter,
        drafting: Drafting,
        costs: Callable[[], Costs | None],
        now: Callable[[], float] = time.time,
        paces: defaultdict[int, Pace] | None = None,
    ) -> None:
        self._drafter, self._drafting = drafter, drafting
        self._block_size = drafter.block_size
        if isinstance(drafting.block_size, int):
            self._block_size = drafting.block_size
        self._knows = self.automatic and (drafter.knows_probabilities if self._tree else drafter.knows_lengths)
        self._passes = drafter.has_pass
        self._costs, self._clock = cache(costs), now
        most = self.max_draft_tokens if self._knows else min(self.max_draft_tokens, self._block_size - 1)
        self._sizes = [*(size for size in SIZES if size < most), most]
        self._times: dict[int, CycleTimes] = {}  # by number of rows, in steps of half a binary logarithm
        self._times_by_rows: dict[int, CycleTimes] = {}
        self._paces = defaultdict[int, Pace](Pace) if paces is None else paces
        self._acceptance = Acceptance(self._block_size - 1)
        self._at_first = self._acceptance.chains()
        self._cycle = 0
        self._credit = CREDIT  # cycles that trials may lose
        self._tried = False  # whether the last cycle was a trial, after which the next cycles are as usual
        self._paused = False
        self._decision: Decision | None = None  # of the planned cycle; None where there was nothing to decide
        self._held, self._requests = 0, list[Request]()  # for how many cycles more it holds, and for which requests

    @property
    def automatic(self) -> bool:
        return self._block_size > 1 and "auto" in (self._drafting.block_size, self._drafting.tree_budget)

    @property
    def max_draft_tokens(self) -> int:
        """Most guesses of a row that a plan may ask for."""
        if self._block_size == 1:
            return 0
        budget = self._drafting.tree_budget
        if budget == "auto":
            return max(self._block_size - 1, MAX_DRAFT_TOKENS)
        return budget or self._block_size - 1

    @property
    def drafts(self) -> bool:
        """Whether cycles are drafted at present."""
        return self.max_draft_tokens > 0 and not self._paused

    @property
    def tries_plain(self) -> bool:
        """Whether the planned cycle is to show how fast plain decoding is."""
        return self._decision is not None and self._decision.trial and not self._decision.draft_tokens

    @property
    def _tree(self) -> bool:
        return self._drafting.tree_budget != 0

    def bounds(self, drafting: RequestDrafting | None) -> RequestDrafting | None:
        """What of a request's bounds is less than the engine drafts; None where nothing is."""
        if drafting is None:
            return None
        if not drafting.enabled or drafting.block_size == 1:
            return None if self._block_size == 1 else RequestDrafting(enabled=False)
        size, budget = drafting.block_size, drafting.tree_budget
        bounds = RequestDrafting(
            block_size=None if size is None or size >= self._block_size else size,
            tree_budget=None if budget is None or not self._tree or budget >= self.max_draft_tokens else budget,
        )
        return None if bounds == RequestDrafting() else bounds

    def _reach(self, request: Request) -> int:
        """Most guesses on a path that are of use to a request."""
        bounds, most = request.drafting, self._block_size - 1
        if bounds is not None:
            most = 0 if not bounds.enabled else most if bounds.block_size is None else bounds.block_size - 1
        return min(most, request.remaining)

    def prepare(self) -> None:
        """Read what is stored, which takes some milliseconds, before a request waits for it."""
        if self.automatic:
            self._times_of(1)

    def plan(self, requests: Sequence[Request]) -> Plan:
        """The plan of the next cycle of these requests."""
        before, self._decision = self._decision, None
        params = [request.params for request in requests]
        if self._block_size == 1 or all(request.drafting and not request.drafting.enabled for request in requests):
            return Plan(1, params)
        # A tree is no deeper than it has guesses, and a shorter block makes a cheaper draft pass.
        block_size, curve, calibration = min(self._block_size, 1 + self.max_draft_tokens), None, 1.0
        budget = self.max_draft_tokens if self._tree else 0
        if not self._drafting.sampled:  # how a sampled chain is judged must not depend on the other rows
            # Guesses past the length limit would be cut; the anchor is there already.
            block_size = min(block_size, 1 + max(map(self._reach, requests)))
        if self.automatic and block_size > 1:
            if before is None or before.trial or not self._held or requests != self._requests:
                before, self._requests = self._decide(requests), list(requests)
            self._decision, self._held = before, self._held - 1
            block_size, curve = min(block_size, 1 + before.draft_tokens), before.curve
            if curve is None and self._drafting.tree_budget == "auto":
                budget = before.draft_tokens
            if curve is not None:
                calibration = self._acceptance.calibration
                if before.trial and self._paused:
                    calibration = max(calibration, 1.0)  # the text may have become easy
                if self._passes and not self._drafting.sampled:
                    block_size = min(block_size, 2 + round(SPARE_DEPTH * self._acceptance.depth))
        if block_size == 1:
            return Plan(1, params)
        return Plan(
            block_size=block_size,
            params=params,
            tree_budget=budget,
            cycle_seconds=curve,
            calibration=calibration,
            draft_window=self._drafting.draft_window,
            draft_passes=self._drafting.draft_passes,
            rate=0.0 if self._decision is None else self._decision.tokens / self._decision.seconds,
        )

    def _decide(self, requests: Sequence[Request]) -> Decision:
        """Decide for the next cycles: for one at the beginning, later for more."""
        times = self._times_of(len(requests))
        seconds, least = times.expected(), times.least(self._cycle)
        may_try = self._credit > 0 and not self._tried
        self._held = min(1 + self._cycle // HOLD_GROWTH, HOLD)
        return (self._decide_pause if self._knows else self._decide_size)(requests, times, seconds, least, may_try)

    def _decide_size(
        self,
        requests: Sequence[Request],
        times: CycleTimes,
        seconds: list[float],
        least: list[float],
        may_try: bool,
    ) -> Decision:
        """Choose the size of chains; lists are by entry of `times`."""
        draft_tokens, chains = [0, *self._sizes], self._acceptance.chains()
        tokens = self._yields(requests, [chains[size] for size in draft_tokens], draft_tokens)
        tokens[1] = 0.0  # a draft pass without guesses is no choice
        rates = [each / time for each, time in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        if rates[best] < MARGIN * rates[0]:
            best = 0
        self._paused, chosen = best == 0, best
        if may_try:
            upper_bounds = tokens
            if self._paused:  # the text may have become as easy as any, or may always have been easier than it seemed
                easier = self._acceptance.upper_bounds()
                upper_bounds = [len(requests) * max(easier[size], self._at_first[size]) for size in draft_tokens]
                upper_bounds[1] = 0.0
            last = times.affordable(TOO_LONG * seconds[best])
            rates = [upper_bound / time for upper_bound, time in zip(upper_bounds[: last + 1], least, strict=False)]
            rates[best] = MARGIN * tokens[best] / seconds[best]
            chosen = rates.index(max(rates))
        return Decision(draft_tokens[chosen], None, chosen != best, seconds[best], tokens[best])

    def _decide_pause(
        self,
        requests: Sequence[Request],
        times: CycleTimes,
        seconds: list[float],
        least: list[float],
        may_try: bool,
    ) -> Decision:
        """Choose whether to draft, where the drafter sets the number of guesses; lists are by entry of `times`."""
        known, rows, most = self._acceptance, len(requests), self._sizes[-1]
        all_sizes = times.curve(seconds, len(self._sizes))
        if not known.tokens:
            return Decision(most, all_sizes, False, seconds[0], rows)
        tokens = self._yields(requests, [known.tokens], [most])[0]
        cost, plain = times.at(seconds, known.draft_tokens), seconds[0]
        self._paused = tokens / cost < MARGIN * rows / plain
        if self._paused:
            cost, tokens = plain, float(rows)
        if may_try and (self._paused or rows / least[0] <= MARGIN * tokens / cost):
            curve = times.curve(least, times.affordable(TOO_LONG * cost))
            return Decision(most, curve, True, cost, tokens)
        if may_try or self._paused:
            return Decision(0, None, may_try, cost, tokens)
        return Decision(most, all_sizes, False, cost, tokens)

    def _yields(self, requests: Sequence[Request], tokens: Sequence[float], draft_tokens: Sequence[int]) -> list[float]:
        """Tokens of all these requests, where a row on average yields `tokens` with so many guesses."""
        found = [0.0] * len(tokens)
        for request in requests:
            share = self._acceptance.share(request)
            most = math.inf if request.drafting is None else 1 + self._reach(request)
            for entry, each in enumerate(tokens):
                found[entry] += min(max(share * each, 1.0), most)
        return [each if drafted else float(len(requests)) for each, drafted in zip(found, draft_tokens, strict=True)]

    def learn(
        self,
        requests: Sequence[Request],
        plan: Plan,
        draft_tokens: int,
        deepest: Sequence[int],
        lengths: Sequence[int],
        expected: Sequence[float] | None = None,
        seconds: float | None = None,
        part: int = 0,
        late: float = 0.0,
    ) -> None:
        """Take in what a cycle yielded.

        Args:
            requests: Those of the cycle.
            plan: As it was carried out.
            draft_tokens: Guesses a row, those that fill up shorter rows included.
            deepest: For each request the guesses on its longest path.
            lengths: For each request the guesses that were accepted.
            expected: For each request the guesses that the drafter expected to be accepted, where it says so.
            seconds: Time that the cycle took, where it is known.
            part: Index of the drafter that drafted, where drafters take turns.
            late: Further seconds in which the drafter was told of cycles that did not draft.
        """
        decision, known = self._decision, self._acceptance
        if decision is None:
            return
        self._cycle += 1
        known.age()
        drafted = min(draft_tokens, decision.draft_tokens) if plan.block_size > 1 else None
        free = [place for place, request in enumerate(requests) if request.drafting is None]
        times = self._times_of(len(requests))
        cost = times.at(times.expected(), drafted) if decision.trial else 0.0
        if seconds is not None and (free or drafted is None):  # else more was drafted than these guesses
            times.learn(drafted, seconds, self._cycle)
        tokens = float(len(requests) + sum(lengths))
        if drafted is not None and free:
            if self._knows:
                found = {
                    requests[place]: known.learn_expected(None if expected is None else expected[place], lengths[place])
                    for place in free
                }
                tokens += sum(found.values()) - sum(1 + lengths[place] for place in free)
                if self._paused or not decision.trial:
                    known.learn_usual(found, draft_tokens, max(deepest[place] for place in free))
            else:
                known.learn_paths(
                    [requests[place] for place in free],
                    [deepest[place] for place in free],
                    [lengths[place] for place in free],
                )
        lost = 0.0
        if decision.trial:  # a delay that the trial met by chance is no loss
            cost = min(cost, times.at(times.expected(), drafted))
            lost = cost / decision.seconds - tokens / decision.tokens
        self._tried = decision.trial and not (self._paused and lost <= 0)  # drafting that pays again goes on at once
        lost += late / decision.seconds  # once, so it does not tell whether drafting pays
        self._credit = min(max(self._credit + EXPLORE - lost, -DEBT), CREDIT)

    def pass_over(self) -> None:
        """Take in that another drafter drafted in a cycle: what is known gets older, and trials may be due."""
        self._cycle += 1
        self._acceptance.age()
        self._credit = min(self._credit + EXPLORE, CREDIT)

    def _times_of(self, rows: int) -> CycleTimes:
        """Times of cycles of so many rows; a new number of rows begins with what was learned of the nearest one."""
        if rows not in self._times_by_rows:
            step = round(2 * math.log2(rows))
            if step not in self._times:
                plain, curve = prior(self._costs(), round(2 ** (step / 2)), self.max_draft_tokens, self._tree)
                seconds = [plain, *(curve[size] for size in self._sizes)]
                if self._times:
                    self._credit = min(self._credit + FRESH, CREDIT)
                    factors = self._times[min(self._times, key=lambda other: abs(other - step))].correction()
                    seconds = [each * factor for each, factor in zip(seconds, factors, strict=True)]
                self._times[step] = CycleTimes(self._sizes, seconds, self._paces[step])
            self._times_by_rows[rows] = self._times[step]
        return self._times_by_rows[rows]

    def learned(self) -> Iterator[tuple[Drafter, Costs]]:
        """What cycles with each drafter cost, as far as it has been learned, to be stored."""
        found = {round(2 ** (step / 2)): times.learned() for step, times in sorted(self._times.items())}
        known = {rows: each for rows, each in found.items() if each is not None}
        if not known:
            return
        plain, points = zip(*known.values(), strict=True)
        none = ((),) * len(known)
        chain, tree = (none, points) if self._tree else (points, none)
        yield self._drafter, Costs(tuple(known), plain, chain, tree, self._clock())
