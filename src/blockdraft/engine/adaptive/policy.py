"""The policy: how far to draft in the next step.

It maximizes tokens per second. For several numbers of draft tokens per sequence, 0 included, it estimates

    expected tokens of a step / expected seconds of a step

and asks for the number with the highest rate. The expected tokens come from the draft tokens that were accepted lately
(`Acceptance`). The expected seconds come from recent steps, and before the first one from stored costs (`StepTimes`,
`costs.py`). If 0 wins, drafting pauses.

Some drafters predict which of their draft tokens will be accepted. They choose the number of draft tokens anew in each
step, to maximize the same rate (CaDDTree, arXiv 2606.01813). The policy passes them the expected seconds by number of
draft tokens, a calibration of their predictions, and the depth that paid lately, and decides only whether to draft.

Estimates of sizes that do not run get old. So the policy runs trials: steps with the size that would win if the
estimates were as favorable as they may be, given their age. A trial costs what its rate falls short of the best rate.
Each step adds 1 % of a step to a credit, each trial's cost is taken from it, and no trial begins without credit.

Decisions read committed tokens, predictions of the drafter and measured times. They never depend on which draft tokens
were sampled: that would change the distribution of the output.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from blockdraft.decode.proposal import ChainPlan, DraftTurn, HybridPlan, Plan
from blockdraft.decode.step_time import UNKNOWN, Costs, Points
from blockdraft.drafters import Drafter
from blockdraft.engine.adaptive.estimates import Acceptance, Slowdown, StepTimes
from blockdraft.engine.request import Request
from blockdraft.engine.runner import Outcome
from blockdraft.types import Drafting, RequestDrafting

SIZES = (0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191)  # draft tokens per sequence with own estimates
# Draft tokens of a tree whose size is chosen in each step. Fewer on a CPU, since logits of all of them need memory.
MAX_AUTO_BUDGET, MAX_AUTO_BUDGET_CPU = 256, 15
MARGIN = 1.01  # drafting must be better than plain decoding by this factor
SPARE_DEPTH = 1.25  # length of a draft pass relative to the depth that paid lately
HOLD = 16  # steps for which a decision holds, since deciding costs time; fewer in the first 8 * HOLD steps
TRIAL_SHARE = 0.01  # share of all steps that trials may lose
MAX_CREDIT, NEW_SIZE_CREDIT = 2.0, 0.5  # steps that trials may lose at once, and credit for a new batch size
MAX_TRIAL_TIME = 2.5  # longest trial relative to the best step
HIDDEN_TRIAL_COST = 0.25  # credit for a trial whose outcome the requests' own draft tokens hide

LoadCosts = Callable[[Drafter], Costs | None]


@dataclass(frozen=True)
class Decision:
    """How far to draft for some steps.

    Attributes:
        max_draft_tokens: Per sequence; 0 does not draft.
        step_seconds: Seconds of a step by draft tokens, for a drafter that chooses their number.
        trial: Whether the step is a trial.
        seconds, tokens: Expected seconds and tokens of the best step, all sequences together.
    """

    max_draft_tokens: int
    step_seconds: list[float] | None
    trial: bool
    seconds: float
    tokens: float


def controller(
    drafter: Drafter,
    drafting: Drafting,
    load_costs: LoadCosts,
    now: Callable[[], float] = time.time,
    max_auto_budget: int = MAX_AUTO_BUDGET,
) -> Controller:
    """Return the policy of an engine; arguments as of `Controller`.

    The members of a hybrid drafter are asked in turn if the policy chooses how far to draft. A tree of fixed size
    merges the drafts of all members, and a sampled chain must be chosen by a fixed rule.
    """
    free = drafting.automatic and not isinstance(drafting.block_size, int) and not drafting.sampled
    kind = HybridController if len(drafter.parts) > 1 and free else Controller
    return kind(drafter, drafting, load_costs, now, max_auto_budget)


class Controller:
    """Plans the steps of one engine, and learns from their outcomes.

    A fixed block size or tree budget is used as it is; with "auto" the policy of this module decides. Requests with
    their own limits take part in steps, but the policy does not learn their acceptance.

    Args:
        load_costs: Returns the stored costs of a drafter, if any; called when they are first needed.
        now: Clock in seconds since 1970.
        max_auto_budget: Most draft tokens of a tree whose size is chosen in each step; more if a path may be longer.
        slowdown: Shared by policies whose steps run interleaved.
    """

    def __init__(
        self,
        drafter: Drafter,
        drafting: Drafting,
        load_costs: LoadCosts,
        now: Callable[[], float] = time.time,
        max_auto_budget: int = MAX_AUTO_BUDGET,
        slowdown: Slowdown | None = None,
    ) -> None:
        self._drafter, self._drafting, self._max_auto_budget = drafter, drafting, max_auto_budget
        self._block_size = drafting.block_size if isinstance(drafting.block_size, int) else drafter.block_size
        self._tree = drafting.tree_budget != 0
        self.automatic = self._block_size > 1 and drafting.automatic  # whether the policy decides anything
        chooses = drafter.chooses_tree_size if self._tree else drafter.chooses_length
        self._drafter_chooses = self.automatic and chooses
        self.costs, self._now = cache(lambda: load_costs(drafter) or UNKNOWN), now
        most = self.max_draft_tokens if self._drafter_chooses else min(self.max_draft_tokens, self._block_size - 1)
        self._sizes = [*(size for size in SIZES if size < most), most]
        self._times: dict[int, StepTimes] = {}  # by binary logarithm of the batch size, in halves
        self._slowdown = Slowdown() if slowdown is None else slowdown
        self.acceptance = Acceptance(self._block_size - 1)
        self._initial_tokens = self.acceptance.chain_tokens()
        self._step = 0
        self.credit = MAX_CREDIT
        self._recoveries = 0  # of the slowdown, as far as they were noticed
        self.rests = False  # whether the last step was a trial that lost or is hidden, so that no trial follows
        self.paused = False
        self.decision: Decision | None = None  # for the planned step; None if there was nothing to decide
        self._hold, self._requests = 0, list[Request]()  # steps for which the decision still holds, and its requests

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens per sequence that a plan may ask for."""
        if self._block_size == 1:
            return 0
        budget = self._drafting.tree_budget
        if budget == "auto":
            return max(self._block_size - 1, self._max_auto_budget)
        return budget or self._block_size - 1

    @property
    def drafts(self) -> bool:
        """Whether steps are drafted at present."""
        return self.max_draft_tokens > 0 and not self.paused

    @property
    def tries_plain(self) -> bool:
        """Whether the planned step is a trial of plain decoding."""
        return self.decision is not None and self.decision.trial and not self.decision.max_draft_tokens

    @property
    def rate(self) -> float:
        """Expected tokens per second of the planned step, or 0 if unknown."""
        return 0.0 if self.decision is None else self.decision.tokens / self.decision.seconds

    def tighter_limits(self, limits: RequestDrafting | None) -> RequestDrafting | None:
        """Return the request's draft limits where they are stricter than the engine's, else None."""
        if limits is None:
            return None
        if not limits.enabled or limits.block_size == 1:
            return None if self._block_size == 1 else RequestDrafting(enabled=False)
        size, budget = limits.block_size, limits.tree_budget
        stricter = RequestDrafting(
            block_size=None if size is None or size >= self._block_size else size,
            tree_budget=None if budget is None or not self._tree or budget >= self.max_draft_tokens else budget,
        )
        return None if stricter == RequestDrafting() else stricter

    def prepare(self) -> None:
        """Read the stored costs before a request has to wait for it."""
        if self.automatic:
            self.step_times(1)

    def plan(self, requests: Sequence[Request]) -> Plan:
        """Return the plan of the next step of these requests."""
        previous, self.decision = self.decision, None
        params = [request.params for request in requests]
        if self._block_size == 1 or all(request.drafting and not request.drafting.enabled for request in requests):
            return ChainPlan(1, params)
        # A tree is no deeper than its budget, and a shorter block makes a cheaper draft pass.
        block_size, seconds, calibration = min(self._block_size, 1 + self.max_draft_tokens), None, 1.0
        budget = self.max_draft_tokens if self._tree else 0
        if not self._drafting.sampled:  # a sampled chain must not depend on the other sequences
            block_size = min(block_size, 1 + max(map(self._max_depth, requests)))
        if self.automatic and block_size > 1:
            if previous is None or previous.trial or not self._hold or requests != self._requests:
                previous, self._requests = self.decide(requests), list(requests)
            decision = self.decision = previous
            self._hold -= 1
            block_size, seconds = min(block_size, 1 + decision.max_draft_tokens), decision.step_seconds
            if seconds is None and self._tree:
                budget = decision.max_draft_tokens
            if seconds is not None:
                calibration = self.acceptance.calibration
                if decision.trial and self.paused:
                    calibration = max(calibration, 1.0)  # the text may have become easy
                if self._drafter.runs_network and not self._drafting.sampled:
                    block_size = min(block_size, 2 + round(SPARE_DEPTH * self.acceptance.depth))
        if block_size == 1:
            return ChainPlan(1, params)
        plan = ChainPlan(
            block_size,
            params,
            step_seconds=seconds,
            calibration=calibration,
            draft_window=self._drafting.draft_window,
            draft_passes=self._drafting.draft_passes,
        )
        return plan.as_tree(budget) if budget else plan

    def learn(self, outcome: Outcome) -> None:
        """Learn from a step of the last plan."""
        decision, acceptance, requests = self.decision, self.acceptance, outcome.requests
        if decision is None:
            return
        if outcome.has_own_drafts:  # tokens and seconds do not show what the drafter brings
            self.rests = decision.trial
            self.credit -= HIDDEN_TRIAL_COST * decision.trial
            return
        self._step += 1
        acceptance.age()
        drafted = None
        if outcome.plan.block_size > 1:
            drafted = min(outcome.num_draft_tokens, decision.max_draft_tokens)
        unlimited = [i for i, request in enumerate(requests) if request.drafting is None]
        times = self.step_times(len(requests))
        cost = times.at(times.expected(), drafted) if decision.trial else 0.0
        if unlimited or drafted is None:  # else more was drafted than these draft tokens
            times.learn(drafted, outcome.seconds, self._step, self._now())
            self._slowdown.check()
        tokens = float(len(requests) + sum(outcome.accepted))
        if drafted is not None and unlimited:
            if self._drafter_chooses:
                expected: Sequence[float | None] = outcome.expected or [None] * len(requests)
                by_request = {
                    requests[i]: acceptance.learn_expected(expected[i], outcome.accepted[i]) for i in unlimited
                }
                tokens += sum(by_request.values()) - sum(1 + outcome.accepted[i] for i in unlimited)
                if self.paused or not decision.trial:
                    depth = max(outcome.max_depth[i] for i in unlimited)
                    acceptance.learn_choice(by_request, outcome.num_draft_tokens, depth)
            else:
                acceptance.learn_chains(
                    [requests[i] for i in unlimited],
                    [outcome.max_depth[i] for i in unlimited],
                    [outcome.accepted[i] for i in unlimited],
                )
        lost = 0.0
        if decision.trial:  # a delay that the trial met by chance is no loss
            cost = min(cost, times.at(times.expected(), drafted))
            lost = cost / decision.seconds - tokens / decision.tokens
        self.rests = decision.trial and not (self.paused and lost <= 0)  # drafting that pays again goes on at once
        lost += outcome.catch_up_seconds / decision.seconds  # paid once, so it says nothing about whether drafting pays
        self.credit = min(max(self.credit + TRIAL_SHARE - lost, -1.0), MAX_CREDIT)

    def skip(self) -> None:
        """Age what is known by a step that another drafter drafted."""
        self._step += 1
        self.acceptance.age()
        self.credit = min(self.credit + TRIAL_SHARE, MAX_CREDIT)

    def learned(self) -> Iterator[tuple[Drafter, Costs]]:
        """Yield each drafter with the costs of its steps, as far as they were learned while nothing else ran."""
        self._slowdown.check()
        known: dict[int, tuple[float, Points, Points]] = {}
        for size, times in self._times.items():
            if learned := times.learned():
                plain, points = learned
                known[round(2 ** (size / 2))] = (plain, (), points) if self._tree else (plain, points, ())
        if known:
            yield self._drafter, Costs.of(known, self._now())

    def _max_depth(self, request: Request) -> int:
        """Return the most draft tokens on a path that can be of use to a request."""
        limits, most = request.drafting, self._block_size - 1
        if limits is not None:
            most = 0 if not limits.enabled else most if limits.block_size is None else limits.block_size - 1
        return min(most, request.remaining)

    def decide(self, requests: Sequence[Request]) -> Decision:
        self._hold = min(1 + self._step // 8, HOLD)
        if self._slowdown.recoveries != self._recoveries:  # the machine is faster again, so what paused may pay
            self._recoveries, self.credit = self._slowdown.recoveries, MAX_CREDIT
        decide = self._decide_pause if self._drafter_chooses else self._decide_size
        return decide(requests, self.step_times(len(requests)), may_try=self.credit > 0 and not self.rests)

    def _decide_size(self, requests: Sequence[Request], times: StepTimes, may_try: bool) -> Decision:
        """Choose the length of chains. Lists are by entry of `times`."""
        sizes, chain_tokens, seconds = [0, *self._sizes], self.acceptance.chain_tokens(), times.expected()
        tokens = self._batch_tokens(requests, [chain_tokens[size] for size in sizes], sizes)
        tokens[1] = 0.0  # a draft pass without draft tokens is no choice
        rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        if rates[best] < MARGIN * rates[0]:
            best = 0
        self.paused, chosen = best == 0, best
        if may_try:
            bounds = tokens
            if self.paused:  # the text may have become easy, or was always easier than it seemed
                upper = self.acceptance.upper_bounds()
                bounds = [len(requests) * max(upper[size], self._initial_tokens[size]) for size in sizes]
                bounds[1] = 0.0
            age = self._step, self._now()
            last = times.affordable(MAX_TRIAL_TIME * seconds[best], *age)
            rates = [count / time for count, time in zip(bounds[: last + 1], times.least(*age), strict=False)]
            rates[best] = MARGIN * tokens[best] / seconds[best]
            chosen = rates.index(max(rates))
        return Decision(sizes[chosen], None, chosen != best, seconds[best], tokens[best])

    def _decide_pause(self, requests: Sequence[Request], times: StepTimes, may_try: bool) -> Decision:
        """Choose whether to draft, for a drafter that chooses the number of draft tokens."""
        known, batch_size, most, seconds = self.acceptance, len(requests), self._sizes[-1], times.expected()
        curve, plain = times.curve(seconds, len(self._sizes)), seconds[0]
        if not known.tokens:
            return Decision(most, curve, False, plain, batch_size)
        tokens = self._batch_tokens(requests, [known.tokens], [most])[0]
        cost = times.at(seconds, known.num_draft_tokens)
        self.paused = tokens / cost < MARGIN * batch_size / plain
        if self.paused:
            cost, tokens = plain, float(batch_size)
        age = self._step, self._now()
        least = times.least(*age)
        if may_try and (self.paused or batch_size / least[0] <= MARGIN * tokens / cost):
            return Decision(most, times.curve(least, times.affordable(MAX_TRIAL_TIME * cost, *age)), True, cost, tokens)
        if may_try or self.paused:
            return Decision(0, None, may_try, cost, tokens)
        return Decision(most, curve, False, cost, tokens)

    def _batch_tokens(self, requests: Sequence[Request], tokens: Sequence[float], sizes: Sequence[int]) -> list[float]:
        """Return the tokens of all requests in a step, where the average request yields `tokens` by size."""
        total = [0.0] * len(tokens)
        for request in requests:
            share = self.acceptance.share(request)
            most = math.inf if request.drafting is None else 1 + self._max_depth(request)
            for entry, count in enumerate(tokens):
                total[entry] += min(max(share * count, 1.0), most)
        return [count if size else float(len(requests)) for count, size in zip(total, sizes, strict=True)]

    def step_times(self, batch_size: int) -> StepTimes:
        """Return the times at a batch size. A new size begins with what was learned of the nearest one."""
        size = round(2 * math.log2(batch_size))
        if size not in self._times:
            costs, rounded = self.costs(), round(2 ** (size / 2))
            curve = costs.drafted_steps(rounded, self.max_draft_tokens, self._tree)
            seconds = [costs.plain_step(rounded), *(curve[count] for count in self._sizes)]
            if self._times:
                self.credit = min(self.credit + NEW_SIZE_CREDIT, MAX_CREDIT)
                factors = self._times[min(self._times, key=lambda other: abs(other - size))].correction()
                seconds = [time * factor for time, factor in zip(seconds, factors, strict=True)]
            self._times[size] = StepTimes(self._sizes, seconds, self._slowdown)
        return self._times[size]


class HybridController(Controller):
    """Plans the steps of a hybrid drafter, so that one of its members drafts in each step.

    Each member has a policy that decides as if it were alone. Members without a network are asked first, then the
    others by the tokens per second of their steps. A member's draft is taken if it promises more tokens per second than
    every member that would be asked next. So a model is spared where the text repeats itself, and each member pauses
    where it does not pay. `load_costs` is called with each member, since their steps take different times. Beside
    trees, members that do not choose their size draft chains.
    """

    def __init__(
        self,
        drafter: Drafter,
        drafting: Drafting,
        load_costs: LoadCosts,
        now: Callable[[], float] = time.time,
        max_auto_budget: int = MAX_AUTO_BUDGET,
    ) -> None:
        super().__init__(drafter, drafting, lambda drafter: None, now, max_auto_budget)
        chains = replace(drafting, block_size="auto", tree_budget=0)
        settings = [drafting if part.chooses_tree_size else chains for part in drafter.parts]
        self.members = [
            Controller(part, own, load_costs, now, max_auto_budget, self._slowdown)
            for part, own in zip(drafter.parts, settings, strict=True)
        ]
        self._free = [index for index, part in enumerate(drafter.parts) if not part.runs_network]

    @property
    def drafts(self) -> bool:
        return any(member.drafts for member in self.members)

    def prepare(self) -> None:
        for member in self.members:
            member.prepare()

    def plan(self, requests: Sequence[Request]) -> Plan:
        plans = [member.plan(requests) for member in self.members]
        turns = [
            DraftTurn(index, plan, self.members[index].rate) for index, plan in enumerate(plans) if plan.block_size > 1
        ]
        if not turns or any(self.members[index].tries_plain for index in self._free):
            return ChainPlan(1, plans[0].params)
        turns.sort(key=lambda turn: (turn.drafter not in self._free, -turn.tokens_per_second))
        return HybridPlan(max(turn.plan.block_size for turn in turns), plans[0].params, turns)

    def learn(self, outcome: Outcome) -> None:
        if outcome.has_own_drafts:
            for member in self.members:
                member.learn(outcome)
            return
        turns = outcome.plan.turns if isinstance(outcome.plan, HybridPlan) else ()
        plans = {turn.drafter: turn.plan for turn in turns}
        none, plain = [0] * len(outcome.requests), ChainPlan(1, outcome.plan.params)
        for index, member in enumerate(self.members):
            if index == outcome.drafter and index in plans:
                # What others drafted must be observed at some time, so it is no loss of this step.
                member.learn(outcome._replace(plan=plans[index], catch_up_seconds=0.0))
            elif not turns or (not outcome.num_draft_tokens and outcome.drafter in self._free):
                # Nothing was drafted, and looking for a match takes next to no time: a plain step.
                undrafted = outcome._replace(plan=plain, num_draft_tokens=0, max_depth=none, accepted=none)
                member.learn(undrafted._replace(expected=None, catch_up_seconds=0.0))
            else:
                member.skip()

    def learned(self) -> Iterator[tuple[Drafter, Costs]]:
        for member in self.members:
            yield from member.learned()
