"""`blockdraft quantize` on tiny random models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.targets import load_target

Run = Callable[..., Any]


def test_a_target_is_rounded_and_loaded(tiny_target_dir: Path, tmp_path: Path, blockdraft: Run) -> None:
    code, out, err = blockdraft("quantize", tiny_target_dir, "--bits", 8, "--out", tmp_path / "eight")
    assert (code, out) == (0, "")
    assert "eight: 8 bits in groups of 32, rounded to the nearest, 0.0 MB instead of 0.2" in err
    assert "int8 weights" in load_target(tmp_path / "eight", device="cpu", compile="off").running
    code, out, err = blockdraft("quantize", tiny_target_dir, "--group", 8, "--out", tmp_path / "four")
    assert code == 0 and "4 bits in groups of 8" in err and "--calibrate FILE" in err
    target = load_target(tmp_path / "four", device="cpu", compile="off")
    assert "int4 weights" in target.running and target.tokenizer is not None


def test_text_is_measured_on(tiny_target_dir: Path, tmp_path: Path, blockdraft: Run) -> None:
    rows = [
        {"prompt": "say a word", "response": "the word"},
        {"prompt": "a question without an answer"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the inn"}]},
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]) * 20)
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:2]) * 20)
    (tmp_path / "text.txt").write_text("the thing in the inn " * 40)
    sources = [part for name in ("chats.jsonl", "turns.jsonl", "text.txt") for part in ("--calibrate", tmp_path / name)]
    sizes = ("--length", 32, "--tokens", 1024, "--held-out", 256)
    code, out, err = blockdraft("quantize", tiny_target_dir, "--out", tmp_path / "few", *sources, *sizes)
    assert code == 0, err
    assert "original" in out and "rounded to the nearest" in out and "calibrated" in out
    assert "layers: 3 of 3 parts" in err and "--calibrate FILE" not in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--bits", 3], "--bits must be 4 or 8, got '3'"),
        (["--tables", "4"], "--tables must be '8' or 'keep', got '4'"),
        (["--group", 24], "Groups of 24 do not divide 32 inputs"),
        (["--length", 1], "--length must be at least 2, got '1'"),
        (["--calibrate", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_bad_input_is_reported(
    args: list[object],
    message: str,
    tiny_target_dir: Path,
    tmp_path: Path,
    blockdraft: Run,
) -> None:
    code, out, err = blockdraft("quantize", tiny_target_dir, "--out", tmp_path / "few", *args)
    assert (code, out) == (2, "") and message in err and not list(tmp_path.iterdir())


def test_other_forms_are_read_from_the_tokens_of_data(tiny_target_dir: Path, tmp_path: Path, blockdraft: Run) -> None:
    (tmp_path / "text.jsonl").write_text('{"question": "the thing", "answer": "a thing"}\n' * 40)
    sizes = ("--length", 8, "--tokens", 64, "--held-out", 16)
    options = ("--out", tmp_path / "few", *sizes, "--calibrate")
    code, _, err = blockdraft("quantize", tiny_target_dir, *options, tmp_path / "text.jsonl")
    assert code == 2 and "text.jsonl, line 1 must be a JSON object with messages" in err and "blockdraft data" in err
    fields = ("--prompt-field", "question", "--response-field", "answer")
    data = ("data", tmp_path / "text.jsonl", "--target", tiny_target_dir, "--out", tmp_path / "tokens", *fields)
    assert blockdraft(*data)[0] == 0
    code, _, err = blockdraft("quantize", tiny_target_dir, *options, tmp_path / "tokens")
    assert code == 0 and "Calibrated on 64 tokens, measured on 16 others." in err


@pytest.mark.parametrize(
    "row",
    [{"messages": []}, {"messages": None}, {"messages": "the thing"}, {"messages": [{"content": "a"}]}, {"text": None}],
    ids=json.dumps,
)
def test_rows_without_text_are_named(
    row: dict[str, object], tiny_target_dir: Path, tmp_path: Path, blockdraft: Run
) -> None:
    (tmp_path / "text.jsonl").write_text((json.dumps(row) + "\n") * 40)
    options = ("--out", tmp_path / "few", "--calibrate", tmp_path / "text.jsonl")
    code, _, err = blockdraft("quantize", tiny_target_dir, *options)
    assert code == 2 and "text.jsonl, line 1 must be a JSON object with messages" in err


def test_too_little_text(tiny_target_dir: Path, tmp_path: Path, blockdraft: Run) -> None:
    (tmp_path / "text.txt").write_text("the thing")
    options = ("--out", tmp_path / "few", "--calibrate", tmp_path / "text.txt")
    code, _, err = blockdraft("quantize", tiny_target_dir, *options)
    assert code == 2 and "text.txt holds 5 tokens; give at least 512, better 40960" in err
