"""How far to draft in the next cycle, so that drafting pays and never costs.

The decision looks at committed tokens, at the drafter's probabilities and at measured times, never at a guess sampled
at random that it would then drop: a token that is dropped because of what it is would shift the distribution of the
output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

from blockdraft.decode.proposal import Plan
from blockdraft.drafters import Drafter
from blockdraft.engine.adaptive.acceptance import Yields
from blockdraft.engine.adaptive.cycle_times import Pace, best_guesses, seconds_at
from blockdraft.engine.adaptive.stored_costs import Costs, prior
from blockdraft.engine.request import Request
from blockdraft.types import Drafting, RequestDrafting

MOST_GUESSES = 256  # of a tree whose budget is chosen each cycle
MARGIN = 1.01  # gain below which drafting is not worth its risk
SPARE_DEPTH = 1.25  # slots of a draft pass over the depth that paid lately
TOO_LONG = 2.5  # times the usual cycle: a trial that is expected to take longer is left out
CLOSE = 0.85  # drafting that yields so much of plain decoding is tried again as it was
REST = 16  # most cycles in a row that are not thought about: thinking takes time
THOUGHT = 0.02  # share of the time that thinking is to take where cycles are as usual, if REST allows it
RECENT = 0.1  # weight of the newest thought in their mean
EXPLORE = 0.004  # share of the time that may be lost in trials of a kind
CREDIT = 10.0  # plain cycles that may be lost in trials to begin with
LEAST_CHARGE, WASTED_CHARGE = 0.01, 0.1  # of a trial's time: it counts as lost at least; where there were no guesses
MOST_LOST = 5.0  # plain cycles that are made up for before there may be another trial
BETWEEN, PATIENCE = 2, 16  # cycles between two trials of new sizes; the same where none was worth while
AGAIN, NEW = "again", "new"  # kinds of trial: drafting as it was, sizes of which little is known


class Trials:
    """Trials of one engine: which the planned cycle is, and what those before have lost.

    Attributes:
        planned: Kind of trial that the planned cycle is; None where it is none.
    """

    def __init__(self) -> None:
        self.planned: str | None = None
        self._lost = {AGAIN: 0.0, NEW: 0.0}  # seconds that are not yet made up for
        self._next = 0  # cycle before which there is no trial of new sizes

    def new_is_due(self, now: int) -> bool:
        """Whether sizes of which little is known may be tried in cycle `now`."""
        return self._lost[NEW] <= 0 and now >= self._next

    def again_is_due(self) -> bool:
        """Whether drafting may be tried as it was."""
        return self._lost[AGAIN] <= 0

    def put_off(self, now: int) -> None:
        """None of the new sizes is worth a trial in cycle `now`."""
        self._next = now + PATIENCE

    def cycles_until_new(self, now: int, plain: float) -> float:
        """Cycles of `plain` seconds before new sizes may be tried."""
        return self._lost[NEW] / (EXPLORE * plain) if self._lost[NEW] > 0 else self._next - now

    def begin(self, plain: float) -> None:
        """Give credit, where cycles that do not draft take `plain` seconds."""
        self._lost[NEW] = -CREDIT * plain

    def make_up(self, seconds: float) -> None:
        """Take in that cycles of so many seconds have run, for kinds of trial that they were not."""
        for kind, lost in self._lost.items():
            if lost > 0 and kind != self.planned:
                self._lost[kind] -= EXPLORE * seconds

    def charge(self, cost: float, value: float, plain: float, wasted: bool, now: int) -> None:
        """Count what the planned trial has lost.

        Args:
            cost: Seconds that it took.
            value: Seconds that its tokens would have taken otherwise.
            plain: Seconds of a cycle that does not draft.
            wasted: Whether it was to draft and there were no guesses.
            now: Number of the cycle.
        """
        assert self.planned is not None
        least = WASTED_CHARGE if wasted else LEAST_CHARGE
        lost = self._lost[self.planned] + max(cost - value, least * cost)
        self._lost[self.planned] = min(lost, MOST_LOST * plain)
        self._next = now + BETWEEN


class Controller:
    """Plans the cycles of one engine.

    A fixed block size or tree budget is used as it is. With "auto" each cycle is planned from the times of the cycles
    before, and from how many of their guesses were accepted:

    - Drafting pauses while the tokens that it yields in a cycle, over the time of that cycle, are fewer than plain
      decoding yields.
    - A drafter that knows probabilities gets the time of a cycle by its number of guesses, and returns as many as
      maximise the expected tokens over time (CaDDTree, arXiv 2606.01813). For one that does not, the length of its
      chains is set in the same way from the share of guesses that were accepted so far. How far its probabilities can
      be trusted is learned, and so is how long a block is of use: a shorter one makes a cheaper draft pass.
    - Now and then there is a trial: a cycle that would be the best one if sizes of which little is known took the
      least that they may, or drafting where it nearly pays. What trials lose is counted, and the next one waits
      until the loss is a small share of the time.

    Requests with bounds of their own take part in cycles, and what is accepted of them teaches nothing.

    Args:
        costs: What was stored of the machine, if anything; called when it is first needed.
        now: Seconds since 1970, for the age of the costs.
        watch: Seconds, for how long thinking takes.
    """

    def __init__(
        self,
        drafter: Drafter,
        drafting: Drafting,
        costs: Callable[[], Costs | None],
        now: Callable[[], float] = time.time,
        watch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafting = drafting
        self._block_size = drafter.block_size
        if isinstance(drafting.block_size, int):
            self._block_size = drafting.block_size
        self._knows = self.automatic and (drafter.knows_probabilities if self._tree else drafter.knows_lengths)
        self._costs = cache(costs)
        self._clock = now
        self._pace = Pace(self._prior, self.most_guesses)
        self._yields = Yields(self._block_size, self.most_guesses, self._knows)
        self._trials = Trials()
        self._rate = 0.0  # tokens a second that the best plan promises
        self._paused = False
        self._resting: list[Request] = []  # whose next cycles are planned as the last one, and teach nothing
        self._rest = self._rested = 0  # how many they are, and how many they were
        self._repeated: Plan | None = None  # their plan; None does not draft
        self._watch = watch
        self._planning = self._thought = 0.0  # seconds: of the last plan, and a mean of plan and learning
        self._thinks = True  # of the planned cycle
        self._pauses = 0  # cycles thought about in which drafting was far from paying, since it last paid

    @property
    def automatic(self) -> bool:
        return self._block_size > 1 and "auto" in (self._drafting.block_size, self._drafting.tree_budget)

    @property
    def most_guesses(self) -> int:
        """Most guesses of a row that a plan may ask for."""
        if self._block_size == 1:
            return 0
        budget = self._drafting.tree_budget
        if budget == "auto":
            return max(self._block_size - 1, MOST_GUESSES)
        return budget or self._block_size - 1

    def bounds(self, drafting: RequestDrafting | None) -> RequestDrafting | None:
        """What of a request's bounds is less than the engine drafts; None where nothing is."""
        if drafting is None:
            return None
        if not drafting.enabled or drafting.block_size == 1:
            return None if self._block_size == 1 else RequestDrafting(enabled=False)
        size, budget = drafting.block_size, drafting.tree_budget
        bounds = RequestDrafting(
            block_size=None if size is None or size >= self._block_size else size,
            tree_budget=None if budget is None or not self._tree or budget >= self.most_guesses else budget,
        )
        return None if bounds == RequestDrafting() else bounds

    def _reach(self, request: Request) -> int:
        """Most guesses on a path that are of use to a request."""
        bounds, most = request.drafting, self._block_size - 1
        if bounds is not None:
            most = 0 if not bounds.enabled else most if bounds.block_size is None else bounds.block_size - 1
        return min(most, request.remaining)

    @property
    def drafts(self) -> bool:
        """Whether cycles are drafted at present."""
        return self.most_guesses > 0 and not self._paused

    def prepare(self) -> None:
        """Read what is stored, which takes some milliseconds, before a request waits for it."""
        if self.automatic:
            self._pace.of(1)

    def plan(self, requests: Sequence[Request]) -> Plan:
        """The plan of the next cycle of these requests."""
        self._thinks = not (self._rest and requests == self._resting and self._fits(requests))
        if not self._thinks:
            self._rest -= 1
            self._rested += 1
            return self._repeated or Plan(1, [request.params for request in requests])
        self._resting, self._rest, self._repeated = [], 0, None
        began = self._watch()
        plan = self._plan(requests)
        self._planning = self._watch() - began
        return plan

    def _fits(self, requests: Sequence[Request]) -> bool:
        """Whether the plan that is repeated asks for no more guesses than are of use."""
        return self._repeated is None or self._repeated.block_size <= 1 + max(map(self._reach, requests))

    def _plan(self, requests: Sequence[Request]) -> Plan:
        params = [request.params for request in requests]
        bounds = [request.drafting for request in requests]
        if self._block_size == 1 or all(each and not each.enabled for each in bounds):
            self._thinks = False
            return Plan(1, params)
        # A tree is no deeper than it has guesses, and a shorter block makes a cheaper draft pass.
        block_size = min(self._block_size, 1 + self.most_guesses)
        if not self._drafting.sampled:  # how a sampled chain is judged must not depend on the other rows
            # Guesses past the length limit would be cut; the anchor is there already.
            block_size = min(block_size, 1 + max(map(self._reach, requests)))
        window, passes = self._drafting.draft_window, self._drafting.draft_passes
        budget = 0 if self._drafting.tree_budget == 0 else self.most_guesses
        if not self.automatic:
            return Plan(block_size, params, budget, draft_window=window, draft_passes=passes)
        if block_size == 1:
            return Plan(1, params)
        curve = self._choose(requests)
        if curve is None:
            return Plan(1, params)
        if not self._knows:
            return Plan(min(block_size, len(curve)), params, budget, draft_window=window, draft_passes=passes)
        trust = self._yields.trust
        if self._paused and self._trials.planned == NEW:
            trust = max(trust, 1.0)  # the text may have become easy
        if not self._drafting.sampled:
            block_size = min(block_size, 2 + round(SPARE_DEPTH * self._yields.depth))
        return Plan(block_size, params, budget, curve, trust, draft_window=window, draft_passes=passes)

    def _choose(self, requests: Sequence[Request]) -> list[float] | None:
        """Seconds of the next cycle by guesses a row, up to the most that it may have; None if it is not to draft."""
        rows, now, known, trials = len(requests), self._pace.now, self._yields, self._trials
        trials.planned = None
        times = self._pace.of(rows)
        plain, curve = times.expected()
        tokens = known.promised
        usual = len(curve) - 1 if self._knows else best_guesses(tokens, curve)
        if not known.begun or (self._knows and times not in known.usual):
            self._paused = False
            return curve[: usual + 1]
        yields = [known.of(request, now).mean for request in requests]
        seconds, promised, more = curve[usual], tokens[usual], float(usual)
        if self._knows:  # the drafter sets the number anew in each cycle; its mean stands for it
            more, promised, _ = known.usual[times]
            seconds = seconds_at(curve, more)
        yielded = sum(
            relative * promised if request.drafting is None else min(relative * promised, 1 + self._reach(request))
            for relative, request in zip(yields, requests, strict=True)
        )
        drafting, pausing = yielded / seconds, rows / plain
        self._paused = drafting < MARGIN * pausing
        self._rate = max(drafting, pausing)
        usually = plain if self._paused else seconds
        # One guess more than usual may be tried in any case: that it takes too long may be what is wrong.
        affordable = max(sum(each < TOO_LONG * usually for each in curve), int(more) + 2)
        if trials.new_is_due(now):
            least_plain, least = times.least(now)
            if not self._paused and rows / least_plain > MARGIN * drafting:
                trials.planned = NEW
                return None
            best = len(curve) - 1 if self._knows else best_guesses(tokens, least[:affordable])
            if self._paused or self._knows or best != usual:
                trials.planned = NEW
                return least[: min(best + 1, affordable)]
            trials.put_off(now)
        if self._paused and trials.again_is_due():
            if self._knows:  # a chain may pay where as many guesses as usual do not
                chains = known.chains()
                best = best_guesses(chains, curve)
                drafting = max(drafting, rows * chains[best] / curve[best])
            if drafting > CLOSE * pausing:
                trials.planned = AGAIN
                return curve[: min(usual + 1, affordable)]
        if self._paused and drafting < CLOSE * pausing:  # at most until there may be a trial
            self._pauses += 1  # whoever has paused for a short time only may be wrong
            rest = min(REST, self._pauses // 4, int(trials.cycles_until_new(now, plain)))
            self._resting, self._rest = list(requests), rest
        elif not self._paused:
            self._pauses = 0
        return None if self._paused else curve[: usual + 1]

    def learn(
        self,
        requests: Sequence[Request],
        plan: Plan,
        guesses: int,
        deepest: Sequence[int],
        lengths: Sequence[int],
        expected: Sequence[float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Take in what a cycle yielded.

        Args:
            requests: Those of the cycle.
            plan: As it was carried out.
            guesses: Guesses a row, those that fill up shorter rows included.
            deepest: For each request the guesses on its longest path.
            lengths: For each request the guesses that were accepted.
            expected: For each request the guesses that the drafter expected to be accepted, where it says so.
            seconds: Time that the cycle took, where it is known.
        """
        if not (self.automatic and self._thinks):
            return
        began = self._watch()
        cycles, self._rested = 1 + self._rested, 0
        self._pace.now += cycles - 1
        rows, drafts, known, trials = len(requests), plan.block_size > 1, self._yields, self._trials
        free = [place for place, request in enumerate(requests) if request.drafting is None]
        if seconds is not None and (free or not drafts):  # else more was drafted than these guesses
            self._pace.learn(rows, guesses if drafts else None, seconds)
        times = self._pace.of(rows)
        plain, curve = times.expected()
        cost = seconds_at(curve, guesses) if drafts else plain
        if not known.begun:
            trials.begin(plain)
        trials.make_up(cost * cycles)
        known.age(cycles)
        tokens = float(rows)
        if drafts:
            tokens += sum(lengths[place] for place in range(rows) if place not in free)
            if free:
                tokens += known.learn(
                    times,
                    [requests[place] for place in free],
                    guesses,
                    [deepest[place] for place in free],
                    [lengths[place] for place in free],
                    expected and [expected[place] for place in free],
                    self._pace.now,
                    usual=self._paused or trials.planned != NEW,
                ) - len(free)
        if trials.planned:
            trials.charge(cost, tokens / self._rate, plain, drafts and not guesses, self._pace.now)
        self._thought += RECENT * (self._planning + self._watch() - began - self._thought)
        if not (trials.planned or self._rest or self._drafting.sampled) and seconds and known.sure:
            self._rest = min(REST, int(self._thought / (THOUGHT * seconds)))
            self._resting, self._repeated = list(requests), plan if drafts else None

    @property
    def _tree(self) -> bool:
        return self._drafting.tree_budget != 0

    def _prior(self, rows: int) -> tuple[float, list[float], float]:
        """Times of cycles before any has run, as `Pace` asks for them."""
        return prior(self._costs(), rows, self.most_guesses, self._tree, self._clock())

    def learned(self) -> Costs | None:
        """What cycles cost, as far as it has been learned, to be stored; None where nothing has."""
        found = self._pace.learned()
        if not found:
            return None
        rows, plain = tuple(found), tuple(plain for plain, _ in found.values())
        known, none = tuple(tuple(points) for _, points in found.values()), ((),) * len(found)
        return Costs(rows, plain, none if self._tree else known, known if self._tree else none, self._clock())
