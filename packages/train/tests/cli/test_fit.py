"""The commands `fit` and `prompts`: their options and how they end."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def run(blockdraft: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return blockdraft


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hours", "0"], "--hours must be greater than 0"),
        (["--variant", "dspark"], "--variant must be one of"),
        (["--answers", "0"], "--answers must be at least 1"),
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--target", "./nowhere"], "nowhere"),
        (["--minutes", "3"], "--minutes is for a drafter that is continued; add --init DRAFTER"),
        (["--init", "bundled"], "--data names 0 folders; with --init, give one folder"),
        (["--init", "bundled", "--data", "x", "--dry-run"], "--dry-run is for new drafters"),
    ],
)
def test_bad_options(options: list[str], message: str, run: Run, tmp_path: Path) -> None:
    code, _, err = run("fit", "--out", "drafter", *options)
    assert code == 2 and message in err
    assert not list(tmp_path.iterdir())


def test_prompts_of_a_file(run: Run, tmp_path: Path, tiny_target_dir: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(9)))
    options = ["--target", tiny_target_dir, "--count", 4, "--held-out", 2, "--out", "prompts"]
    code, _, err = run("prompts", "rows.jsonl", *options)
    assert code == 0 and err.endswith("prompts: 4 of 9 prompts, 2 held out\n")
    held_out, chosen = (
        [json.loads(line)["prompt"] for line in (tmp_path / "prompts" / name).read_text().splitlines()]
        for name in ("held-out.jsonl", "prompts.jsonl")
    )
    assert len({*held_out, *chosen}) == 6


def test_bad_files_of_prompts_are_reported_before_the_target_is_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("prompts", "absent.jsonl", "--out", "file/prompts", "--target", "/no/such/model")
    assert code == 2 and re.search("(?s)2 things .*file is no folder.*no absent.jsonl", err)


def test_prompts_that_the_target_writes(run: Run, tmp_path: Path, altered: Callable[..., Path]) -> None:
    base = altered(without="chat_template.jinja")
    options = ["--target", base, "--device", "cpu", "--count", 4, "--held-out", 2, "--batch-size", 3]
    code, _, err = run("prompts", *options, "--out", "prompts")
    assert code == 0 and "prompts: 4 prompts, 2 held out\n" in err
    assert len((tmp_path / "prompts" / "prompts.jsonl").read_text().splitlines()) == 4


def test_only_a_dry_run_needs_no_folder(run: Run) -> None:
    code, _, err = run("fit")
    assert code == 2 and "--out is missing; give the folder of the drafter, or --dry-run" in err
