"""`blockdraft radar`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
CARD = ("--device", "RTX 4090")
KEYS = {
    *("device", "model", "weights", "context", "batch", "task", "fits", "memory_bytes", "first_token_seconds"),
    *("plain", "drafted", "block_size", "confidence", "why"),
}


def test_one_row_as_json(blockdraft: Run) -> None:
    result = blockdraft("radar", *CARD, "--model", "qwen3-8b", "--weights", "int4", "--batch", 4, "--json")
    [row] = json.loads(result.out)["rows"]
    assert set(row) == KEYS
    assert (row["device"], row["model"], row["batch"], row["fits"]) == ("RTX 4090", "qwen3-8b", 4, True)
    assert row["plain"]["low"] < row["plain"]["mid"] < row["plain"]["high"]
    assert row["drafted"]["mid"] > row["plain"]["mid"]
    assert row["why"]["commands"][0] == "blockdraft pull qwen3-8b"
    assert any(command.startswith("blockdraft inspect") for command in row["why"]["commands"])


def test_the_list(blockdraft: Run) -> None:
    lines = blockdraft("radar", *CARD, "--task", "code").out.splitlines()
    assert lines[0].split()[:2] == ["model", "weights"]
    assert len([line for line in lines if line.rstrip().endswith("device")]) > 5
    assert any("do not fit" in line for line in lines)


def test_filters(blockdraft: Run) -> None:
    options = (*CARD, "--weights", "Q4_K_M", "--json")
    every = json.loads(blockdraft("radar", *options).out)["rows"]
    fast = json.loads(blockdraft("radar", *options, "--least-speed", 100).out)["rows"]
    assert 0 < len(fast) < len(every)
    assert all(row["fits"] for row in fast)


def test_several_devices_and_models(blockdraft: Run) -> None:
    words = ("--device", "2x RTX 3090", *CARD, "--model", "qwen3-8b", "--model", "qwen3-4b", "--weights", "int4")
    rows = json.loads(blockdraft("radar", *words, "--json").out)["rows"]
    assert [(row["device"], row["model"]) for row in rows] == [
        (device, model) for device in ("2x RTX 3090", "RTX 4090") for model in ("qwen3-8b", "qwen3-4b")
    ]


def test_one_model_is_explained(blockdraft: Run) -> None:
    out = blockdraft("radar", *CARD, "--model", "qwen3-8b", "--weights", "bf16").out
    assert "fits" in out and "tau" in out and "is bound by memory" in out
    assert "blockdraft serve --target qwen3-8b --drafter" in out


def test_speed_that_only_a_batch_reaches(blockdraft: Run) -> None:
    words = ("--device", "B200 SXM", "--model", "llama-3.3-70b", "--weights", "nvfp4", "--context", 256)
    out = blockdraft("radar", *words, "--least-speed", 9000).out
    assert "9,000 tokens/s are a batch of" in out


def test_own_configuration(blockdraft: Run, tiny_target_dir: Path) -> None:
    result = blockdraft("radar", *CARD, "--model", tiny_target_dir, "--weights", "bf16", "--json")
    [row] = json.loads(result.out)["rows"]
    assert row["context"] == 256  # all that the model has
    assert row["why"]["tau_source"] == "like it"
    assert row["why"]["drafter"] is None


@pytest.mark.slow
def test_this_machine(blockdraft: Run) -> None:
    result = blockdraft("radar", "--model", "smollm2", "--weights", "Q4_1", "--json")
    rows = json.loads(result.out)["rows"]
    assert rows[-1]["confidence"] == "measured"
    assert "GB/s" in rows[-1]["why"]["note"]


def test_devices(blockdraft: Run) -> None:
    assert "RTX 4090 Laptop" in blockdraft("radar", "--devices").out
    assert len(json.loads(blockdraft("radar", "--devices", "--json").out)) >= 80


def test_training(blockdraft: Run) -> None:
    words = ("--train", "--model", "qwen3-8b", "--device", "4x H100 SXM")
    [cost] = json.loads(blockdraft("radar", *words, "--json").out)["rows"]
    assert cost["trained"] == pytest.approx(1.05e9, rel=0.05)
    assert "if stored" in blockdraft("radar", *words).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "RTX 4091"), "did you mean RTX 4090"),
        ((*CARD, "--model", "qwen3-8"), "did you mean qwen3-8b"),
        ((*CARD, "--model", "qwen3-8b", "--context", 10**6), "at most 40960"),
        (("--device", "Ryzen 9 9950X", "--ram", 0), "more than 0"),
        (("--ram", 0), "more than 0"),
        ((*CARD, "--task", "poetry"), "got 'poetry'"),
        ((*CARD, "--weights", "int1"), "got 'int1'"),
        (("--device", "0x RTX 4090"), "must be 1 or more"),
        ((*CARD, "--train"), "--train takes one --model"),
    ],
)
def test_bad_input(blockdraft: Run, words: tuple[str, ...], message: str) -> None:
    result = blockdraft("radar", *words)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""
