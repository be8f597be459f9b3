from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_soak import soak
from soak_faults import Faults, FaultyDrafter, FaultyTarget, InjectedFault, poisoned
from soak_load import Known, Load, known_answers, outcome
from soak_report import Sample, grown_too_much, growth, picture_of

from blockdraft import Completion, Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine.stats import Stats
from blockdraft.targets import TargetOutput

CHATS = ["Count to five.", "Say it again."]


@dataclass
class Handle:
    """Engine that answers at once, with the tokens it was given."""

    completion: Completion | None

    def result(self, seconds: float) -> Completion:
        if self.completion is None:
            raise TimeoutError
        return self.completion

    def cancel(self) -> None:
        if self.completion is not None:
            self.completion = replace(self.completion, token_ids=[1], drafted=[False], finish_reason="cancelled")


class Door:
    """Engine that answers 1, 2, 3, ..., except for every `wrong`-th request."""

    def __init__(self, wrong: int = 10**9, hangs: bool = False) -> None:
        self.wrong, self.hangs, self.count = wrong, hangs, 0

    def submit(self, prompt: list[int], params: SamplingParams) -> Handle:
        self.count += 1
        ids = list(range(1, params.max_new_tokens + 1))
        if self.count % self.wrong == 0:
            ids[-1] = 99
        return Handle(None if self.hangs else Completion("", ids, "length", [False] * len(ids), Stats()))


def outcomes(door: Any, seconds: float = 0.3) -> tuple[Counter[str], list[str]]:
    load = Load(door, [Known([5], list(range(1, 30)))], at_a_time=2, threads=1, patience=0.01)
    load.start(seconds)
    load.threads[0].join()
    assert not load.running and load.tally.open == 0
    return load.tally.outcomes, load.tally.wrong


@pytest.mark.slow
def test_a_load_tells_right_answers_from_others() -> None:
    found, wrong = outcomes(Door())
    assert set(found) <= {"length", "cancelled"} and found["length"] and not wrong
    found, wrong = outcomes(Door(wrong=3), 2.0)
    assert found["wrong"] == len(wrong) > 0 and "99" in wrong[0]
    found, _ = outcomes(Door(hangs=True))
    assert set(found) == {"hung"}


def test_a_thread_that_fails_says_so() -> None:
    _, wrong = outcomes(None)
    assert "AttributeError" in wrong[0]


def test_faults_strike_as_often_as_asked() -> None:
    faults = Faults(0.25)
    assert 150 < sum(faults.strikes("x") for _ in range(1000)) < 350
    assert faults.counts["x"] < 350
    faults.share = 0.0
    assert not any(faults.strikes("x") for _ in range(1000))


def test_nan_is_put_into_one_node_alone() -> None:
    output = TargetOutput(torch.zeros(3, 4, 5), None, torch.zeros(3, 4, dtype=torch.int64))
    found = poisoned(output, Faults(0.0).random)
    assert int(found.logits.isnan().sum()) == 1 and not output.logits.isnan().any()
    assert (found.best == -1).tolist() == found.logits.isnan().any(-1).tolist()


def test_an_engine_takes_the_wrappers(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """Answers are checked, wrappers pass on all calls, and injected faults are raised."""
    target = load_target(tiny_target_dir)
    known = known_answers(Engine(target, load_drafter("none", target=target), 1), CHATS, turns=2, tokens=6)
    assert len(known) == 6 and known[1].prompt[: len(known[0].prompt + known[0].answer)] == (
        known[0].prompt + known[0].answer
    )
    faults = Faults(0.0)
    drafter = FaultyDrafter(load_drafter(tiny_drafter_dir, target=target), faults)
    engine = Engine(FaultyTarget(target, faults), drafter, prefix_tokens=500)  # type: ignore[arg-type]
    try:
        handles = [engine.submit(each.prompt, SamplingParams(6, ignore_eos=True)) for each in known]
        for handle, each in zip(handles, known, strict=True):
            found = outcome(handle, 60)
            assert found is not None and found.token_ids == each.answer
        faults.share = 1.0
        assert outcome(engine.submit(known[0].prompt, SamplingParams(6)), 60) is None
        assert faults.counts["target raises"] >= 1
        with pytest.raises(InjectedFault):
            FaultyTarget(target, faults).forward()
    finally:
        faults.share = 0.0
        engine.close()


def test_growth_is_that_of_a_line_after_the_warm_up(tmp_path: Path) -> None:
    flat = [Sample(float(s), 1000 * 2**20 if s > 20 else s * 2**20, 3, 10 * s) for s in range(100)]
    rising = [Sample(float(s), (1000 + s) * 2**20, 3, 10 * s) for s in range(100)]
    assert growth(flat) == pytest.approx(0.0)
    assert growth(rising) == pytest.approx(69 / 1064.5, rel=0.01)
    assert grown_too_much(rising, 9.0) == ["memory has grown by 6.5%"] and not grown_too_much(rising, 1.0)
    picture_of(flat, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_short_soak() -> None:
    summary, samples, failures = soak(0.1, share=0.004, tokens=48, chats=4, turns=2)
    assert failures == []
    assert summary["outcomes"]["length"] > 4 and len(samples) > 4  # few on a busy machine
