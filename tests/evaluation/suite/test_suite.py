"""Figures as the paper counts them, and the file that a resumed run reads."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from blockdraft.engine import Completion, Stats
from blockdraft.evaluation.speed import Trial
from blockdraft.evaluation.suite import results
from blockdraft.evaluation.suite.measure import Row, rows_of
from blockdraft.evaluation.suite.paper import PAPER
from blockdraft.evaluation.suite.results import Results

ABOUT = {"running": "native", "dtype": "float32", "machine": "A Processor"}


def trial(method: str, prompt: int, tokens: list[int], seconds: float, committed: list[int]) -> Trial:
    stats = Stats(committed=committed, drafted=[3] * len(committed), read_seconds=1.0)
    completion = Completion("text", tokens, "stop", [False] * len(tokens), stats)
    return Trial(method, "gsm8k", (prompt,), 0, (completion,), 1.0 + seconds)


def row(task: str, method: str, speedup: float | None = 1.0, tau: float | None = 1.0, temperature: float = 0.0) -> Row:
    return Row(task, temperature, method, 2, 2, 8, 10.0, speedup, tau, 1.0, 0.0)


def test_each_answer_has_the_same_weight() -> None:
    found = rows_of(
        "gsm8k",
        0.0,
        [
            trial("none", 0, [1, 2, 3, 4, 5], 4.0, [1, 1, 1, 1]),
            trial("chain", 0, [1, 2, 3, 4, 5], 1.0, [4]),
            trial("none", 1, [1, 2, 3], 1.0, [1, 1]),
            trial("chain", 1, [1, 2, 4], 1.0, [1, 1]),
            trial("none", 2, [7], 0.0, []),  # nothing behind its first token
            trial("chain", 2, [7], 0.0, []),
        ],
    )
    plain, drafted = found
    assert (plain.method, plain.speedup, plain.tau, plain.identical) == ("none", 1.0, 1.0, 1.0)
    assert drafted.speedup == pytest.approx((1.0 + 0.5) / (0.25 + 0.5))  # seconds of a token, of each answer
    assert drafted.tau == pytest.approx((4 + 1) / 2)
    assert drafted.identical == pytest.approx(2 / 3) and (drafted.prompts, drafted.answers, drafted.tokens) == (3, 3, 6)
    assert drafted.tokens_per_second == pytest.approx(6 / 2.0)
    silent = rows_of("gsm8k", 0.0, [trial("none", 0, [7], 0.0, [])])
    assert silent[0].speedup is silent[0].tau is silent[0].tokens_per_second is None
    loop = rows_of("gsm8k", 1.0, [trial("none", 0, [1] * 60, 1.0, [1] * 59)] * 2, sampled={"none"})
    assert (loop[0].repetitive, loop[0].identical) == (1.0, None)


def shown(found: Results) -> str:
    out = io.StringIO()
    results.show(Console(file=out, width=140, force_terminal=False), found, PAPER)
    return out.getvalue()


def test_table() -> None:
    figures = {"gsm8k": (2.0, 3.0), "mt-bench": (8.0, 5.0), "alpaca": (None, None)}
    rows = [each for task in figures for each in (row(task, "none"), row(task, "chain", *figures[task]))]
    text = shown(Results({"draft_vocab": "8192"}, ABOUT, tuple(rows)))
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["GSM8K"][2] == "2.00/3.00" and lines["Alpaca"][2] == "-" and ", draft vocabulary 8192. " in text
    assert lines["mean"][1] == "4.00/4.00"  # the geometric mean of speed-ups
    single = shown(Results({}, ABOUT, tuple(rows[:2])))
    assert not any(line.startswith("mean") for line in single.splitlines()) and "draft vocabulary" not in single


def test_resumed_run_keeps_its_rows(tmp_path: Path) -> None:
    asked = {"drafter": "a", "limit": None, "methods": {"none": {}, "chain": {}}}
    new = Results(asked, ABOUT)
    done = new.plus([row("gsm8k", "none"), row("gsm8k", "chain")]).plus([row("gsm8k", "none", temperature=1.0)])
    results.write(tmp_path / "out", done)
    again = results.resumed(new, tmp_path / "out", False)
    assert (
        again == done
        and again.settled("gsm8k", 1.0)
        and not again.settled("mbpp", 0.0)
        and not again.settled("gsm8k", 0.5)
    )
    assert [one.temperature for one in again.only(["gsm8k"], [1.0, 0.0]).rows] == [1.0, 0.0, 0.0]
    assert results.resumed(new, tmp_path / "out", True) == new == results.resumed(new, tmp_path / "other", False)
    with pytest.raises(ValueError, match=r"is of another run: drafter was 'a' and is 'b'\. Choose another --out"):
        results.resumed(replace(new, asked={**asked, "drafter": "b"}), tmp_path / "out", False)
    (tmp_path / "out/suite.json").write_text(json.dumps({"format": 1, "asked": {}}))
    with pytest.raises(ValueError, match="cannot be resumed"):
        results.resumed(new, tmp_path / "out", False)
