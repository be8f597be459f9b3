"""The planner of a fit, from measured numbers to a plan."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from blockdraft_train.fit.facts import FitMachine, FitPlan, Speeds, TargetFacts, TargetMeasurements, duration, show
from blockdraft_train.fit.plan import (
    Default,
    Planner,
    candidates,
    expected_speedup,
    layer_weights,
    reference,
    target_layers,
)
from blockdraft_train.fit.settings import FitSettings
from blockdraft_train.settings_files import read_settings
from blockdraft_train.variant import find_variant, fit_gains

TARGET = TargetFacts(8, 224, 4096, 1024, True, 11_000_000, "native, compiled", "cpu", 4)
MACHINE = FitMachine(2, 2**34, 2**34, 2**36)
SPEEDS = Speeds((320, 1280), (0.2, 0.6), {2: 1.2, 4: 1.4, 8: 1.6}, 1_400_000)
MEASURED = TargetMeasurements(60.0, 300, 100.0, 0.05, 3000.0, 0.001, 20_000.0, {"dflash": SPEEDS})
QWEN = TargetFacts(28, 1024, 150_000, 32_768, True, 2**30, "native")
BIG = TargetFacts(36, 4096, 151_936, 40_960, True, 16_000_000_000, "native", "cuda")
GPU = FitMachine(16, 2**37, 6 * 2**30, 2**38)
FAST = Speeds((1024, 4096), (0.1, 0.2), {2: 1.1, 4: 1.1, 8: 1.15}, 1_000_000_000)
MEASURED_BIG = TargetMeasurements(200.0, 1400, 400.0, 0.0, 2500.0, 0.03, 50_000.0, {"dflash": FAST})


def plan(hours: float = 1.0, available: int | None = 100_000, **changes: Any) -> FitPlan:
    asked = FitSettings(hours=hours, **{name: changes.pop(name) for name in ("answers", "steps") if name in changes})
    given = {"target": TARGET, "machine": MACHINE, "measured": MEASURED, **changes}
    return Planner(asked, given["target"], given["machine"], given["measured"], available, 8.0, 60.0).plan()


def test_recipes_are_recipes() -> None:
    for one in (plan(), plan(target=BIG, machine=GPU, measured=MEASURED_BIG)):
        recipe = find_variant(one.variant).recipe_class(**one.recipe)
        assert recipe.eval_every * Default.EVALUATIONS >= recipe.steps
        assert recipe.length >= 256 and recipe.chunk >= 1


@pytest.mark.parametrize("hours", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("available", [3000, 100_000, None])
def test_a_plan_keeps_to_its_time(hours: float, available: int | None) -> None:
    total = 60.0 + sum(plan(hours, available).seconds.values())
    assert total <= 3600 * hours * Default.SAFETY + 60
    if available != 3000:  # and uses it
        assert total >= 3600 * hours * Default.SAFETY * 0.9


def test_more_time_means_more_of_both() -> None:
    short, long = plan(0.3), plan(1.0)
    assert long.answers > short.answers
    tokens = [one.recipe["steps"] * one.recipe["batch"] * one.recipe["length"] for one in (short, long)]
    assert tokens[1] > 2 * tokens[0]


@pytest.mark.parametrize(("longest", "length"), [(40, 256), (300, 320), (321, 384), (5000, 1024)])
def test_rows_hold_all_but_few_documents(longest: int, length: int) -> None:
    assert plan(measured=replace(MEASURED, long_document=longest)).recipe["length"] == length


def test_slow_answers_leave_room_for_training() -> None:
    slow = plan(measured=replace(MEASURED, answer_rate=100.0))
    assert slow.answers < plan().answers
    assert slow.seconds["train"] > slow.seconds["data"]


def test_few_prompts_end_training_early() -> None:
    few = plan(8.0, available=500)
    assert few.answers == 500 - few.held_out
    assert sum(few.seconds.values()) < 3600 * 8 * Default.SAFETY / 2
    assert any("before the time is up" in reason for reason in few.reasons)
    assert any("all 500 prompts of the data" in reason for reason in few.reasons)


def test_prompts_that_the_target_writes_take_time() -> None:
    own = plan(available=None)
    assert own.seconds["prompts"] > plan().seconds["prompts"]
    assert own.answers < plan().answers


def test_repetitive_answers_are_sampled() -> None:
    repetitive = plan(measured=replace(MEASURED, repetitive=0.7))
    assert repetitive.temperature > 0 and plan().temperature == 0
    assert any("70 % of the greedy ones are repetitive" in reason for reason in repetitive.reasons)
    asked = FitSettings(temperature=0.0)
    greedy = Planner(asked, TARGET, MACHINE, replace(MEASURED, repetitive=0.7), 100_000, 8.0, 60.0).plan()
    assert greedy.temperature == 0


def test_a_head_that_costs_more_than_the_layers_is_cut() -> None:
    small = replace(QWEN, layers=30, hidden_size=576, vocab_size=49_152, inner_size=1536)
    cut = plan(target=small)
    assert cut.recipe["draft_vocab"] == 8192
    assert candidates(small) == ["dflash", "eagle3"] and "eagle3" not in candidates(TARGET)
    assert any("8192 most frequent of 49152 tokens" in reason for reason in cut.reasons)
    both = plan(target=small, measured=replace(MEASURED, speeds={"dflash2": SPEEDS}))
    assert "draft_vocab" not in both.recipe and any("--variant dflash" in reason for reason in both.reasons)
    large = replace(small, layers=28, hidden_size=1536, vocab_size=151_936, inner_size=8960)  # Qwen2.5 1.5B
    assert plan(target=large).recipe["draft_vocab"] == 8192  # on a CPU, where its head takes half of the time
    # A CPU trains part of the large MLP. So this kind is measured before DFlash, and may be the only one.
    assert reference("eagle3", large)["intermediate_size"] == 1024
    assert 10 * layer_weights(reference("eagle3", large), large) < layer_weights(reference("dflash", large), large)
    narrow = replace(MEASURED, speeds={"eagle3": SPEEDS})
    assert any(
        "an MLP of 1024 for the target's 8960" in reason for reason in plan(target=large, measured=narrow).reasons
    )
    for target in (small, replace(large, device="cuda")):
        assert "intermediate_size" not in reference("eagle3", target)
    for target in (TARGET, replace(large, device="cuda"), replace(small, vocab_size=12_000)):
        assert "draft_vocab" not in plan(target=target).recipe


def test_steps_become_larger_where_their_size_hardly_matters() -> None:
    dear = Speeds((320, 1280), (4.0, 5.0), {2: 1.2, 4: 1.4, 8: 1.6}, 1_400_000)
    fixed = plan(measured=replace(MEASURED, speeds={"dflash": dear}))
    assert fixed.recipe["batch"] >= 4 and 150 <= fixed.recipe["steps"] < 800


def test_hidden_states_lie_where_there_is_room() -> None:
    assert plan().hidden_states == "memory" and "hidden-states" not in plan().seconds
    narrow = plan(target=replace(TARGET, device="cuda"), machine=replace(MACHINE, memory=2**26))
    assert narrow.hidden_states == "disk" and narrow.seconds["hidden-states"] > 0 and narrow.disk > plan().disk
    nowhere = plan(target=replace(TARGET, device="cuda"), machine=replace(MACHINE, memory=2**26, disk=2**27))
    assert nowhere.hidden_states is None and nowhere.disk < 2**27


def test_a_large_vocabulary_is_looked_at_in_parts() -> None:
    whole = plan()
    assert whole.recipe["chunk"] == whole.recipe["batch"] * whole.recipe["anchors"]
    parts = plan(target=BIG, machine=GPU, measured=MEASURED_BIG)
    assert parts.recipe["chunk"] < parts.recipe["batch"] * parts.recipe["anchors"]


def test_long_blocks_are_for_long_training() -> None:
    assert plan().recipe["block_size"] == 8
    week = plan(168.0, target=BIG, machine=GPU, measured=MEASURED_BIG)
    assert week.recipe["block_size"] == 16


def test_the_better_variant_is_chosen_and_named() -> None:
    both = replace(MEASURED, speeds={"dflash": SPEEDS, "dflash2": SPEEDS})
    assert plan(measured=both).variant == "dflash2"
    dear = replace(SPEEDS, step_costs={size: 2 * cost for size, cost in SPEEDS.step_costs.items()})
    both = replace(MEASURED, speeds={"dflash": SPEEDS, "dflash2": dear})
    assert plan(measured=both).variant == "dflash"
    assert plan(measured=both).reasons[0].startswith("dflash: ")


def test_it_says_where_drafts_do_not_pay() -> None:
    dear = replace(MEASURED, speeds={"dflash": replace(SPEEDS, step_costs={2: 2.0, 4: 3.0, 8: 4.0})})
    assert any("hardly be faster here" in reason for reason in plan(measured=dear).reasons)
    assert not any("hardly be faster here" in reason for reason in plan().reasons)


def test_numbers_that_are_asked_for_are_kept() -> None:
    given = plan(0.001, answers=10, steps=3)
    assert (given.answers, given.recipe["steps"]) == (10, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hours": 0.05}, r"0.05 hours leave time for 0 responses and 0 training steps.*--hours 0\.\d+ is about"),
        ({"available": 30}, "The data hold 30 different prompts"),
        ({"machine": replace(MACHINE, disk=10)}, "of disk and 0.0 MiB are free"),
        ({"machine": replace(MACHINE, memory=10, device_memory=10)}, "of memory and 10.5 MiB are free"),
    ],
)
def test_what_does_not_suffice_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_all_reasons_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"(?s)hours leave time.*of disk.*of memory"):
        plan(0.05, machine=replace(MACHINE, memory=10, device_memory=10, disk=10))


@pytest.mark.parametrize("slow", [1, 10, 100])
@pytest.mark.parametrize("what", ["answer_rate", "read_rate", "speeds"])
def test_the_least_hours_suffice(what: str, slow: float) -> None:
    if what == "speeds":
        value: Any = {
            name: replace(speed, seconds=tuple(slow * seconds for seconds in speed.seconds))
            for name, speed in MEASURED.speeds.items()
        }
    else:
        value = getattr(MEASURED, what) / slow
    measured = replace(MEASURED, **{what: value})
    with pytest.raises(ValueError) as refused:
        plan(0.05, measured=measured)
    least = float(str(refused.value).split("--hours ")[1].split()[0])
    assert plan(1.2 * least, measured=measured).recipe["steps"] >= Default.FEWEST_STEPS
    with pytest.raises(ValueError):
        plan(0.8 * least, measured=measured)


def test_a_plan_survives_its_file() -> None:
    made = plan()
    read = FitPlan(**json.loads(json.dumps(asdict(made))))
    assert show(read, TARGET, MACHINE, [], 1.0) == show(made, TARGET, MACHINE, [], 1.0)
    assert read.recipe["target_layers"] == list(made.recipe["target_layers"])


def test_a_plan_is_shown_with_its_reasons() -> None:
    lines = show(plan(), TARGET, MACHINE, ["chats.jsonl"], 1.0)
    assert "prompts: chats.jsonl" in lines
    assert sum(line.startswith("why: ") for line in lines) == len(plan().reasons)
    assert any("writes them itself" in line for line in show(plan(), TARGET, MACHINE, [], 1.0))
    assert [duration(seconds) for seconds in (5, 240, 9000)] == ["5 s", "4 min", "2.5 h"]


@pytest.mark.parametrize("layers", range(1, 81))
def test_target_layers_are_layers_of_the_target(layers: int) -> None:
    chosen = target_layers(layers)
    assert 1 <= len(chosen) <= 5 and sorted(set(chosen)) == list(chosen)
    assert chosen[0] >= 0 and chosen[-1] < layers


def test_target_layers_of_usual_targets() -> None:
    of_few, of_qwen3_8b = target_layers(2), target_layers(36)
    assert of_few == (0, 1)
    assert of_qwen3_8b == (1, 9, 17, 25, 33)  # as z-lab's drafter has them


@pytest.mark.parametrize("layers", [1, 2, 6, 28, 80])
@pytest.mark.parametrize("hidden_size", [160, 200, 1024, 5120])
@pytest.mark.parametrize("variant", fit_gains())
def test_chosen_fields_make_a_recipe(variant: str, layers: int, hidden_size: int) -> None:
    fields = reference(variant, replace(QWEN, layers=layers, hidden_size=hidden_size))
    recipe = find_variant(variant).recipe_class(**fields)
    assert variant == "eagle3" or 1 <= recipe.layers <= 5
    assert read_settings(type(recipe)) != recipe


def speeds(cost: float, seconds: float = 1.0) -> Speeds:
    return Speeds((1000, 4000), (seconds / 4, seconds), {2: cost, 4: cost, 8: cost}, 1_000_000)


def test_a_drafter_is_worth_what_it_accepts_over_what_it_costs() -> None:
    """DFlash2 accepts a quarter more; where its step_costs cost that or it learns much slower, it is not worth it."""
    alike = {"dflash": speeds(1.2), "dflash2": speeds(1.2)}
    dear = {"dflash": speeds(1.2), "dflash2": speeds(1.6)}
    slow = {"dflash": speeds(1.2), "dflash2": speeds(1.2, seconds=10.0)}
    assert expected_speedup("dflash2", alike) > expected_speedup("dflash", alike)
    assert expected_speedup("dflash2", dear) < expected_speedup("dflash", dear)
    assert expected_speedup("dflash2", slow) < expected_speedup("dflash", slow)
    assert expected_speedup("dflash", alike) == pytest.approx(2.25 / 1.2, rel=0.05)


def test_the_best_block_size_counts() -> None:
    costs = {2: 1.0, 4: 2.0, 8: 9.0}
    one = Speeds((1000, 4000), (0.5, 1.0), costs, 1)
    assert expected_speedup("dflash", {"dflash": one}) == pytest.approx(1 + 1 - 1 / 2.3)
