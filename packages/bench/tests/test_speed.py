"""Measurements of tiny random models, and figures of made-up trials that can be checked by hand."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from blockdraft.decode.distributions import Distributions
from blockdraft.decode.proposal import Proposal
from blockdraft.decode.verification import Verdict, verify
from blockdraft.drafters import load_drafter
from blockdraft.engine import Completion, Engine, Stats, runner
from blockdraft.engine.runner import Runner
from blockdraft.prompt_sets import PromptSet
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_bench import speed
from blockdraft_bench.methods import parse_methods
from blockdraft_bench.settings import MeasureSettings
from blockdraft_bench.speed import Trial, figures, identical_share, load_methods, measure, repetitive_share

SETS = [PromptSet("a", ("one", "two", "three")), PromptSet("b", ("four",))]
SHORT = SamplingParams(max_new_tokens=6)  # too short to loop


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


def engines(target: Target, drafter: Path, names: str = "none,chain", batch_size: int = 1) -> dict[str, Engine]:
    return load_methods(parse_methods(names, str(drafter), None, 32), target, batch_size)


def test_engines_share_drafters_and_take_their_settings(target: Target, tiny_drafter_dir: Path) -> None:
    found = engines(target, tiny_drafter_dir, "chain:4,tree:6,none,chain", batch_size=3)
    assert [e.drafting for e in found.values()] == [Drafting(4), Drafting(None, 6), Drafting(None), Drafting(None)]
    assert found["chain"].drafter is found["tree:6"].drafter is not found["none"].drafter
    assert all(e.max_batch_size == 3 for e in found.values())


def test_bad_methods_are_named(target: Target, tiny_drafter_dir: Path) -> None:
    with pytest.raises(
        ValueError, match="Method 'abacus': abacus is no drafter.*, none.*chain, chain-sampled and tree"
    ):
        engines(target, tiny_drafter_dir, "chain,abacus")
    with pytest.raises(ValueError, match="Method 'chain:9': block_size must be at most 8 for this drafter, got 9.$"):
        engines(target, tiny_drafter_dir, "chain:9")


def test_methods_take_turns(target: Target, tiny_drafter_dir: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    trials = measure(
        engines(target, tiny_drafter_dir, "none,chain,chain:3"),
        SETS,
        SHORT,
        MeasureSettings(repeats=2),
        lambda *step: steps.append(step),
    )
    n, d, e = "none", "chain", "chain:3"
    prompts = [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    expected: list[tuple[Any, ...]] = [(*prompt, None, n) for prompt in prompts]
    expected += [(*prompt, 0, method) for prompt in prompts for method in (n, d, e)]
    expected += [(*prompt, 1, method) for prompt in prompts for method in (d, e, n)]
    assert [(t.prompt_set, *t.prompts, t.repeat, t.method) for t in trials] == expected
    assert steps[0] == ("reference", 0, 28)
    assert steps[-1] == ("round 2 of 2", 28, 28)


def test_batches_stay_within_a_set(target: Target, tiny_drafter_dir: Path) -> None:
    trials = measure(
        engines(target, tiny_drafter_dir, batch_size=2), SETS, SHORT, MeasureSettings(batch_size=2, repeats=1)
    )
    plain = [(t.prompt_set, t.prompts) for t in trials if t.method == "none" and t.repeat is not None]
    assert plain == [("a", (0, 1)), ("a", (2,)), ("b", (0,))]
    found = figures(trials)
    assert found["chain"].identical == found["none"].identical == 1.0
    assert found["chain"].tau == pytest.approx(1 + sum(found["chain"].acceptance_by_position))


def test_prompts_that_loop_are_decoded_once_and_never_timed(
    target: Target, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_set = [PromptSet("a", ("one", "two", "three", "four"))]
    plain = Engine(target, load_drafter("none", target=target)).generate(one_set[0].prompts, SHORT)
    repetitive = [plain[i].token_ids for i in (0, 2)]
    monkeypatch.setattr(speed, "loops", lambda token_ids: token_ids in repetitive)
    steps: list[tuple[str, int, int]] = []
    settings = MeasureSettings(repeats=2)
    trials = measure(engines(target, tiny_drafter_dir), one_set, SHORT, settings, lambda *step: steps.append(step))
    times = [[t.repeat for t in trials if t.method == "chain" and t.prompts == (i,)] for i in range(4)]
    assert times == [[None], [0, 1], [None], [0, 1]]
    assert steps[-1] == ("round 2 of 2", 14, 14)
    for one in figures(trials).values():
        assert (one.prompts, one.timed_prompts, one.repetitive, one.identical) == (4, 2, 0.5, 1.0)


def test_each_prompt_has_a_seed_of_its_own_that_all_methods_share(target: Target, tiny_drafter_dir: Path) -> None:
    hot = SamplingParams(max_new_tokens=10, temperature=1.0, seed=5)
    one_set = [PromptSet("a", ("one", "one", "two"))]
    trials = measure(engines(target, tiny_drafter_dir), one_set, hot, MeasureSettings(repeats=2))
    answers = {i: {tuple(t.completions[0].token_ids) for t in trials if t.prompts == (i,)} for i in range(3)}
    assert [len(each) for each in answers.values()] == [1, 1, 1]
    assert answers[0] != answers[1]
    assert figures(trials)["chain"].identical == 1  # a seed gives the same tokens, whatever is chosen to draft
    assert figures(trials, {"chain"})["chain"].identical is None


def test_lossy_engine_is_detected(target: Target, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = 0

    def gullible(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor | None) -> Verdict:
        """Walk that accepts one wrong draft token, in one of all steps."""
        nonlocal faults
        verdict = verify(proposal, distributions, uniforms, tests)
        if proposal.tokens.size(1) > 1 and verdict.path[0] == [0] and faults == 0:
            faults += 1
            return Verdict([[0, 1]], verdict.bonus)
        return verdict

    own = engines(target, tiny_drafter_dir)
    warm_up_over = False
    step = Runner.step

    def faulty_step(self: Runner, rows: Any, plan: Any) -> Any:
        with monkeypatch.context() as patch:
            if warm_up_over and self.drafter is own["chain"].drafter:
                patch.setattr(runner, "verify", gullible)
            return step(self, rows, plan)

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal warm_up_over
        warm_up_over = stage == "round 1 of 2"

    monkeypatch.setattr(Runner, "step", faulty_step)
    found = figures(measure(own, SETS, SHORT, MeasureSettings(repeats=2), progress))
    assert faults == 1
    assert (found["none"].identical, found["chain"].identical) == (1.0, 0.75)


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_decoded(
    target: Target, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "generate", lambda *_: pytest.fail("decoded"))
    sets = [*SETS, PromptSet("c", ("short", "long" * 100))]
    with pytest.raises(ValueError, match="^Prompt 2 of c: The prompt has .* shorten the prompt"):
        measure(engines(target, tiny_drafter_dir), sets, SHORT, MeasureSettings())


def trial(
    method: str,
    repeat: int | None,
    seconds: float,
    *committed: list[int],
    prompts: tuple[int, ...] = (),
    token: int = 0,
) -> Trial:
    """Batch that took this long after 1 second of reading, with these tokens of each row's steps."""
    share = 1 / len(committed)
    completions = tuple(
        Completion("", [token] * (1 + sum(c)), "stop", [], Stats(c, [3] * len(c), read_seconds=share))
        for c in committed
    )
    return Trial(method, "a", prompts or tuple(range(len(committed))), repeat, completions, seconds + 1.0)


def test_figures_by_hand() -> None:
    trials = [trial("none", None, 50.0, [1] * 8)]
    trials += [trial("none", i, seconds, [1] * 8) for i, seconds in enumerate((4.0, 8.0, 2.0))]
    trials += [trial("x", i, seconds, [4, 1, 2, 1]) for i, seconds in enumerate((1.0, 4.0, 4.0))]
    found = figures(trials)
    plain, x = found["none"], found["x"]
    assert (plain.tokens_per_second, plain.speedup, plain.tau, plain.step_cost) == (2.0, 1.0, 1.0, 1.0)
    assert x.tokens_per_second_by_repeat == (8.0, 2.0, 2.0)
    assert (x.speedup, x.speedup_by_repeat) == (2.0, (4.0, 2.0, 0.5))
    assert (x.tau, x.acceptance_by_position) == (2.0, (0.5, 0.25, 0.25))
    assert x.tokens_per_second == 2.0 and x.step_cost == 1.0 and x.tau / x.step_cost == x.speedup
    assert (x.prompts, x.timed_prompts, x.identical, x.repetitive) == (1, 1, 1.0, 0.0)


def test_figures_of_batches_by_hand() -> None:
    """Rows share the time of their batch, and its steps are those of its longest row."""
    trials = [trial("none", repeat, 6.0, [1] * 6, [1] * 4, prompts=(0, 1)) for repeat in (None, 0)]
    trials += [trial("none", repeat, 2.0, [1] * 2, prompts=(2,)) for repeat in (None, 0)]
    trials += [trial("x", 0, 5.0, [3, 3], [1, 1, 2], prompts=(0, 1)), trial("x", 0, 1.0, [2], prompts=(2,), token=7)]
    found = figures(trials)
    assert (found["none"].tokens_per_second, found["none"].tau) == (1.5, 1.0)
    x = found["x"]
    assert (x.tokens_per_second, x.tau, x.step_cost) == (2.0, 2.0, 1.5)
    assert x.identical == pytest.approx(2 / 3)


def test_without_a_step_there_is_no_speed() -> None:
    trials = [trial(method, repeat, 0.001, []) for method in ("none", "x") for repeat in (None, 0)]
    for one in figures(trials).values():
        assert (one.tokens_per_second, one.speedup, one.tau) == (None,) * 3
        assert (one.acceptance_by_position, one.step_cost, one.identical) == ((), None, 1.0)


def test_a_method_whose_wrong_answers_take_no_step_has_no_step_cost() -> None:
    trials = [trial("none", repeat, 2.0, [1] * 8) for repeat in (None, 0)] + [trial("x", 0, 0.5, [])]
    x = figures(trials)["x"]
    assert (x.tokens_per_second, x.speedup, x.step_cost, x.identical) == (0.0, 0.0, None, 0.0)


def test_no_speed_if_all_outputs_are_repetitive() -> None:
    found = figures([trial(method, None, 1.0, [1] * 20) for method in ("none", "x")])
    assert (found["x"].timed_prompts, found["x"].speedup, found["x"].repetitive) == (0, None, 1.0)


LOOP = [*range(8)] * 4


def test_a_prompt_is_identical_if_all_of_its_answers_are() -> None:
    reference = {"a": [1, 2], "b": [1, 2], "c": [1, 2], "d": [1, 2]}
    assert identical_share({key: [[1, 2], [1, 2]] for key in reference}, reference) == 1
    answers = {"a": [[1, 2], [1, 2]], "b": [[1, 2], [1, 3]], "c": [[1]], "d": [[1, 2, 3]]}
    assert identical_share(answers, reference) == 0.25


def test_a_prompt_loops_if_one_of_its_answers_does() -> None:
    assert repetitive_share({"a": [[1], LOOP], "b": [[1]], "c": [[2]], "d": [[3]]}) == 0.25
