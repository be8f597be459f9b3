"""Drafters that take turns, against simulated machines and texts."""

import random
from dataclasses import replace

import pytest
from simulation import NOW, PAIR, Costless, Decoding, Knowing, Lookup, Machine, chain, constant, request, stored

from blockdraft.decode.proposal import HybridPlan
from blockdraft.decode.step_time import best_count
from blockdraft.engine.adaptive.policy import MAX_CREDIT, HybridController
from blockdraft.engine.adaptive.policy import controller as make_controller
from blockdraft.engine.runner import Outcome
from blockdraft.types import Drafting, RequestDrafting


class Both(Lookup):
    """A combination."""

    parts = (Costless(), Knowing())  # type: ignore[abstract, assignment]


BOTH = Both()  # type: ignore[abstract]
FREE = replace(PAIR, draft=0.0)


def controller() -> HybridController:
    return HybridController(BOTH, Drafting("auto"), lambda part: stored(PAIR), now=lambda: NOW)


class Turns:
    """Decoding of one row by two drafters, of which the first has no network.

    Args:
        easy: Share of the steps in which the first drafter's draft tokens are as likely as `first`; else it has none.
        first, second: Chance of each draft token of the drafters if all before it were right.
    """

    def __init__(self, easy: float, first: float, second: float, machine: Machine = PAIR) -> None:
        self.easy, self.acceptance_probs, self.machine = easy, (constant(first)(0), constant(second)(0)), machine
        self.controller, self.requests, self.rng = controller(), [request()], random.Random(0)
        self.drafted = [0, 0]  # steps of each drafter

    def run(self, steps: int) -> float:
        """Tokens over those of plain decoding in the same time."""
        tokens = seconds = 0.0
        for _ in range(steps):
            plan = self.controller.plan(self.requests)
            turns = plan.turns if isinstance(plan, HybridPlan) else ()
            known, draft_tokens, part = [0.0], 0, 0
            rates = [turn.tokens_per_second for turn in turns]
            for place, (index, asked, _) in enumerate(turns):
                part, power = index, self.rng.choice((0.5, 1.0, 2.0))
                known = list(
                    chain(tuple(c**power for c in self.acceptance_probs[index])).path_probs[: asked.block_size - 1]
                )
                known = known if index or self.rng.random() < self.easy else []
                assert asked.step_seconds is not None
                draft_tokens = best_count([known], asked.step_seconds, asked.calibration)
                promise = (
                    (1 + asked.calibration * sum(known[:draft_tokens])) / asked.step_seconds[draft_tokens]
                    if draft_tokens
                    else 0.0
                )
                if promise >= max(rates[place + 1 :], default=0.0):
                    break
            expected = sum(known[:draft_tokens])
            level = self.rng.random()
            length = sum(p > level for p in known[:draft_tokens])
            machine = self.machine if part else replace(self.machine, draft=0.0)
            took = machine.seconds(1, draft_tokens if turns else None)
            measured = self.machine.measured(took, self.rng)
            self.controller.learn(
                Outcome(self.requests, plan, draft_tokens, [draft_tokens], [length], [expected], part, measured)
            )
            self.drafted[part] += bool(turns)
            tokens, seconds = tokens + 1 + expected, seconds + took
        return tokens / seconds * self.machine.seconds(1, None)


def alone(kind: str, acceptance_prob: float) -> float:
    machine = FREE if kind == "costless" else PAIR
    decoding = Decoding(kind, machine, constant(acceptance_prob), stored(machine))
    decoding.run(200)
    return decoding.run(1000).against_plain


def test_members_take_turns_where_the_policy_chooses_how_far_to_draft() -> None:
    def takes_turns(drafter: Lookup, drafting: Drafting) -> bool:
        found = make_controller(drafter, drafting, lambda part: stored(PAIR))
        return isinstance(found.plan([request()]), HybridPlan)

    for free in (Drafting(), Drafting("auto", draft_window=9), Drafting(None, "auto"), Drafting(tree_budget="auto")):
        assert takes_turns(BOTH, free)
    for other in (
        Drafting(None),
        Drafting(5),
        Drafting(tree_budget=9),
        Drafting(5, "auto"),
        Drafting(None, sampled=True),
    ):
        assert not takes_turns(BOTH, other)
    assert not takes_turns(Knowing(), Drafting())  # type: ignore[abstract]


def test_a_member_that_chooses_no_tree_sizes_drafts_a_chain_beside_trees() -> None:
    class CostlessChains(Costless):
        chooses_tree_size = False

    class LookupAndTrees(Lookup):
        """A hybrid."""

        parts = (CostlessChains(), Knowing())  # type: ignore[abstract, assignment]

    drafter: Lookup = LookupAndTrees()  # type: ignore[abstract]
    plan = make_controller(drafter, Drafting(tree_budget="auto"), lambda part: None, max_auto_budget=20).plan(
        [request()]
    )
    assert isinstance(plan, HybridPlan)
    assert [(turn.drafter, turn.plan.tree_budget) for turn in plan.turns] == [(0, 0), (1, 20)]


def test_observing_what_others_drafted_costs_no_credit() -> None:
    found, requests = controller(), [request()]
    plan = found.plan(requests)
    assert isinstance(plan, HybridPlan) and plan.turns[-1].drafter == 1
    outcome = Outcome(requests, plan, 3, [3], [3], seconds=PAIR.seconds(1, 3), catch_up_seconds=100.0, drafter=1)
    credit = found.members[1].credit
    found.learn(outcome)
    assert found.members[1].credit >= min(credit, MAX_CREDIT) - 0.5


def test_a_model_is_not_asked_where_only_repetition_pays() -> None:
    found = Turns(easy=0.5, first=0.9, second=0.02)
    found.run(200)
    found.drafted = [0, 0]
    both = found.run(1000)
    assert found.drafted[1] < 100 and both > 1.2
    assert not found.controller.members[1].drafts and found.controller.drafts


def test_repetition_that_does_not_pay_costs_next_to_nothing() -> None:
    found = Turns(easy=0.0, first=0.5, second=0.8)
    found.run(200)
    found.drafted = [0, 0]
    assert found.run(1000) > 0.97 * alone("chain", 0.8)
    assert found.drafted[0] < 50


def test_text_that_nobody_can_draft_token_is_decoded_plainly() -> None:
    found = Turns(easy=0.0, first=0.5, second=0.02)
    found.run(200)
    assert found.run(1000) > 0.97


def test_each_drafts_where_it_promises_more() -> None:
    found = Turns(easy=0.3, first=0.95, second=0.6)
    found.run(200)
    found.drafted = [0, 0]
    assert found.run(1000) > 1.1 * alone("chain", 0.6)
    assert min(found.drafted) > 200


def test_what_one_drafter_shows_of_the_pace_of_the_machine_holds_for_all() -> None:
    lookup, model = (each.step_times(1) for each in controller().members)
    lookup.learn(3, 2e-3, 0)
    for step in range(40):
        model.learn(2, 1e-3 if step < 20 else 3e-3, step)
    assert lookup.expected()[1 + 3] == pytest.approx(6e-3)


def test_what_is_learned_of_each_drafter_is_stored_for_it() -> None:
    found = Turns(easy=0.5, first=0.8, second=0.8)
    assert not list(found.controller.learned())
    found.run(300)
    learned = dict(found.controller.learned())
    assert list(learned) == list(BOTH.parts) and all(costs.plain_step(1) > 0 for costs in learned.values())
    lookup, model = (learned[part].drafted_steps(1, 3, tree=False)[3] for part in BOTH.parts)
    assert model / PAIR.seconds(1, 3) == pytest.approx(1.0, rel=0.25) and lookup < model


def test_each_drafter_begins_with_costs_of_its_own() -> None:
    costs = dict(zip(BOTH.parts, (stored(FREE), stored(PAIR)), strict=True))
    found = HybridController(BOTH, Drafting("auto"), costs.__getitem__, now=lambda: NOW)
    lookup, model = (each.step_times(1).expected()[1 + 3] for each in found.members)
    assert (lookup, model) == (pytest.approx(FREE.seconds(1, 3)), pytest.approx(PAIR.seconds(1, 3)))


def test_a_drafter_that_pauses_is_tried_while_another_drafts() -> None:
    """Text in which lookup begins to pay only after a while."""
    found = Turns(easy=0.0, first=0.95, second=0.6)
    lookup = found.controller.members[0]
    lookup.paused, lookup.credit = True, -1.0
    lookup.acceptance.tokens, lookup.acceptance.draft_tokens = 1.0, 3.0
    found.easy, found.drafted = 0.8, [0, 0]
    found.run(600)
    assert found.drafted[0] > 200


def test_requests_that_want_no_drafts_get_none() -> None:
    found, off = controller(), request()
    off.drafting = found.tighter_limits(RequestDrafting(enabled=False))
    assert off.drafting is not None
    assert found.plan([off]).block_size == 1 and not isinstance(found.plan([off]), HybridPlan)
    short = request()
    short.drafting = found.tighter_limits(RequestDrafting(block_size=3))
    plan = found.plan([short])
    assert isinstance(plan, HybridPlan)
    assert plan.block_size == 3 and {turn.plan.block_size for turn in plan.turns} == {3}
    last = request(1)
    last.token_ids = []
    assert found.plan([last]).block_size == 2
