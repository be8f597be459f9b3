"""The benchmark of whole prompts: what it reads of llama-bench, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.harness.process import PeerError
from benchmarks.prompts import LLAMA, OURS, Prompt, page, read_theirs


def program(folder: Path, *lines: str) -> Path:
    path = folder / "llama-bench"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def test_llama_bench_reads_a_short_prompt_first(tmp_path: Path) -> None:
    answer = json.dumps([{"n_prompt": 64, "avg_ns": 90_000_000}, {"n_prompt": 2048, "avg_ns": 2_500_000_000}])
    fake = program(tmp_path, f'echo "$@" > {tmp_path}/asked', f"echo '{answer}'")
    assert read_theirs(Path("model.gguf"), "1", 2048, 2, fake) == 2.5
    assert (tmp_path / "asked").read_text() == "-m model.gguf -t 2 -p 64,2048 -n 0 -r 1 --no-warmup -fa 1 -o json\n"


def test_the_end_of_llama_benchs_log_is_shown(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="ended with 3: no such model"):
        read_theirs(Path("model.gguf"), "0", 8, 1, program(tmp_path, "echo no such model >&2", "exit 3"))


def test_the_table_compares_the_fastest_ways() -> None:
    off, on = LLAMA
    seconds = {
        OURS + "bfloat16": (2.0, 4.0, 3.0),
        OURS + "int8": (1.0, 2.0, 9.0),
        off: (8.0, 8.0, 8.0),
        on: (4.0, 5.0, 6.0),
    }
    prompts = [
        Prompt("model", way, 2000, repeat, each) for way, own in seconds.items() for repeat, each in enumerate(own)
    ]
    text = page(prompts)
    assert "Medians of 3 interleaved runs." in text
    assert f"| model | 2000 | {OURS}int8 | 1000 |  |" in text
    assert "| model | 2000 | fastest over llama.cpp's fastest |  | 2.50 |" in text


def test_the_table_without_llama_bench_has_no_ratio() -> None:
    assert page([Prompt("model", OURS + "int8", 100, 0, 1.0)]).rstrip().endswith("|  |  |")
