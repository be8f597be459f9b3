"""What all trials do: when something pays, what is written, and that nothing is done twice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rivals import measure
from benchmarks.rivals.kinds import Weights
from benchmarks.rivals.rows import PLAIN, Answers
from benchmarks.rivals.ways import parse
from benchmarks.trials import report, trial
from benchmarks.trials.redraft import Redraft, RedraftDrafter, Rule
from benchmarks.trials.refill import Refill
from blockdraft.drafters.dflash import load
from blockdraft.drafters.none import NoDrafter
from blockdraft.errors import UsageError
from blockdraft.evaluation.prompts import PromptSet
from blockdraft.targets import load_target

WEIGHTS, TARGET = Weights(passed=300, observed=100), 1000
RECIPE = "layers = 1\nblock_size = 4\ntaps = 2\nlength = 64\nbatch = 4\nanchors = 6\nheld_out = 4\nsteps = 2\n"


def row(name: str, seed: int, of: str, tau: float, passes: float = 1.0, way: str = "chain:7") -> Answers:
    done = f"8:{passes}"
    return Answers(name, seed, of, 0.0, way, 4, 0, round(100 * tau), 100, "0.8 0.4", 7.0, done, 0.001, 0.002, 1.0)


def rows(ratio: float, passes: float = 1.0, sets: tuple[str, ...] = ("maths", "code")) -> list[Answers]:
    base = [row("base", seed, of, 3.0 + seed) for seed in (0, 1, 2) for of in sets]
    return base + [row("new", each.seed, each.set, ratio * each.tau, passes) for each in base]


def verdict(found: list[Answers], out: Path) -> str:
    report.write(out, found, ["base"], WEIGHTS, TARGET, [1.25, 3])
    return (out / "results.md").read_text().splitlines()[-1]


def test_what_accepts_more_at_the_same_cost_pays(tmp_path: Path) -> None:
    told = verdict(rows(1.1), tmp_path)
    assert told.endswith("where 16 tokens cost 1.25: new pays; where 16 tokens cost 3: new pays.")
    figures = json.loads((tmp_path / "results.json").read_text())
    assert [(one["name"], one["cost_of_16"], one["pays"]) for one in figures] == [
        *(("base", 1.25, False), ("new", 1.25, True), ("base", 3.0, False), ("new", 3.0, True))
    ]
    first = figures[1]["cases"][0]
    draft, context, target = 1 + 7 / 60, 1 + 2.3 / 60, 1 + 7 / 60
    assert first["tau"] == 3.3 and first["R"] == pytest.approx(draft * 0.3 + context * 0.1 + target)
    assert first["speedup"] == pytest.approx(3.3 / first["R"]) and 1.09 < figures[1]["over_base"] < 1.1
    assert "| new | chain:7 | maths, 0 | 4.40 (3.30, 4.40, 5.50) | 1.00 (" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    "found",
    [
        rows(1.02),
        rows(1.1, passes=2.0),  # a second pass takes three tenths of the target's weights
        rows(1.1, sets=("maths",)),
        [*rows(1.2)[:-1], row("new", 2, "code", 5.0)],  # for one seed on one set not
        rows(1.0),
    ],
    ids=["too little", "two passes", "one set", "one case", "the same"],
)
def test_else_nothing_pays(found: list[Answers], tmp_path: Path) -> None:
    assert "1.25: nothing pays; where 16 tokens cost 3: nothing pays." in verdict(found, tmp_path)


def test_each_is_judged_by_its_best_way(tmp_path: Path) -> None:
    found = rows(1.1)
    worse = [replace(each, way="chain:3", tokens=each.tokens // 2) for each in found]
    verdict([*worse, *found], tmp_path)
    assert {one["way"] for one in json.loads((tmp_path / "results.json").read_text())} == {"chain:7"}
    better = [replace(each, way="tree:8", tokens=2 * each.tokens) for each in found if each.kind == "base"]
    assert "1.25: nothing pays" in verdict([*found, *better], tmp_path)


def test_what_changes_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="These change tokens, .*: new chain:7"):
        verdict([*rows(1.1), replace(row("new", 3, "maths", 9.0), same=0.5)], tmp_path)


def test_passes_are_those_that_were_made(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """By the drafter itself."""
    target = load_target(tiny_target_dir, compile="off")
    prompts = PromptSet("questions", ("Count.",))
    drafter = load(tiny_drafter_dir, target, RedraftDrafter)
    assert isinstance(drafter, RedraftDrafter)

    def silent(*told: Any) -> None:
        pass

    _, plain = measure.answers(PLAIN, 0, target, NoDrafter(), prompts, 0.0, 10, [], None, silent)

    def passes(target: Any, drafter: Any) -> dict[int, float]:
        asked = (0.0, 10, [parse("chain:4")], plain, silent)
        [found], _ = measure.answers("dflash", 0, target, drafter, prompts, *asked)
        assert found.guesses > 3
        return dict(found.passes_by_tokens)

    once = passes(target, drafter)
    drafter.rule = Rule("fixed", 1)
    twice = passes(target, drafter)
    assert once[5] > 0.5 and twice[5] == pytest.approx(2 * once[5], abs=1e-3)


def words(folder: Path, target: Path) -> list[str]:
    for name in ("maths", "code"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "What is 2 plus 3?"}\n{"prompt": "Count."}\n')
    (folder / "recipe.toml").write_text(RECIPE)
    found = ["--target", str(target), "--max-new-tokens", "8", "--ways", "chain:3,tree:4", "--threads", "1"]
    return [*found, "--prompts", str(folder / "maths.jsonl"), "--prompts", str(folder / "code.jsonl")]


def names_in(out: Path) -> set[str]:
    return {one["name"] for one in json.loads((out / "results.json").read_text())}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_each_trial_runs_and_does_nothing_twice(
    tmp_path: Path,
    tiny_target_dir: Path,
    tiny_data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = words(tmp_path, tiny_target_dir)
    learning = ["--data", str(tiny_data_dir), "--recipe", str(tmp_path / "recipe.toml")]
    out = [["--out", str(tmp_path / name)] for name in ("redraft", "refill")]
    made = str(tmp_path / "redraft" / "drafters" / "base-0")
    rules = ["--rules", "once,fixed:1", "--seeds", "1"]
    trials: list[tuple[Any, list[str]]] = [
        (Redraft, [*common, *learning, *out[0], *rules]),
        (Refill, [*common, *learning, *out[1], "--drafter", made, "--documents", "8", "--steps", "2"]),
    ]
    for kind, given in trials:
        kind(given).run()
        assert "**Verdict** (more than 1.03 times the base in every case): where" in capsys.readouterr().out
    assert names_in(tmp_path / "redraft") == {"base", "once", "fixed:1"}
    assert names_in(tmp_path / "refill") == {"base", "refill"}
    cases = json.loads((tmp_path / "redraft" / "results.json").read_text())
    assert {case["set"] for one in cases for case in one["cases"]} == {"maths", "code"}
    passes = {one["name"]: sum(case["passes"] for case in one["cases"]) for one in cases if one["cost_of_16"] == 3}
    assert passes["fixed:1"] > 1.2 * passes["once"]  # near the end of an answer there is nothing to repeat

    def again(*given: Any, **named: Any) -> None:
        raise AssertionError("this was done")

    monkeypatch.setattr(measure, "answers", again)
    monkeypatch.setattr(trial, "train", again)
    for kind, given in trials:
        kind(given).run()
    with pytest.raises(ValueError, match="other max_new_tokens; choose another --out"):
        Refill([*trials[1][1], "--max-new-tokens", "9"])


def test_bad_options_are_refused(
    tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*words(tmp_path, tiny_target_dir), "--out", str(tmp_path / "out"), "--data", str(tiny_data_dir)]
    with pytest.raises(UsageError, match="--costs-of-16 is 'dear'; give numbers"):
        Refill([*common, "--drafter", "bundled", "--costs-of-16", "dear"])
    monkeypatch.setattr(trial, "MADE", tmp_path / "none")
    with pytest.raises(UsageError, match=f"no drafter in {tmp_path / 'none'}; give --drafter, or run"):
        Refill(common)
    assert not (tmp_path / "out").exists()
