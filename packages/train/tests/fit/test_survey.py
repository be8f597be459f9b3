"""The survey of a fit, on a tiny target."""

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft_train.fit import survey
from blockdraft_train.fit.facts import TargetMeasurements

PROMPTS = [f"say {i} the inn" for i in range(12)]


def measure(
    target: Target, hours: float, variants: list[str], folder: Path, **options: Any
) -> tuple[TargetMeasurements, str]:
    notes: list[str] = []
    facts = survey.target_facts(target)
    measured = survey.measure(target, facts, PROMPTS, hours, 24, variants, folder, notes.append, **options)
    return measured, "\n".join(notes)


def test_a_measurement_is_made_once_in_any_case() -> None:
    assert list(survey.repeats(-math.inf)) == [0]
    assert list(survey.repeats(math.inf)) == list(range(survey.RUNS))


def test_facts_of_a_target(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    facts = survey.target_facts(target)
    assert (facts.layers, facts.vocab_size, facts.device) == (target.num_layers, target.vocab_size, "cpu")
    assert facts.weight_bytes == target.weight_bytes() > 0
    assert min(vars(survey.machine(target, tmp_path / "absent" / "out")).values()) > 0
    assert survey.may_be_quantized(target)
    assert not survey.may_be_quantized(load_target(tiny_target_dir, device="cpu", quantize="int8"))
    assert not survey.may_be_quantized(load_target(tiny_target_dir, device="cpu", backend="hf"))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_kinds_are_compared_on_the_same_hidden_states(tmp_path: Path, tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    measured, notes = measure(target, 1.0, ["dflash", "dflash2", "eagle3"], tmp_path / "scratch")
    assert set(measured.speeds) == {"dflash", "dflash2", "eagle3"} and measured.batch_size in survey.BATCHES
    for speed in measured.speeds.values():
        assert speed.tokens[1] == 4 * speed.tokens[0] and min(speed.seconds) > 0 and min(speed.step_costs.values()) > 0
        assert speed.parameters > 0
    assert 0 < measured.answer_tokens <= 24 and measured.answer_rate > 0 and measured.read_rate > 0
    assert notes.count("Computing the target's hidden states") == 1
    assert "responses: " in notes
    assert re.search(r"Timing training steps of dflash2 \(about \d+ (s|min) left to measure\) \.\.\.", notes)
    measured, notes = measure(target, 1e-4, ["dflash", "dflash2"], tmp_path / "short")
    assert list(measured.speeds) == ["dflash"]
    assert "dflash2 is left out, since the time for measuring is up" in notes


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_the_quantized_target_responds_if_it_is_faster(tiny_target_dir: Path, tmp_path: Path) -> None:
    target, slow = (load_target(tiny_target_dir, device="cpu") for _ in range(2))
    forward: Any = slow.forward

    def wait(*given: Any, **named: Any) -> Any:
        time.sleep(0.02)
        return forward(*given, **named)

    def refuse() -> Target:
        raise UsageError("it cannot be quantized")

    slow.forward = wait  # type: ignore[method-assign]
    for name, writer, load, quantize in (
        ("faster", slow, lambda: target, "int8"),
        ("slower", target, lambda: slow, None),
        ("refused", target, refuse, None),
    ):
        measured, _ = measure(writer, 0.1, ["dflash"], tmp_path / name, load_quantized=load)
        assert measured.quantize == quantize
