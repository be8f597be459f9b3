"""The controller against simulated machines and texts."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace

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
from thinned import LONG, thinned

from blockdraft.decode.proposal import Plan
from blockdraft.decode.step_time import Costs
from blockdraft.engine.adaptive.policy import HOLD, MAX_CREDIT, TRIAL_SHARE, Controller
from blockdraft.engine.request import Request
from blockdraft.engine.runner import Outcome
from blockdraft.types import Drafting

CHANGING_ROWS: Callable[[int], int] = lambda step: 1 + step // 7 * 5 % 8  # noqa: E731
ROWS: dict[str, Callable[[int], int]] = {"one": lambda step: 1, "eight": lambda step: 8, "changing": CHANGING_ROWS}


def stretches(decoding: Decoding) -> tuple[float, float]:
    """What was reached of the best fixed size's tokens a second, in steps 100 to 500 and 500 to 2000."""
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "machine", "text", "rows", "costs"), QUICK)
def test_close_to_the_best_fixed_size_from_any_costs(kind: str, machine: str, text: str, rows: str, costs: str) -> None:
    known = start(costs, MACHINES[machine], seed=0)
    early, late = stretches(Decoding(kind, MACHINES[machine], TEXTS[text], known, rows=ROWS[rows]))
    assert early >= 0.93 and late >= 0.96


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "machine", "costs"), thinned(DRAFTERS, MACHINES, KINDS, keep=9, marks=LONG))
def test_close_to_the_best_fixed_size_from_any_costs_for_more_texts(
    kind: str, machine: str, costs: str, seed: int
) -> None:
    """Nearly always. The rest is a machine that drafting hardly helps, batches that change before much is known of
    their sizes, and trees that begin without costs: they come to within a few percent in the first 500 steps."""
    found = [
        stretches(
            Decoding(kind, MACHINES[machine], TEXTS[text], start(costs, MACHINES[machine], seed), seed, rows=rows)
        )
        for text in TEXTS
        for rows in ROWS.values()
    ]
    early, late = zip(*found, strict=True)
    assert sum(early) / len(early) >= 0.92 and min(early) >= 0.6
    assert sum(late) / len(late) >= 0.96 and min(late) >= 0.8


@pytest.mark.parametrize("seed", [0, 1])
def test_what_trials_with_other_numbers_of_rows_lost_leaves_some_for_the_next_number(seed: int) -> None:
    known = start("another", CPU, seed)
    decoding = Decoding("tree", CPU, TEXTS["hard"], known, seed, rows=CHANGING_ROWS)
    decoding.run(100)
    assert decoding.run(400).against_best >= 0.9


def test_a_drafter_without_a_network_is_asked_for_as_much_as_it_has() -> None:
    sizes = {}
    for kind in ("costless", "chain"):
        decoding = Decoding(kind, PAIR, TEXTS["middling"], stored(PAIR))
        decoding.run(200)
        plans = [decoding.controller.plan([request()]) for _ in range(20)]
        sizes[kind] = {plan.block_size for plan in plans if plan.block_size > 1}
    assert sizes["costless"] == {BLOCK_SIZE} and max(sizes["chain"]) < BLOCK_SIZE


@pytest.mark.parametrize("draft", [0.7, 1.0])
def test_a_first_step_without_luck_is_soon_forgotten(draft: float) -> None:
    """Drafting gains a third, and answers are short, so that what one begins with counts."""
    machine, found = Machine(draft=draft, flat=1, node=0.15, noise=0.1), []
    for seed in range(8):
        text: Text = lambda step: constant(0.78 if step else 0.0)(step)  # noqa: E731
        decoding = Decoding("lookup", machine, text, stored(machine), seed, answer=30)
        decoding.run(10)
        found.append(decoding.run(300).against_best)
    assert sum(found) / len(found) >= 0.9


def test_more_draft_tokens_are_tried_though_they_are_thought_to_take_too_long() -> None:
    machine = Machine(draft=0.2, flat=4, node=0.1)
    plain, points = (0.5e-3,), (tuple((n, machine.seconds(1, n) * (0.5 if n < 2 else 1.3)) for n in range(1, 16)),)
    wrong = Costs((1,), plain, points, points, NOW)  # a step from one draft token to two that is not there
    decoding = Decoding("chain", machine, constant(0.78, 0.95), wrong)
    decoding.run(500)
    assert decoding.run(500).against_best > 0.98


@pytest.mark.parametrize(("kind", "machine"), thinned(DRAFTERS, MACHINES, keep=3))
def test_text_that_cannot_be_drafted_costs_two_percent_at_most(kind: str, machine: str) -> None:
    decoding = Decoding(kind, MACHINES[machine], constant(0.0), stored(MACHINES[machine]), seed=1)
    decoding.run(200)
    assert decoding.run(1500).against_plain >= 0.98


def test_a_hopeless_drafter_is_tried_seldom_and_never_given_up() -> None:
    decoding = Decoding("lookup", PAIR, constant(0.0), stored(PAIR))
    decoding.run(3000)
    drafted = [step for step, draft_tokens in enumerate(decoding.chosen) if draft_tokens is not None and step >= 500]
    assert 5 <= len(drafted) <= 200
    assert max(b - a for a, b in zip(drafted, drafted[1:], strict=False)) < 1500


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafting_comes_back_when_the_text_becomes_easy(kind: str) -> None:
    decoding = Decoding(kind, PAIR, changing(0.02, 0.9, 1000), stored(PAIR))
    decoding.run(1200)
    assert decoding.run(600).against_best >= 0.95


@pytest.mark.parametrize("kind", DRAFTERS)
def test_other_work_of_the_machine_is_followed(kind: str) -> None:
    """From step 500 on each draft token takes longer: the best number of draft tokens is another, or none."""

    def slower(step: int, draft_tokens: int | None) -> float:
        return 1.0 + (0.4 * (draft_tokens or 0) if step >= 500 else 0.0)

    decoding = Decoding(kind, PAIR, constant(0.8), stored(PAIR), slower=slower)
    decoding.run(700)
    assert decoding.run(400).against_best >= 0.95


def test_where_drafting_gains_little_it_is_tried_again_and_again() -> None:
    """The best size is 5 % above plain decoding, less than a few steps can tell."""
    found = [stretches(Decoding("lookup", CPU, constant(0.8), stored(CPU), seed))[1] for seed in range(6)]
    assert sum(found) / len(found) >= 0.955


def test_growing_contexts_do_no_harm() -> None:
    decoding = Decoding("lookup", PAIR, constant(0.8), stored(PAIR), slower=lambda step, n: 1 + step / 2000)
    early, late = stretches(decoding)
    assert early >= 0.95 and late >= 0.96


def test_a_new_request_begins_with_what_was_learned_from_others() -> None:
    decoding = Decoding("lookup", PAIR, constant(0.0), stored(PAIR))
    decoding.run(200)
    drafted = 0
    for _ in range(20):  # short answers
        decoding.requests = [request()]
        decoding.run(30)
        drafted += sum(draft_tokens is not None for draft_tokens in decoding.chosen[-30:])
    assert drafted <= 60


def controller(kind: str = "lookup", costs: Costs | None = None) -> Controller:
    drafter, drafting = DRAFTERS[kind]
    return Controller(drafter, drafting, lambda drafter: costs, now=lambda: NOW)  # type: ignore[arg-type]


def test_one_decision_serves_the_whole_batch() -> None:
    """An easy row pays for drafting that a hard row alone would not be worth."""
    drafter = Lookup()
    drafter.block_size = 5
    found = Controller(drafter, Drafting("auto"), lambda drafter: stored(PAIR), now=lambda: NOW)  # type: ignore[arg-type]
    easy, hard = request(), request()

    def drafts(requests: list[Request]) -> int:
        """Of a hundred steps; all that is drafted for the easy request is right."""
        found_drafts = 0
        for _ in range(100):
            plan = found.plan(requests)
            draft_tokens = plan.block_size - 1
            lengths = [draft_tokens if each is easy else 0 for each in requests]
            seconds = PAIR.seconds(len(requests), draft_tokens or None)
            found.learn(Outcome(requests, plan, draft_tokens, [draft_tokens] * len(requests), lengths, seconds=seconds))
            found_drafts += draft_tokens > 0
        return found_drafts

    drafts([easy, hard])
    assert drafts([easy, hard]) > 80
    assert drafts([hard]) < 50
    assert drafts([easy]) > 80


@pytest.mark.parametrize(
    ("drafting", "block_size", "budget"),
    [
        (Drafting(None), 16, 0),
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
    assert (plan.block_size, plan.tree_budget, plan.step_seconds) == (block_size, budget, None)


def test_a_drafter_with_probabilities_gets_the_costs() -> None:
    for kind, most in (("chain", BLOCK_SIZE - 1), ("tree", 256)):
        plan = controller(kind, stored(PAIR)).plan([request(), request()])
        assert plan.step_seconds == pytest.approx(stored(PAIR).drafted_steps(2, most, kind == "tree"), rel=0.2)
        assert plan.tree_budget == (0 if kind == "chain" else most)


def test_who_chooses_tree_size_of_trees_alone_does_not_choose_the_length_of_chains() -> None:
    class Trees(Knowing):
        chooses_length = False

    trees = Trees()  # type: ignore[abstract]
    plans = [Controller(trees, each, lambda drafter: stored(PAIR)).plan([request()]) for each in (Drafting(), TREE)]
    assert [plan.step_seconds is None for plan in plans] == [True, False]


def test_who_knows_no_probabilities_gets_trees_of_as_many_draft_tokens_as_pay() -> None:
    plan = Controller(Lookup(), TREE, lambda drafter: stored(PAIR)).plan([request()])  # type: ignore[arg-type]
    assert plan.tree_budget == plan.block_size - 1 < BLOCK_SIZE


def test_draft_tokens_past_the_length_limit_are_not_asked_for() -> None:
    found = Controller(Lookup(), Drafting(None), lambda drafter: None)  # type: ignore[arg-type]
    one, two = request(5), request(3)
    one.token_ids = [1]
    assert found.plan([one, two]).block_size == 5


def drafted(found: Controller, requests: list[Request]) -> Plan:
    """The next plan that is no trial and drafts, while steps without draft tokens take their time."""
    for _ in range(100):
        plan = found.plan(requests)
        assert found.decision is not None
        if plan.block_size > 1 and not found.decision.trial:
            return plan
        count = len(requests)
        draft_tokens = None if plan.block_size == 1 else 4
        accepted, seconds = [draft_tokens or 0] * count, GPU.seconds(count, draft_tokens)
        found.learn(Outcome(requests, plan, draft_tokens or 0, [4] * count, accepted, seconds=seconds))
    raise AssertionError("drafting pauses")


def test_how_a_sampled_chain_is_judged_does_not_depend_on_what_its_rows_have_left() -> None:
    for drafting in (Drafting(None, sampled=True), Drafting("auto", sampled=True)):
        found = Controller(Knowing(), drafting, lambda drafter: stored(GPU))  # type: ignore[arg-type]
        assert found.plan([request(2)]).block_size == found.plan([request()]).block_size == BLOCK_SIZE
    row = request()
    for _ in range(100):  # nor on how deep others went
        plan = drafted(found, [row])
        assert plan.block_size == BLOCK_SIZE
        found.learn(Outcome([row], plan, 4, [4], [4], seconds=GPU.seconds(1, 4)))


def test_an_overconfident_drafter_is_trusted_less_and_a_modest_one_more() -> None:
    for accepted, expected, calibration in ((2, 4.0, 0.5), (4, 4.0, 1.0), (6, 4.0, 1.5)):
        found = controller("chain", stored(GPU))
        requests = [request(), request()]
        for _ in range(300):
            plan = drafted(found, requests)
            found.learn(Outcome(requests, plan, 8, [8, 8], [accepted] * 2, [expected] * 2, seconds=GPU.seconds(2, 8)))
        assert drafted(found, requests).calibration == pytest.approx(calibration, rel=0.02)


def test_the_draft_pass_is_as_long_as_the_draft_tokens_that_pay() -> None:
    found = controller("chain", stored(GPU))
    requests = [request()]
    assert found.plan(requests).block_size == BLOCK_SIZE
    for _ in range(100):
        found.learn(Outcome(requests, drafted(found, requests), 4, [4], [4], seconds=GPU.seconds(1, 4)))
    assert 5 < drafted(found, requests).block_size < 10
    for _ in range(100):  # where all that is drafted pays, more is drafted
        plan = drafted(found, requests)
        draft_tokens = plan.block_size - 1
        found.learn(
            Outcome(requests, plan, draft_tokens, [draft_tokens], [draft_tokens], seconds=GPU.seconds(1, draft_tokens))
        )
    assert drafted(found, requests).block_size == BLOCK_SIZE


def test_a_trial_does_not_change_what_is_usual() -> None:
    found = controller("tree", stored(GPU))
    requests = [request()]
    found.learn(Outcome(requests, drafted(found, requests), 8, [4], [3], [3.0], seconds=GPU.seconds(1, 8)))
    usual = found.acceptance.num_draft_tokens, found.acceptance.tokens
    while found.decision is None or not (found.decision.trial and found.decision.max_draft_tokens):
        plan = found.plan(requests)
        draft_tokens = None if plan.block_size == 1 else 8
        assert found.decision is not None
        if not found.decision.trial:
            found.learn(Outcome(requests, plan, 8, [4], [3], [3.0], seconds=GPU.seconds(1, 8)))
            usual = found.acceptance.num_draft_tokens, found.acceptance.tokens
        elif draft_tokens is None:
            found.learn(Outcome(requests, plan, 0, [0], [0], None, seconds=GPU.seconds(1, None)))
    found.learn(Outcome(requests, plan, 64, [9], [1], [1.0], seconds=GPU.seconds(1, 64)))
    assert (found.acceptance.num_draft_tokens, found.acceptance.tokens) == usual


def test_costs_are_asked_for_once_and_nothing_else_is_run() -> None:
    asked = []
    found = Controller(Lookup(), Drafting("auto"), lambda drafter: asked.append(1))  # type: ignore[arg-type, func-returns-value]
    found.prepare()
    assert asked == [1]
    for rows in (1, 2, 4):
        found.plan([request() for _ in range(rows)])
    assert asked == [1]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_was_learned_is_where_the_next_engine_begins(kind: str) -> None:
    decoding = Decoding(kind, CPU, TEXTS["middling"], start("another", CPU, 0))
    decoding.run(1000)
    [(_, learned)] = decoding.controller.learned()
    assert learned.date == decoding.clock and learned.knows(tree=kind == "tree")
    json.dumps(asdict(learned))
    draft_tokens = 2
    ratio = learned.drafted_steps(1, draft_tokens, kind == "tree")[draft_tokens] / learned.plain_step(1)
    assert ratio == pytest.approx(CPU.seconds(1, draft_tokens) / CPU.seconds(1, None), rel=0.15)
    assert learned.plain_step(1) == pytest.approx(CPU.seconds(1, None), rel=0.1)
    assert Decoding(kind, CPU, TEXTS["middling"], learned).run(200).against_best >= 0.9
    assert not list(controller().learned())


def test_a_decision_holds_for_some_steps_of_the_same_requests() -> None:
    decoding = Decoding("lookup", PAIR, TEXTS["even"], stored(PAIR))
    decoding.run(300)
    found, decided = decoding.controller, list[int]()
    decide = found.decide
    found.decide = lambda requests: decided.append(len(requests)) or decide(requests)  # type: ignore[assignment, func-returns-value]
    decoding.run(20 * HOLD)
    assert 20 <= len(decided) <= 40
    decoding.run(1)
    decided.clear()
    for _ in range(3):
        found.plan([request()])
    assert len(decided) == 3


def test_a_decision_that_holds_ends_with_what_is_left_of_the_answer() -> None:
    decoding = Decoding("lookup", PAIR, TEXTS["even"], stored(PAIR))
    decoding.run(300)
    [last] = decoding.requests[:1]
    assert decoding.controller.plan([last]).block_size > 2
    object.__setattr__(last.params, "max_new_tokens", len(last.token_ids) + 1)  # one token is left
    assert decoding.controller.plan([last]).block_size == 2


class Trials:
    """A controller of which nothing was accepted so far, so that it drafts in trials only."""

    def __init__(self) -> None:
        self.found, self.requests = controller(costs=stored(PAIR)), [request()]
        while not self.found.paused:
            self.step()

    def step(self, accepted: float = 0.0, slower: float = 1.0, late: float = 0.0, own: bool = False) -> int:
        """Run a step and return its number of draft tokens.

        Args:
            accepted: Share of draft tokens that are accepted.
            slower: Factor of the time of a trial.
            late: Seconds of a trial to catch up.
            own: Whether the request has draft tokens of its own.
        """
        plan = self.found.plan(self.requests)
        assert self.found.decision is not None
        draft_tokens = plan.block_size - 1
        seconds = PAIR.seconds(1, draft_tokens or None) * (slower if self.found.decision.trial else 1.0)
        lengths, late = [int(accepted * draft_tokens)], late if draft_tokens else 0.0
        outcome = Outcome(self.requests, plan, draft_tokens, [draft_tokens], lengths, seconds=seconds)
        self.found.learn(outcome._replace(catch_up_seconds=late, has_own_drafts=own))
        return draft_tokens


def test_what_trials_lose_is_made_up_for_before_the_next() -> None:
    trials = Trials()
    steps = [trials.step() for _ in range(2000)]
    lost = sum(PAIR.seconds(1, draft_tokens) / PAIR.seconds(1, None) - 1 for draft_tokens in steps if draft_tokens)
    assert 0.5 * TRIAL_SHARE * 2000 < lost < 1.2 * TRIAL_SHARE * 2000 + MAX_CREDIT


def test_what_a_drafter_observes_before_a_trial_is_part_of_its_loss() -> None:
    plain = PAIR.seconds(1, None)
    at_once, later = Trials(), Trials()
    tried = [sum(trials.step(late=late) > 0 for _ in range(2000)) for trials, late in ((at_once, 0.0), (later, plain))]
    assert 0 < tried[1] < 0.7 * tried[0] and tried[1] < 1.2 * TRIAL_SHARE * 2000 + MAX_CREDIT


def test_catching_up_does_not_end_what_pays() -> None:
    trials = Trials()
    trials.found.credit = MAX_CREDIT
    while not trials.step(accepted=0.15, late=PAIR.seconds(1, None)):  # it gains a tenth of a step, and loses one
        pass
    assert 0 < trials.found.credit < MAX_CREDIT - 0.8 and not trials.found.rests  # the next may be one, too


def test_after_a_trial_that_lost_there_are_other_steps_and_after_one_that_paid_the_next() -> None:
    trials = Trials()
    trials.found.credit = MAX_CREDIT
    while not trials.step():
        pass
    assert trials.found.credit > 0 and not any(trials.step() for _ in range(2))
    trials.found.credit = MAX_CREDIT
    while not trials.step(accepted=1.0):
        pass
    assert trials.step() > 0


def test_after_a_trial_that_own_draft_tokens_hide_there_are_other_steps() -> None:
    trials = Trials()
    trials.found.credit = MAX_CREDIT
    while not trials.step(own=True):
        pass
    assert trials.found.credit > 0 and trials.step() == 0


def test_a_delay_during_a_trial_is_no_loss() -> None:
    trials = Trials()
    for _ in range(3):  # times are known
        trials.found.credit = MAX_CREDIT
        while not trials.step():
            pass
    trials.found.credit = MAX_CREDIT
    while not trials.step(slower=20.0):
        pass
    assert trials.found.credit > MAX_CREDIT - 2


def test_times_that_are_thought_to_be_far_too_long_are_approached_step_by_step() -> None:
    machine = Machine(draft=0.2, flat=64, node=0.1)
    wrong = stored(machine, lambda: 8.0)  # drafting would not pay even if all draft tokens were right
    decoding = Decoding("lookup", machine, constant(0.9), wrong)
    decoding.run(100)
    assert decoding.run(100).against_best > 0.9


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("drafts_suffer", [1.0, 3.0])
def test_half_an_hour_of_other_work_changes_nothing_that_lasts(
    kind: str, drafts_suffer: float, other_work: dict[str, float | None]
) -> None:
    """A laptop's model, whose steps take 3 to 10 times as long for a while, those that draft perhaps even longer."""
    busy, rng = False, random.Random(1)

    def slower(step: int, draft_tokens: int | None) -> float:
        return rng.uniform(3, 10) * (1.0 if draft_tokens is None else drafts_suffer) if busy else 1.0

    laptop = replace(PAIR, plain=0.037)
    decoding = Decoding(kind, laptop, TEXTS["even"], stored(laptop), slower=slower)
    decoding.run(200)
    busy, other_work["cores"] = True, 1.5
    decoding.run_seconds(1800)
    [(_, learned)] = decoding.controller.learned()
    assert learned.plain_step(1) == pytest.approx(laptop.seconds(1, None), rel=0.15)
    busy, other_work["cores"] = False, None
    decoding.run_seconds(8)
    assert decoding.run_seconds(20).against_best >= 0.92
    [(_, learned)] = decoding.controller.learned()
    assert learned.plain_step(1) == pytest.approx(laptop.seconds(1, None), rel=0.15)
    drafted = learned.drafted_steps(1, 3, kind == "tree")[3]
    assert drafted == pytest.approx(laptop.seconds(1, 3), rel=0.3)
