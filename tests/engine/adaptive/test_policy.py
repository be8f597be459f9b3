"""The controller against simulated machines and texts."""

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest
from simulation import (
    BLOCK_SIZE,
    CPU,
    DRAFTERS,
    GPU,
    KINDS,
    MACHINES,
    NOW,
    PAIR,
    TEXTS,
    TREE,
    Decoding,
    Knowing,
    Lookup,
    Machine,
    Text,
    changing,
    constant,
    request,
    start,
    stored,
)

from blockdraft.decode.proposal import Plan
from blockdraft.engine.adaptive.policy import (
    AGAIN,
    BETWEEN,
    CREDIT,
    EXPLORE,
    MOST_LOST,
    NEW,
    PATIENCE,
    REST,
    Controller,
    Trials,
)
from blockdraft.engine.adaptive.stored_costs import Costs
from blockdraft.engine.request import Request
from blockdraft.types import Drafting

CHANGING_ROWS: Callable[[int], int] = lambda cycle: 1 + cycle // 7 * 5 % 8  # noqa: E731
ROWS: dict[str, Callable[[int], int]] = {"one": lambda cycle: 1, "eight": lambda cycle: 8, "changing": CHANGING_ROWS}


def stretches(decoding: Decoding) -> tuple[float, float]:
    """What was reached of the best fixed size's tokens a second, in cycles 100 to 500 and 500 to 2000."""
    decoding.run(100)
    return decoding.run(400).against_best, decoding.run(1500).against_best


# Quick ones: every kind of stored costs, machine and drafter at least once.
QUICK = [
    ("lookup", "pair", "even", "one", "halved"),
    ("lookup", "pair", "fading", "one", "doubled"),
    ("lookup", "gpu", "even", "eight", "shuffled"),
    ("lookup", "gpu", "fading", "one", "absent"),
    ("lookup", "cpu", "middling", "one", "another"),
    ("chain", "pair", "even", "one", "another"),
    ("chain", "gpu", "middling", "one", "shuffled"),
    ("chain", "cpu", "middling", "one", "right"),
    ("tree", "pair", "fading", "one", "shuffled"),
    ("tree", "gpu", "even", "one", "doubled"),
]


@pytest.mark.parametrize(("kind", "machine", "text", "rows", "costs"), QUICK)
def test_close_to_the_best_fixed_size_from_any_costs(kind: str, machine: str, text: str, rows: str, costs: str) -> None:
    known = start(costs, MACHINES[machine], seed=0)
    early, late = stretches(Decoding(kind, MACHINES[machine], TEXTS[text], known, rows=ROWS[rows]))
    assert early >= 0.95 and late >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("costs", KINDS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_close_to_the_best_fixed_size_from_any_costs_for_more_seeds(kind: str, machine: str, costs: str) -> None:
    """Nearly always. The rest is a machine that drafting hardly helps, batches that change before much is known of
    their sizes, and trees that begin without costs: they come to within a few percent in the first 500 cycles."""
    found = [
        stretches(
            Decoding(kind, MACHINES[machine], TEXTS[text], start(costs, MACHINES[machine], seed), seed, rows=rows)
        )
        for text in TEXTS
        for rows in ROWS.values()
        for seed in range(2)
    ]
    early, late = zip(*found, strict=True)
    assert sum(early) / len(early) >= 0.97 and min(early) >= 0.88
    assert sum(late) / len(late) >= 0.985 and min(late) >= 0.95
    assert sum(each < 0.95 for each in early) <= 0.15 * len(early)
    assert sum(each < 0.98 for each in late) <= 0.17 * len(late)


@pytest.mark.parametrize("draft", [0.7, 1.0])
def test_a_first_cycle_without_luck_is_soon_forgotten(draft: float) -> None:
    """Drafting gains a third, and answers are short, so that what one begins with counts."""
    machine, found = Machine(draft=draft, flat=1, node=0.15, noise=0.1), []
    for seed in range(8):
        text: Text = lambda cycle: constant(0.78 if cycle else 0.0)(cycle)  # noqa: E731
        decoding = Decoding("lookup", machine, text, stored(machine), seed, answer=30)
        decoding.run(10)
        found.append(decoding.run(300).against_best)
    assert sum(found) / len(found) >= 0.95


def test_more_guesses_are_tried_though_they_are_thought_to_take_too_long() -> None:
    machine = Machine(draft=0.2, flat=4, node=0.1)
    plain, points = (0.5e-3,), (tuple((n, machine.seconds(1, n) * (0.5 if n < 2 else 1.3)) for n in range(1, 16)),)
    wrong = Costs((1,), plain, points, points, NOW)  # a step from one guess to two that is not there
    decoding = Decoding("chain", machine, constant(0.78, 0.95), wrong)
    decoding.run(500)
    assert decoding.run(500).against_best > 0.98


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_text_that_cannot_be_guessed_costs_two_percent_at_most(kind: str, machine: str) -> None:
    decoding = Decoding(kind, MACHINES[machine], constant(0.0), stored(MACHINES[machine]), seed=1)
    decoding.run(200)
    assert decoding.run(1500).against_plain >= 0.98


def test_a_hopeless_drafter_is_tried_seldom_and_never_given_up() -> None:
    decoding = Decoding("lookup", PAIR, constant(0.0), stored(PAIR))
    decoding.run(3000)
    drafted = [cycle for cycle, guesses in enumerate(decoding.chosen) if guesses is not None and cycle >= 500]
    assert 5 <= len(drafted) <= 200
    assert max(b - a for a, b in zip(drafted, drafted[1:], strict=False)) < 1500


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafting_comes_back_when_the_text_becomes_easy(kind: str) -> None:
    decoding = Decoding(kind, PAIR, changing(0.02, 0.9, 1000), stored(PAIR))
    decoding.run(1200)
    assert decoding.run(600).against_best >= 0.95


@pytest.mark.parametrize("kind", DRAFTERS)
def test_other_work_of_the_machine_is_followed(kind: str) -> None:
    """From cycle 500 on each guess takes longer: the best number of guesses is another, or none."""

    def slower(cycle: int, guesses: int | None) -> float:
        return 1.0 + (0.4 * (guesses or 0) if cycle >= 500 else 0.0)

    decoding = Decoding(kind, PAIR, constant(0.8), stored(PAIR), slower=slower)
    decoding.run(700)
    assert decoding.run(400).against_best >= 0.95


def test_where_drafting_gains_little_it_is_tried_again_and_again() -> None:
    """The best size is 5 % above plain decoding, less than a few cycles can tell."""
    found = [stretches(Decoding("lookup", CPU, constant(0.8), stored(CPU), seed))[1] for seed in range(6)]
    assert sum(found) / len(found) >= 0.98


def test_growing_contexts_do_no_harm() -> None:
    decoding = Decoding("lookup", PAIR, constant(0.8), stored(PAIR), slower=lambda cycle, n: 1 + cycle / 2000)
    early, late = stretches(decoding)
    assert early >= 0.95 and late >= 0.98


def test_a_new_request_begins_with_what_was_learned_from_others() -> None:
    decoding = Decoding("lookup", PAIR, constant(0.0), stored(PAIR))
    decoding.run(200)
    drafted = 0
    for _ in range(20):  # short answers
        decoding.requests = [request()]
        decoding.run(30)
        drafted += sum(guesses is not None for guesses in decoding.chosen[-30:])
    assert drafted <= 60


def controller(kind: str = "lookup", costs: Costs | None = None) -> Controller:
    drafter, drafting = DRAFTERS[kind]
    return Controller(drafter, drafting, lambda: costs, now=lambda: NOW, watch=lambda: 0.0)  # type: ignore[arg-type]


def test_one_decision_serves_the_whole_batch() -> None:
    """An easy row pays for drafting that a hard row alone would not be worth."""
    drafter = Lookup()
    drafter.block_size = 5
    found = Controller(drafter, Drafting("auto"), lambda: stored(PAIR), now=lambda: NOW, watch=lambda: 0.0)  # type: ignore[arg-type]
    easy, hard = request(), request()

    def drafts(requests: list[Request]) -> int:
        """Of a hundred cycles; all that is guessed for the easy request is right."""
        found_drafts = 0
        for _ in range(100):
            plan = found.plan(requests)
            guesses = plan.block_size - 1
            lengths = [guesses if each is easy else 0 for each in requests]
            seconds = PAIR.seconds(len(requests), guesses or None)
            found.learn(requests, plan, guesses, [guesses] * len(requests), lengths, seconds=seconds)
            found_drafts += guesses > 0
        return found_drafts

    drafts([easy, hard])
    assert drafts([easy, hard]) > 80
    assert drafts([hard]) < 50
    assert drafts([easy]) > 80


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

    controller = Controller(Knowing(), drafting, never)  # type: ignore[arg-type]
    plan = controller.plan([request()])
    assert (plan.block_size, plan.tree_budget, plan.cycle_seconds) == (block_size, budget, None)


def test_a_drafter_with_probabilities_gets_the_costs() -> None:
    for kind, most in (("chain", BLOCK_SIZE - 1), ("tree", 128)):
        plan = controller(kind, stored(PAIR)).plan([request(), request()])
        assert plan.cycle_seconds == pytest.approx(stored(PAIR).cycle(2, most, kind == "tree"), rel=0.2)
        assert plan.tree_budget == (0 if kind == "chain" else most)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_without_costs_learning_begins_with_short_guesses(kind: str) -> None:
    plan = controller(kind).plan([request()])
    most = plan.block_size - 1 if plan.cycle_seconds is None else len(plan.cycle_seconds) - 1
    assert 1 <= most <= 2


def test_who_knows_probabilities_of_trees_alone_does_not_choose_the_length_of_chains() -> None:
    class Trees(Knowing):
        knows_lengths = False

    plans = [
        Controller(Trees(), drafting, lambda: stored(PAIR)).plan([request()]) for drafting in (Drafting("auto"), TREE)
    ]  # type: ignore[arg-type]
    assert [plan.cycle_seconds is None for plan in plans] == [True, False]


def test_guesses_past_the_length_limit_are_not_asked_for() -> None:
    found = Controller(Lookup(), Drafting(), lambda: None)  # type: ignore[arg-type]
    one, two = request(5), request(3)
    one.token_ids = [1]
    assert found.plan([one, two]).block_size == 5


def test_how_a_sampled_chain_is_judged_does_not_depend_on_what_its_rows_have_left() -> None:
    for drafting in (Drafting(sampled=True), Drafting("auto", sampled=True)):
        found = Controller(Knowing(), drafting, lambda: stored(PAIR))  # type: ignore[arg-type]
        assert found.plan([request(2)]).block_size == found.plan([request()]).block_size == BLOCK_SIZE
        for _ in range(300):  # nor on how deep others went
            found.plan([request()])
            found.learn([request()], Plan(9, []), 4, [4], [4])
        assert found.plan([request()]).block_size == BLOCK_SIZE


def test_an_overconfident_drafter_is_trusted_less_and_a_modest_one_more() -> None:
    for accepted, expected, trust in ((2, 4.0, 0.5), (4, 4.0, 1.0), (6, 4.0, 1.5)):
        found = controller("chain", stored(GPU))
        requests = [request(), request()]
        for _ in range(300):
            found.learn(requests, found.plan(requests), 8, [8, 8], [accepted, accepted], [expected] * 2)
        assert found.plan(requests).trust == pytest.approx(trust, rel=0.02)


def test_the_draft_pass_is_as_long_as_the_guesses_that_pay() -> None:
    found = controller("chain", stored(GPU))
    requests = [request()]
    assert found.plan(requests).block_size == BLOCK_SIZE
    for _ in range(300):
        found.plan(requests)
        found.learn(requests, Plan(9, []), 4, [4], [4])
    assert 5 < found.plan(requests).block_size < 10
    for _ in range(400):  # where all that is drafted pays, more is drafted
        plan = found.plan(requests)
        found.learn(requests, plan, plan.block_size - 1, [plan.block_size - 1], [plan.block_size - 1])
    assert found.plan(requests).block_size == BLOCK_SIZE


def test_costs_are_asked_for_once_and_nothing_else_is_run() -> None:
    asked = []
    found = Controller(Lookup(), Drafting("auto"), lambda: asked.append(1))  # type: ignore[arg-type, func-returns-value]
    found.prepare()
    assert asked == [1]
    for rows in (1, 2, 4):
        found.plan([request() for _ in range(rows)])
    assert asked == [1]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_was_learned_is_where_the_next_engine_begins(kind: str) -> None:
    decoding = Decoding(kind, CPU, TEXTS["middling"], start("another", CPU, 0))
    decoding.run(1000)
    learned = decoding.controller.learned()
    assert learned is not None and learned.date == NOW and learned.knows(tree=kind == "tree")
    json.dumps(asdict(learned))
    guesses = 2
    ratio = learned.cycle(1, guesses, kind == "tree")[guesses] / learned.plain_cycle(1)
    assert ratio == pytest.approx(CPU.seconds(1, guesses) / CPU.seconds(1, None), rel=0.15)
    assert learned.plain_cycle(1) == pytest.approx(CPU.seconds(1, None), rel=0.1)
    assert Decoding(kind, CPU, TEXTS["middling"], learned).run(200).against_best >= 0.9
    assert controller().learned() is None


def test_while_drafting_is_far_from_paying_most_cycles_are_not_thought_about() -> None:
    decoding = Decoding("lookup", CPU, TEXTS["hard"], stored(CPU))
    decoding.run(300)
    found, thought = decoding.controller, 0
    for _ in range(200):
        decoding.run(1)
        thought += found._thinks
    assert 200 // (REST + 1) <= thought < 80
    while not found._rest:
        decoding.run(1)
    found.plan([request()])  # a new request is thought about at once
    assert found._thinks


def test_the_less_time_a_cycle_takes_the_fewer_are_thought_about() -> None:
    shares = []
    for thought in (0.0, 5e-6, 100e-6):
        decoding = Decoding("lookup", PAIR, TEXTS["even"], stored(PAIR), thought=thought)
        decoding.run(200)
        thoughts = 0
        for _ in range(600):
            decoding.run(1)
            thoughts += decoding.controller._thinks
        shares.append(thoughts / 600)
        assert decoding.run(300).against_best >= 0.98
    assert shares[0] == 1 and shares[1] > 0.9 and 1 / (REST + 1) < shares[2] < 0.25


def test_a_repeated_plan_ends_with_what_is_left_of_the_answer() -> None:
    decoding = Decoding("lookup", PAIR, TEXTS["even"], stored(PAIR), thought=1e-3)
    decoding.run(300)
    found = decoding.controller
    while not found._rest:
        decoding.run(1)
    assert found._repeated is not None and found._repeated.block_size > 2
    [last] = found._resting
    object.__setattr__(last.params, "max_new_tokens", len(last.token_ids) + 1)  # one token is left
    assert found.plan([last]).block_size <= 2 and found._thinks


def begun_trials(plain: float = 1.0) -> Trials:
    found = Trials()
    found.begin(plain)
    found.planned = NEW
    return found


def test_new_sizes_are_tried_on_credit_and_then_once_the_loss_is_made_up_for() -> None:
    found, now, trials = begun_trials(), 0, 0
    while found.new_is_due(now):
        found.charge(cost=2.0, value=0.0, plain=1.0, wasted=False, now=now)
        trials, now = trials + 1, now + BETWEEN
    assert trials == CREDIT / 2 + 1  # the last one is begun with nothing lost yet
    assert found.cycles_until_new(now, 1.0) == pytest.approx(2.0 / EXPLORE)
    found.planned = None
    found.make_up(2.0 / EXPLORE)
    assert found.new_is_due(now)


def test_between_two_trials_there_are_other_cycles() -> None:
    found = begun_trials()
    found.charge(cost=1.0, value=1.0, plain=1.0, wasted=False, now=7)
    assert not found.new_is_due(7 + BETWEEN - 1) and found.new_is_due(7 + BETWEEN)
    found.put_off(20)
    assert not found.new_is_due(20 + PATIENCE - 1) and found.cycles_until_new(20, 1.0) == PATIENCE


def test_a_kind_of_trial_makes_up_for_the_other_and_not_for_itself() -> None:
    found = begun_trials()
    found.planned = AGAIN
    assert found.again_is_due()
    found.charge(cost=1.0, value=0.0, plain=1.0, wasted=False, now=0)
    found.make_up(1e6)
    assert not found.again_is_due()
    found.planned = NEW
    found.make_up(1 / EXPLORE)
    assert found.again_is_due()


@pytest.mark.parametrize(("value", "wasted", "lost"), [(0.25, False, 0.75), (5.0, False, 0.01), (5.0, True, 0.1)])
def test_a_trial_loses_what_its_tokens_are_not_worth_and_something_in_any_case(
    value: float, wasted: bool, lost: float
) -> None:
    found = Trials()
    found.planned = AGAIN
    found.charge(cost=1.0, value=value, plain=1.0, wasted=wasted, now=0)
    found.planned = None
    found.make_up(0.99 * lost / EXPLORE)
    assert not found.again_is_due()
    found.make_up(0.02 * lost / EXPLORE)
    assert found.again_is_due()


def test_one_trial_that_took_for_ever_does_not_forbid_the_next_for_ever() -> None:
    found = Trials()
    found.planned = NEW
    found.charge(cost=1e9, value=0.0, plain=1.0, wasted=False, now=0)
    assert found.cycles_until_new(0, 1.0) == pytest.approx(MOST_LOST / EXPLORE)
