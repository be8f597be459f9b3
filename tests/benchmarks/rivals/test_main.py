"""Whole runs on tiny models: files, resumption and refusals."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.rivals import __main__ as program
from benchmarks.rivals import train
from benchmarks.rivals.__main__ import Bench, arguments

RECIPE = """
[all]
length = 64
batch = 4
held_out = 4
save_every = 2
trackers = []
eval_every = 0
eval_prompts = 0
[dflash]
block_size = 4
layers = 1
target_layers = 2
[eagle3]
block_size = 4
[small_lm]
layers = 1
"""


@pytest.fixture
def words(tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path) -> list[str]:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "maths.jsonl").write_text('{"prompt": "What is 2 plus 3?"}\n{"prompt": "Count."}\n')
    found = ["--target", str(tiny_target_dir), "--data", str(tiny_data_dir), "--out", str(tmp_path / "out")]
    found += ["--recipe", str(tmp_path / "recipe.toml"), "--prompts", str(tmp_path / "maths.jsonl"), "--seeds", "1"]
    found += ["--kinds", "dflash,eagle3,small_lm,prompt_lookup", "--tokens", "500", "--max-new-tokens", "8"]
    return [*found, "--ways", "chain:3,tree:4", "--batches", "1,2", "--repeats", "1", "--threads", "1"]


@pytest.mark.slow
def test_a_run_writes_everything_and_goes_on(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerator: None
) -> None:
    trained: list[str] = []

    def here(task: train.Task) -> int:
        """Training in this process, in the place of another one."""
        trained.append(task.kind)
        if len(trained) == 2:
            return 1
        monkeypatch.setattr(sys, "argv", ["train", json.dumps(asdict(task))])
        train.main()
        return 0

    monkeypatch.setattr(program, "train_apart", here)
    with pytest.raises(Exception, match="Training eagle3 with seed 0 has ended with 1"):
        Bench(arguments(words)).run()
    Bench(arguments(words)).run()
    assert trained == ["dflash", "eagle3", "eagle3", "small_lm"]
    out = tmp_path / "out"
    made = Bench(arguments(words))
    assert made.left(made.steps()) == []
    steps = {row.kind: (row.steps, row.tokens) for row in made.records["trained"].all}
    assert len(set(steps.values())) == 1 and list(steps) == ["dflash", "eagle3", "small_lm"]
    assert {row.kind for row in made.records["cycles"].all} == set(steps)
    assert {row.kind for row in made.records["answers"].all} == {*steps, "plain", "prompt_lookup"}
    assert {row.kind for row in made.records["speeds"].all} == {*steps, "plain", "prompt_lookup"}
    text = (out / "rivals.md").read_text()
    assert "## DFlash over EAGLE-3" in text and "QUICK" not in text
    assert (out / "rivals.png").read_bytes().startswith(b"\x89PNG")
    more = [*words, "--kinds", "dflash,eagle3,small_lm,prompt_lookup", "--temperatures", "0"]
    assert Bench(arguments(more)).left(Bench(arguments(more)).steps()) == []
    with pytest.raises(ValueError, match="other tokens; choose another --out"):
        Bench(arguments([*words, "--tokens", "600"]))


def test_flags(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments([*words, "--quick"])
    assert given.widths == [1] and given.tokens == 500 and given.quick
    given = arguments(["--data", "d", "--prompts", "p", "--quick"])
    assert given.widths == [1, 2] and given.out.name == "rivals-quick" and given.seeds == 1
    assert arguments(["--data", "d", "--prompts", "p"]).out.name == "rivals"
    with pytest.raises(SystemExit):
        arguments([*words, "--kinds", "dflash,eagle"])
    assert "argument --kinds: 'eagle' is unknown; there are dflash, " in capsys.readouterr().err


def test_the_time_left_is_that_of_the_like() -> None:
    left = [program.Step("train", name, lambda tell: None) for name in ("eagle3 1", "mtp 0")]
    assert program.seconds_left(left, []) == (0, False)
    units = [("train", "eagle3 0", 30.0), ("train", "dflash 0", 10.0), ("cycles", "mtp", 1.0)]
    assert program.seconds_left(left, [program.Unit(*each) for each in units]) == (30 + 20, True)
