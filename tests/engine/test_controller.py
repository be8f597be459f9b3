"""The controller against a simulated machine: cycles have known costs and guesses a known chance."""

import random
from collections.abc import Sequence
from functools import cache

import pytest

from blockdraft.engine.controller import LONGEST_WAIT, Controller
from blockdraft.engine.costs import Costs
from blockdraft.engine.request import Request
from blockdraft.engine.text import AnswerText
from blockdraft.proposal import Plan
from blockdraft.sampling import RandomNumbers
from blockdraft.types import Drafting, SamplingParams

NODES = tuple(range(1, 513))


def costs(per_node: float, draft: float, per_row: float = 0.05) -> Costs:
    """A plain cycle of one row takes 1."""
    rows = (1, 64)
    forward = tuple(1 + per_node * (n - 1) for n in NODES)
    plain = tuple(1 + per_row * (b - 1) for b in rows)
    drafted = ((draft, 1.0), (draft, 1.0))
    return Costs(NODES, forward, rows, plain, drafted, drafted)


class FixedDrafter:
    block_size = 16
    taps = ()

    def __init__(self, knows_probabilities: bool = False) -> None:
        self.knows_probabilities = knows_probabilities


def request(tokens: int = 10**6) -> Request:
    return Request([1], SamplingParams(tokens), frozenset(), RandomNumbers(0), AnswerText(None))


def decode(controller: Controller, machine: Costs, requests: Sequence[Request], chance: float, cycles: int) -> float:
    """Tokens a second, when each guess of a chain is right with this chance after the ones before it."""
    rng, tokens, seconds = random.Random(0), 0, 0.0
    for _ in range(cycles):
        plan = controller.plan(requests)
        guesses = plan.block_size - 1
        lengths = []
        for _ in requests:
            length = 0
            while length < guesses and rng.random() < chance:
                length += 1
            lengths.append(length)
        controller.learn(requests, plan, guesses, [guesses] * len(requests), lengths)
        tokens += sum(lengths) + len(requests)
        seconds += cycle_seconds(machine, len(requests), guesses)
    return tokens / seconds


@cache
def cycle_seconds(machine: Costs, rows: int, guesses: int) -> float:
    return machine.cycle(rows, guesses, False)[-1] if guesses else machine.plain_cycle(rows)


def best_fixed(machine: Costs, rows: int, chance: float) -> float:
    rates = [rows / machine.plain_cycle(rows)]
    for length, seconds in enumerate(machine.cycle(rows, 15, False)):
        rates.append(rows * sum(chance**i for i in range(length + 1)) / seconds)
    return max(rates)


MACHINES = [costs(0.02, 0.4), costs(0.1, 0.4), costs(0.5, 0.5)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.85, 0.97])
def test_close_to_the_best_fixed_setting_and_never_below_plain(machine: Costs, rows: int, chance: float) -> None:
    controller = Controller(FixedDrafter(), Drafting("auto"), lambda: machine)  # type: ignore[arg-type]
    requests = [request() for _ in range(rows)]
    decode(controller, machine, requests, chance, 100)
    rate = decode(controller, machine, requests, chance, 2000)
    assert rate >= 0.97 * rows / machine.plain_cycle(rows)
    assert rate >= 0.95 * best_fixed(machine, rows, chance)


def test_a_hopeless_drafter_is_tried_ever_more_rarely() -> None:
    controller = Controller(FixedDrafter(), Drafting("auto"), lambda: MACHINES[1])  # type: ignore[arg-type]
    requests = [request()]
    plans = []
    for _ in range(5000):
        plan = controller.plan(requests)
        controller.learn(requests, plan, plan.block_size - 1, [plan.block_size - 1], [0])
        plans.append(plan.block_size > 1)
    trials = [i for i, drafts in enumerate(plans) if drafts]
    gaps = [b - a for a, b in zip(trials[5:], trials[6:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] == LONGEST_WAIT + 1


def test_drafting_comes_back_when_the_text_becomes_easy() -> None:
    machine = MACHINES[1]
    controller = Controller(FixedDrafter(), Drafting("auto"), lambda: machine)  # type: ignore[arg-type]
    requests = [request()]
    decode(controller, machine, requests, 0.0, 500)
    assert decode(controller, machine, requests, 0.95, 3000) > 2


def test_a_new_request_begins_with_what_was_learnt_from_others() -> None:
    machine = MACHINES[1]
    controller = Controller(FixedDrafter(), Drafting("auto"), lambda: machine)  # type: ignore[arg-type]
    decode(controller, machine, [request()], 0.0, 200)
    drafted = 0
    for _ in range(20):  # short answers
        newcomer = request(30)
        for _ in range(30):
            plan = controller.plan([newcomer])
            drafted += plan.block_size > 1
            controller.learn([newcomer], plan, plan.block_size - 1, [plan.block_size - 1], [0])
    assert drafted <= 10


def test_one_decision_serves_the_whole_batch() -> None:
    """An easy row pays for drafting that a hard row alone would not be worth."""
    machine = costs(0.01, 0.3, per_row=0.0)
    controller = Controller(FixedDrafter(), Drafting("auto"), lambda: machine)  # type: ignore[arg-type]
    easy, hard = request(), request()
    for _ in range(200):
        plan = Plan(16, [])
        controller.learn([easy, hard], plan, 15, [15, 15], [9, 0])
    assert controller.plan([easy, hard]).block_size > 1
    assert controller.plan([easy]).block_size > 1
    assert controller.plan([hard]).block_size == 1


@pytest.mark.parametrize(
    ("drafting", "block_size", "budget"),
    [
        (Drafting(), 16, 0),
        (Drafting(4), 4, 0),
        (Drafting(None, 64), 16, 64),
        (Drafting(None, 5), 6, 5),
        (Drafting(4, 64), 4, 64),
        (Drafting(1, 64), 1, 0),
    ],
)
def test_fixed_settings_need_no_costs(drafting: Drafting, block_size: int, budget: int) -> None:
    def never() -> Costs:
        raise AssertionError("measured for nothing")

    controller = Controller(FixedDrafter(True), drafting, never)  # type: ignore[arg-type]
    plan = controller.plan([request()])
    assert (plan.block_size, plan.tree_budget, plan.cycle_seconds) == (block_size, budget, None)


def test_a_drafter_with_probabilities_gets_the_costs() -> None:
    machine = MACHINES[0]
    for drafting, most in ((Drafting("auto"), 15), (Drafting(None, "auto"), 256), (Drafting("auto", 40), 40)):
        controller = Controller(FixedDrafter(True), drafting, lambda: machine)  # type: ignore[arg-type]
        plan = controller.plan([request(), request()])
        assert plan.cycle_seconds == machine.cycle(2, most, most != 15)
        assert plan.tree_budget == (0 if most == 15 else most)


def test_guesses_past_the_length_limit_are_not_asked_for() -> None:
    controller = Controller(FixedDrafter(), Drafting(), lambda: MACHINES[0])  # type: ignore[arg-type]
    one, two = request(5), request(3)
    one.token_ids = [1]
    assert controller.plan([one, two]).block_size == 5


def test_an_overconfident_drafter_is_trusted_less_and_a_modest_one_more() -> None:
    for accepted, expected, trust in ((2, 4.0, 0.5), (4, 4.0, 1.0), (6, 4.0, 1.5)):
        controller = Controller(FixedDrafter(True), Drafting("auto"), lambda: MACHINES[0])  # type: ignore[arg-type]
        requests = [request(), request()]
        for _ in range(300):
            controller.learn(requests, controller.plan(requests), 8, [8, 8], [accepted, accepted], [expected] * 2)
        assert controller.plan(requests).trust == pytest.approx(trust, rel=0.02)


def test_the_draft_pass_is_as_long_as_the_guesses_that_pay() -> None:
    controller = Controller(FixedDrafter(True), Drafting("auto"), lambda: MACHINES[0])  # type: ignore[arg-type]
    requests = [request()]
    assert controller.plan(requests).block_size == 16
    for _ in range(200):
        controller.learn(requests, controller.plan(requests), 4, [4], [4])
    assert 5 < controller.plan(requests).block_size < 10
    for _ in range(200):  # where all that is drafted pays, more is drafted
        plan = controller.plan(requests)
        controller.learn(requests, plan, plan.block_size - 1, [plan.block_size - 1], [plan.block_size - 1])
    assert controller.plan(requests).block_size == 16


def test_measured_times_outweigh_the_costs() -> None:
    machine = costs(0.01, 0.4)
    controller = Controller(FixedDrafter(True), Drafting("auto"), lambda: machine)  # type: ignore[arg-type]
    requests = [request()]

    def drafts(pace: float) -> int:
        """Of 200 cycles, those that draft where 2 tokens come of one, and drafting takes `pace` times as expected."""
        found = 0
        for _ in range(200):
            plan = controller.plan(requests)
            found += plan.block_size > 1
            guesses = 4 if plan.block_size > 1 else 0
            seconds = pace * cycle_seconds(machine, 1, 4) if guesses else machine.plain_cycle(1)
            controller.learn(requests, plan, guesses, [guesses], [min(guesses, 1)], None, seconds)
        return found

    assert drafts(1.0) == 200
    assert drafts(1.8) < 60


@pytest.mark.parametrize("slope", [0.3, 2.0])
def test_costs_that_were_measured_wrong_are_put_right(slope: float) -> None:
    believed, real = costs(0.05, 0.4), costs(0.05 * slope, 0.4)
    controller = Controller(FixedDrafter(), Drafting("auto"), lambda: believed)  # type: ignore[arg-type]
    requests = [request()]
    rng, tokens, seconds = random.Random(0), 0, 0.0
    for cycle in range(3000):
        plan = controller.plan(requests)
        guesses = plan.block_size - 1
        length = next((i for i in range(guesses) if rng.random() > 0.8), guesses)
        took = cycle_seconds(real, 1, guesses)
        controller.learn(requests, plan, guesses, [guesses], [length], None, took)
        if cycle >= 1000:
            tokens, seconds = tokens + 1 + length, seconds + took
    assert tokens / seconds >= 0.95 * best_fixed(real, 1, 0.8)
