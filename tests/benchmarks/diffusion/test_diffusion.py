"""The whole command; each part has tests of its own."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks.diffusion import __main__ as program
from benchmarks.diffusion.settings import QUICK, ConvertedSettings, StrategySettings, TextSettings
from benchmarks.harness.command import read_options

TINY = ["--models", "autoregressive,block 4", "--seeds", "1", "--steps", "2", "--batch", "2", "--length", "16"]
TINY += [
    "--warmup",
    "1",
    "--hidden",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--draws",
    "4",
    "--scored",
    "50",
    "--threads",
    "1",
]
TINY += ["--sampled", "block 4", "--strategies", "static=2", "--samples", "1", "--given", "4", "--threads", "1"]


def test_options_are_those_of_the_settings() -> None:
    given = program.arguments(["text", "--steps", "7", "--models", "block 4, whole"])
    settings = read_options(TextSettings, given)
    assert (settings.steps, settings.models, settings.batch) == (7, ("block 4", "whole"), TextSettings().batch)
    assert given.out.name == "diffusion"
    quick = program.arguments(["--quick", "--steps", "7"])
    settings = read_options(TextSettings, quick)
    assert (settings.steps, str(settings.length)) == (7, QUICK["length"])
    assert quick.out.name == "diffusion-quick" and quick.what == "all"
    for kind in (StrategySettings, ConvertedSettings):
        assert read_options(kind, quick) != kind() == read_options(kind, given)
    with pytest.raises(ValueError, match="steps is 'few'"):
        read_options(TextSettings, program.arguments(["--steps", "few"]))


@pytest.mark.slow
def test_parts_one_after_the_other(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--quick", "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="give one by --text FILE"):
        program.run(program.arguments(["text", *words]))
    words += ["--text", str(text_file)]
    with pytest.raises(ValueError, match="There is no autoregressive model"):
        program.run(program.arguments(["strategies", *words]))
    program.run(program.arguments(["text", *words]))
    assert "strategy" not in capsys.readouterr().out
    program.run(program.arguments(["strategies", *words]))
    page = capsys.readouterr().out
    assert page == (tmp_path / "diffusion.md").read_text() + "\n"
    assert "A quick run" in page and "## Bits per character" in page and "static=2" in page
    assert (tmp_path / "diffusion.png").stat().st_size > 1000
    with (tmp_path / "text" / "runs.csv").open() as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["autoregressive", "block 4"]
    with pytest.raises(ValueError, match="other steps; choose another --out, or add --anew"):
        program.run(program.arguments(["text", *words, "--steps", "3"]))
    program.run(program.arguments(["text", *words, "--steps", "3", "--anew"]))
    assert "96 characters learned in 3 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_is_converted(
    tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, problems = tmp_path / "data.jsonl", tmp_path / "problems.jsonl"
    data.write_text(json.dumps({"prompt": "How?", "response": "So. " * 20}) + "\n")
    problems.write_text("".join(json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) + "\n" for n in range(3)))
    words = ["convert", "--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--threads", "1"]
    words += ["--data", str(data), "--problems", str(problems), "--tune-steps", "2", "--tune-length", "8"]
    words += ["--new-tokens", "8", "--ways", "static=2", "--asked", "2", "--out", str(tmp_path / "out")]
    program.run(program.arguments(words))
    page = capsys.readouterr().out
    ways = ("autoregressive", f"drafted by {tiny_drafter_dir.name}", "drafted by the converted model", "static=2")
    assert all(way in page for way in ways)
