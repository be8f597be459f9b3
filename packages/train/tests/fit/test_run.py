"""Fits as a whole: what is refused, and that an interrupted one ends as any other."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import forked
import pytest

from blockdraft.types import Drafting, SamplingParams
from blockdraft_train.data.settings import RecordSettings
from blockdraft_train.fit import run
from blockdraft_train.fit.facts import FitPlan
from blockdraft_train.fit.run import FORMAT, Fit, run_fit
from blockdraft_train.fit.settings import FitSettings
from blockdraft_train.fit.steps import Where

SILENT: Callable[[str], None] = lambda text: None  # noqa: E731
RECORDS = RecordSettings()


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i} the inn"}) + "\n" for i in range(120)))
    return str(path)


def planned(fit: Fit, plan: FitPlan) -> None:
    folder = fit.where.folder
    folder.mkdir()
    made = {"format": FORMAT, "asked": fit.asked(), "plan": asdict(plan), "survey": ["as planned"]}
    (folder / "plan.json").write_text(json.dumps(made))


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    fit = Fit(Where(tmp_path / "out", str(tmp_path / "nowhere")), FitSettings(), (), RECORDS)
    with pytest.raises(ValueError, match=r"(?s)2 things do not fit:.*out holds other files.*nowhere"):
        run_fit(fit, False, SILENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("name", ["absent.txt", "absent.csv", "empty.jsonl", "notes.doc"])
def test_files_are_refused_before_the_target_is_loaded(name: str, tmp_path: Path) -> None:
    """The target is none, which would be said otherwise."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.doc").write_text("text")
    (tmp_path / "target").mkdir()
    with pytest.raises(ValueError, match=name):
        run_fit(
            Fit(Where(tmp_path / "out", f"{tmp_path}/target"), FitSettings(), (f"{tmp_path}/{name}",), RECORDS),
            False,
            SILENT,
        )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"question": "why?"}\n', "none that is needed"),
        ('{"prompt": "only one"}\n', "hold 1 different prompts"),
        ("", "is empty"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_measured(
    text: str, told: str, tmp_path: Path, tiny_target_dir: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    fit = Fit(
        Where(tmp_path / "out", str(tiny_target_dir), device="cpu"), FitSettings(), (f"{tmp_path}/bad.jsonl",), RECORDS
    )
    with pytest.raises(ValueError, match=told):
        run_fit(fit, False, SILENT)
    assert not (tmp_path / "out.fit").exists()


def test_other_options_than_those_of_the_plan_are_refused(
    tmp_path: Path, make_plan: Callable[..., FitPlan], source: str
) -> None:
    fit = Fit(Where(tmp_path / "out", "model"), FitSettings(), (source,), RECORDS)
    planned(fit, make_plan())
    assert run_fit(fit, True, SILENT) == ["as planned"]
    other = Fit(Where(tmp_path / "out", "other"), FitSettings(hours=2.0), (source,), RECORDS)
    with pytest.raises(ValueError, match="target was 'model' and is 'other'; hours was 1.0 and is 2.0"):
        run_fit(other, False, SILENT)


def test_one_start_at_a_time(
    tmp_path: Path, make_plan: Callable[..., FitPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Fit(Where(tmp_path / "out", "model"), FitSettings(), (), RECORDS)
    planned(fit, make_plan())

    def again(*arguments: Any, **named: Any) -> None:
        with pytest.raises(ValueError, match="in use by process"):
            run_fit(fit, False, SILENT)
        raise InterruptedError

    monkeypatch.setattr(run, "run_steps", again)
    with pytest.raises(InterruptedError):
        run_fit(fit, False, SILENT)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_a_dry_run_measures_and_leaves_nothing(tmp_path: Path, tiny_target_dir: Path, source: str) -> None:
    # The age of this process counts as time that is used up.
    fit = Fit(Where(tmp_path / "out", str(tiny_target_dir), device="cpu"), FitSettings(hours=8.0), (source,), RECORDS)
    notes: list[str] = []
    lines = run_fit(fit, True, notes.append)
    assert any(line.startswith("responses: ") for line in notes) and any(line.startswith("dflash2: ") for line in notes)
    assert any(line.startswith("step train: about ") for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_states": "disk"},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param(
            {"variant": "eagle3", "hidden_states": "disk", "stored_target_layers": (0, 1, 3)}, marks=pytest.mark.long
        ),
    ],
)
def test_a_fit_from_its_plan_to_its_card(
    changes: dict[str, Any],
    tmp_path: Path,
    tiny_target_dir: Path,
    make_plan: Callable[..., FitPlan],
    source: str,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafter loads as it is, and drafts what the target says."""
    from blockdraft import Engine, load_drafter, load_target

    fit = Fit(Where(tmp_path / "out", str(tiny_target_dir), device="cpu"), FitSettings(), (source,), RECORDS)
    plan = make_plan(**changes)
    if plan.hidden_states == "disk":
        plan = replace(
            plan, seconds=dict(zip(("prompts", "data", "hidden-states", "train", "calibrate", "bench"), count(9)))
        )
    planned(fit, plan)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", forked.Popen)
        lines = run_fit(fit, False, SILENT)
    assert "same answers: 100 %" in lines[0]
    assert f"blockdraft generate --target {tiny_target_dir} --device cpu --drafter {tmp_path}/out" in lines[3]
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("| plain decoding |", "as planned", "vllm serve", "--count 24"):
        assert part in card
    assert ("sglang" in card) == (plan.variant == "dflash")  # it does not read EAGLE-3 in the speculators format
    assert (tmp_path / "out" / "fit.png").read_bytes().startswith(b"\x89PNG")
    target = load_target(tiny_target_dir, device="cpu")
    with Engine(target, load_drafter(tmp_path / "out", target=target), drafting=Drafting(None)) as engine:
        drafted = engine.generate(["say it"], SamplingParams(max_new_tokens=8))
    with Engine(target, load_drafter("none", target=target)) as engine:
        plain = engine.generate(["say it"], SamplingParams(max_new_tokens=8))
    assert drafted[0].token_ids == plain[0].token_ids
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert run_fit(fit, False, SILENT)[0] == lines[0]  # nothing is done again
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(("speedup", "pays"), [(1.5, True), (0.95, False)])
def test_the_end_says_whether_the_drafter_pays(speedup: float, pays: bool) -> None:
    methods = {"chain": {"tau": 1.3, "identical": 1.0}, "chain:auto": {"identical": 1.0, "speedup": speedup}}
    said = run.outcome(methods)
    assert f"{speedup:.2f} times" in said and ("does not pay off" in said) != pays
