"""The survey: what it tells, and that it measures little and computes features once."""

import time
from pathlib import Path
from typing import Any

import pytest

from blockdraft import timing
from blockdraft.data.responders import CHECKED_TOKENS
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.tools.fit import survey
from blockdraft.training.trainer import Trainer


def test_it_tells_what_it_does_at_once_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TELL_SECONDS", 0.01)
    told: list[str] = []
    with timing.telling(told.append, "Waiting"):
        assert told[0] == "Waiting ..."
        deadline = time.monotonic() + 30
        while len(told) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert told[1] == told[2] == "Waiting ... (0 s)"
    count = len(told)
    time.sleep(0.05)
    assert len(told) == count


def test_a_measurement_is_made_once_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(survey.time, "monotonic", lambda: now[0])

    def runs(seconds: float, each: float) -> int:
        count = 0
        for _ in survey.Repeats(seconds):
            count, now[0] = count + 1, now[0] + each
        return count

    assert [runs(10, each) for each in (1, 4, 6, 100)] == [survey.RUNS, 2, 1, 1]


@pytest.mark.parametrize("tokens", [20, 100])
def test_repetitive_answers_count_as_far_as_they_would_be_written(tokens: int) -> None:
    assert survey._noticed([*range(tokens), *([7] * 200)]) == (tokens + 11 + CHECKED_TOKENS - 1) // 32 * 32


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_all_candidates_learn_from_the_same_features(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[Any]] = {"hidden_states": [], "steps": []}
    plan, step = survey.plan_hidden_states, Trainer.timed_step
    monkeypatch.setattr(
        survey, "plan_hidden_states", lambda *given: calls["hidden_states"].append(given) or plan(*given)
    )
    monkeypatch.setattr(Trainer, "timed_step", lambda trainer, rows: calls["steps"].append(rows) or step(trainer, rows))
    told: list[str] = []
    target = load_target(tiny_target_dir, device="cpu")
    prompts = [f"say {i} the inn" for i in range(12)]
    monkeypatch.setattr(survey, "RUNS", 1)
    found = survey.measure(target, prompts, 1.0, 24, ["dflash", "dflash2", "eagle3"], tmp_path / "scratch", told.append)
    assert len(calls["hidden_states"]) == 1 and calls["steps"] == [1, 1, 4] * 3
    assert set(found.speeds) == {"dflash", "dflash2", "eagle3"} and found.batch_size in survey.BATCHES
    for speed in found.speeds.values():
        assert speed.tokens[1] == 4 * speed.tokens[0] and min(speed.seconds) > 0 and min(speed.step_costs.values()) > 0
    assert 0 < found.answer_tokens <= 24 and found.answer_rate > 0 and found.read_rate > 0
    for part in (
        "Answering",
        "responses: ",
        "Computing the target's",
        "Timing training steps of dflash2",
    ):
        assert any(line.startswith(part) for line in told)
    calls["steps"].clear()
    found = survey.measure(target, prompts, 1e-4, 24, ["dflash", "dflash2"], tmp_path / "short", told.append)
    assert list(found.speeds) == ["dflash"] and calls["steps"] in ([1], [1, 1, 4])
    assert told[-3].startswith("dflash2 is left out, since the time for measuring is up")


@pytest.mark.parametrize(
    ("each", "steps", "found"), [(1.0, [1, 1, 4, 1, 4], {1: 1.0, 4: 1.0}), (9.0, [1], {1: 9.0, 4: 36.0})]
)
def test_a_step_that_takes_the_whole_time_is_not_repeated(
    each: float, steps: list[int], found: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, timed = [0.0], list[int]()
    monkeypatch.setattr(survey.time, "monotonic", lambda: now[0])

    class Slow:
        def timed_step(self, rows: int) -> float:
            timed.append(rows)
            now[0] += each
            return each

    slow: Any = Slow()
    assert survey._step_seconds(slow, 5.0) == found and timed == steps


@pytest.mark.parametrize(("speed", "quantize"), [(1.1, None), (1.3, "int8")])
def test_the_rounded_target_answers_where_it_is_faster(
    speed: float, quantize: str | None, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    rounded, answer, who = load_target(tiny_target_dir, device="cpu", quantize="int8"), survey._answer, list[bool]()

    def timed(target: Target, *how: Any) -> tuple[Any, float]:
        who.append(target is rounded)
        return answer(target, *how)[0], speed if target is rounded else 1.0

    monkeypatch.setattr(survey, "_answer", timed)
    found = survey._answers(target, ["say the inn"] * 9, 1e3, 20, lambda: rounded)
    assert found.quantize == quantize and who[-1] == (quantize is not None) and who.count(True) == 1 + who[-1]

    def refuse() -> Target:
        raise UsageError("no")

    assert survey._answers(target, ["say the inn"] * 9, 1e3, 20, refuse).quantize is None
    assert not survey.may_be_rounded(rounded) and not survey.may_be_rounded(load_target(tiny_target_dir, backend="hf"))
