"""How far to draft, and by whom: of a combination that drafts chains of a length that is chosen each cycle."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from blockdraft.decode.proposal import Plan
from blockdraft.drafters import Drafter
from blockdraft.engine.adaptive.cycle_times import Pace
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.adaptive.stored_costs import Costs
from blockdraft.engine.request import Request
from blockdraft.types import Drafting


class JointController(Controller):
    """Plans the cycles of an engine whose drafter is a combination, so that one of its drafters drafts in each cycle.

    Each drafter has a controller of its own, which decides as if the others were not there. Those without a network are
    asked first, then the others, those first whose cycles have yielded the most. A drafter's guesses are taken if they
    promise more tokens a second than the cycles of all that would be asked next have yielded of late. So a model is
    spared where the text repeats itself, and each of them pauses where it does not pay.

    Arguments are those of `Controller`, but `costs` is called with each of the drafters: a cycle of one costs another
    time than a cycle of another.
    """

    def __init__(
        self,
        drafter: Drafter,
        drafting: Drafting,
        costs: Callable[[Drafter], Costs | None],
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(drafter, drafting, lambda: None, now)
        paces = defaultdict[int, Pace](Pace)
        self._each = [Controller(part, drafting, partial(costs, part), now, paces) for part in drafter.parts]
        self._free = [index for index, part in enumerate(drafter.parts) if not part.has_pass]

    @staticmethod
    def suits(drafter: Drafter, drafting: Drafting) -> bool:
        """Whether drafters take turns: a tree has guesses of all, and a sampled chain has a fixed way to be chosen."""
        return len(drafter.parts) > 1 and drafting == replace(drafting, block_size="auto", tree_budget=0, sampled=False)

    @property
    def drafts(self) -> bool:
        return any(each.drafts for each in self._each)

    def prepare(self) -> None:
        for each in self._each:
            each.prepare()

    def plan(self, requests: Sequence[Request]) -> Plan:
        plans = [each.plan(requests) for each in self._each]
        asked = [index for index, plan in enumerate(plans) if plan.block_size > 1]
        if not asked or any(self._each[index].tries_plain for index in self._free):
            return Plan(1, plans[0].params)
        asked.sort(key=lambda index: (index not in self._free, -plans[index].rate))
        size = max(plans[index].block_size for index in asked)
        return Plan(size, plans[0].params, turns=[(index, plans[index]) for index in asked])

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
        none, plain = [0] * len(requests), Plan(1, plan.params)
        plans = dict(plan.turns)
        for index, each in enumerate(self._each):
            if index == part and index in plans:
                each.learn(requests, plans[index], draft_tokens, deepest, lengths, expected, seconds, late=late)
            elif not plan.turns or (
                not draft_tokens and part in self._free
            ):  # a look that found nothing is next to plain
                each.learn(requests, plain, 0, none, none, None, seconds)
            else:
                each.pass_over()

    def learned(self) -> Iterator[tuple[Drafter, Costs]]:
        for each in self._each:
            yield from each.learned()
