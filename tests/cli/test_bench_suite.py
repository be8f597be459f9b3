"""`blockdraft bench suite` on a tiny random pair: resumed where it ended, and the table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.engine import Engine

Run = Callable[..., Any]


@pytest.fixture
def bench(blockdraft: Run, tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Run:
    data = tmp_path / "data"
    for name, rows in (
        ("MATH-500/test.jsonl", [{"problem": f"{i}?"} for i in range(3)]),
        ("mt_bench_prompts/train.jsonl", [{"prompt": ["One.", "Two."]}]),
    ):
        (data / name).parent.mkdir(parents=True)
        (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def blockdraft_bench(*args: object) -> Any:
        pair = ("--target", tiny_target_dir, "--drafter", tiny_drafter_dir, "--device", "cpu", "--compile", "off")
        size = ("--max-new-tokens", 8, "--tasks", "math500,mt-bench", "--suite-data", data)
        return blockdraft("bench", "suite", *pair, *size, *args)

    return blockdraft_bench


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What engines are asked, in order; an answer numbered in `stop` is interrupted."""
    decode, calls = Engine.generate, list[Any]()

    def generate(self: Engine, prompts: Any, params: Any = None) -> Any:
        calls.append((prompts[0], params))
        return decode(self, prompts, params)

    monkeypatch.setattr(Engine, "generate", generate)
    return calls


@pytest.mark.slow
def test_interrupted_run_resumes(bench: Run, tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    counted = Engine.generate

    def interrupted(self: Engine, prompts: Any, params: Any = None) -> Any:
        if len(asked) == 12:  # math500 takes 2 to warm up and 6, and MT-Bench 2 and 4
            raise KeyboardInterrupt
        return counted(self, prompts, params)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "generate", interrupted)
        ended = bench("--out", out, "--temperature", "0,1")
    assert ended.code == 130 and f"resumes from {out}" in ended.err
    first = json.loads((out / "suite.json").read_text())["rows"]
    assert [(entry["task"], entry["method"]) for entry in first] == [("math500", "none"), ("math500", "chain")]
    asked.clear()
    done = bench("--out", out, "--temperature", "0,1")
    assert done.code == 0 and len(asked) == 2 + 4 + 8 + 6
    report = json.loads((out / "suite.json").read_text())
    assert report["rows"][:2] == first and len(report["rows"]) == 8
    assert [entry["answers"] for entry in report["rows"]] == [3, 3, 2, 2] * 2
    assert {entry["identical"] for entry in report["rows"]} == {1.0}
    assert done.out.count("MATH-500") == 2
    asked.clear()
    again = bench("--out", out, "--temperature", "0,1", "--json")
    assert not asked and json.loads(again.out)["rows"] == report["rows"]
    other = bench("--out", out, "--limit", 1)
    assert other.code == 2 and "is of another run: limit was None and is 1" in other.err
    assert bench("--out", out, "--limit", 1, "--overwrite", "--tasks", "math500").code == 0
    assert len(json.loads((out / "suite.json").read_text())["rows"]) == 2


def test_second_turns_follow_the_answer(bench: Run, asked: list[Any], tiny_target_dir: Path) -> None:
    from transformers import AutoTokenizer

    assert bench("--tasks", "mt-bench", "--seed", 5, "--temperature", 1).code == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    texts = [tokenizer.decode(prompt) for prompt, _ in asked[2:]]
    entry, two = "<|im_start|>user\nOne.<|im_end|>\n", "<|im_start|>user\nTwo.<|im_end|>\n<|im_start|>assistant\n"
    assert texts[0] == texts[1] == f"{entry}<|im_start|>assistant\n"
    assert texts[2] == texts[3] and texts[2].startswith(entry) and texts[2].endswith(two)
    assert [params.seed for _, params in asked] == [5] * 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompts", "x.jsonl"], "No such option: --prompts"),
        (["--url", "http://localhost:1"], "No such option: --url"),
        (["--tasks", "gsm8k"], "GSM8K: there is neither"),
        (["--limit", "0"], "--limit must be at least 1, got '0'"),
        (["--max-new-tokens", "400"], "Prompt 1 of math500: The prompt's"),
        (["--out", "/dev/null"], "/dev/null cannot be written"),
    ],
)
def test_bad_input(bench: Run, args: list[str], message: str) -> None:
    report = bench(*args)
    assert (report.code, report.out) == (2, "") and message in report.err, report.err
