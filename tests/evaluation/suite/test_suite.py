"""Figures as the paper counts them, the paper's own, and the file that a resumed run reads."""

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
from blockdraft.evaluation.suite.paper import MEASURED_TASKS, PAPER, model_of
from blockdraft.evaluation.suite.results import Results

# Speed-up and tau of the last column of the paper's tables.
AVERAGES = {
    ("Qwen3-4B", 0.0): {"DFlash (16)": "4.91/6.54", "EAGLE-3 (16)": "1.81/3.05", "EAGLE-3 (60)": "2.08/3.48"},
    ("Qwen3-8B", 0.0): {"DFlash (16)": "4.86/6.49", "EAGLE-3 (16)": "1.76/2.96", "EAGLE-3 (60)": "2.02/3.40"},
    ("Qwen3-4B", 1.0): {"DFlash (16)": "4.24/5.69"},
    ("Qwen3-8B", 1.0): {"DFlash (16)": "4.03/5.48"},
}
ABOUT = {"running": "native", "dtype": "float32", "machine": "A Processor"}


def trial(method: str, prompt: int, tokens: list[int], seconds: float, committed: list[int]) -> Trial:
    stats = Stats(committed=committed, drafted=[3] * len(committed), read_seconds=1.0)
    completion = Completion("text", tokens, "stop", [False] * len(tokens), stats)
    return Trial(method, "gsm8k", (prompt,), 0, (completion,), 1.0 + seconds)


def row(task: str, method: str, speedup: float | None = 1.0, tau: float | None = 1.0, temperature: float = 0.0) -> Row:
    return Row(task, temperature, method, 2, 2, 8, 10.0, speedup, tau, 1.0, 0.0)


@pytest.mark.parametrize(("model", "temperature"), AVERAGES)
def test_the_papers_averages_are_shown(model: str, temperature: float) -> None:
    rows = [row(task, "none", temperature=temperature) for task in MEASURED_TASKS]
    text = shown(Results({}, ABOUT, model, tuple(rows)))
    mean = next(line for line in text.splitlines() if line.startswith("mean"))
    assert mean.split()[-len(AVERAGES[model, temperature]) :] == [*AVERAGES[model, temperature].values()]


def test_answers_count_alike() -> None:
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


def test_the_model_of_the_paper() -> None:
    shape = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36}
    assert model_of(shape) == "Qwen3-8B" and model_of({**shape, "hidden_size": 2560}) == "Qwen3-4B"
    assert model_of({**shape, "model_type": "llama"}) is None and model_of({}) is None


def shown(found: Results) -> str:
    out = io.StringIO()
    results.show(Console(file=out, width=140, force_terminal=False), found, PAPER)
    return out.getvalue()


def test_table_beside_the_papers() -> None:
    rows = [row(task, name, *figures) for task in ("gsm8k", "mt-bench", "alpaca") for name, figures in METHODS.items()]
    text = shown(Results({}, ABOUT, "Qwen3-4B", tuple(rows)))
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["GSM8K"][2] == "2.00/3.00" and "5.15/6.53" in text and "2.27/3.77" in text
    assert lines["Alpaca"][-3:] == ["-", "-", "-"]
    mean = "3.83/5.44"  # sqrt(5.15 * 2.85), (6.53 + 4.35) / 2: the sets that both have
    assert mean in next(line for line in text.splitlines() if line.startswith("mean, paper's sets"))
    assert "The paper's figures: Qwen3-4B, arXiv 2602.06036" in text
    whole = shown(Results({}, ABOUT, None, tuple(rows)))
    assert "paper:" not in whole and "--paper-model Qwen3-4B|Qwen3-8B shows one's" in whole
    assert any(line.startswith("mean ") for line in whole.splitlines())
    single = shown(Results({}, ABOUT, "Qwen3-8B", (row("gsm8k", "none"), row("gsm8k", "chain", None, None))))
    assert "mean" not in single.split("Ours")[0] and " - " in single
    assert "Ours: " in whole and "draft vocabulary" not in whole
    assert ", draft vocabulary 8192. " in shown(Results({"draft_vocab": "8192"}, ABOUT, None, tuple(rows)))


METHODS = {"none": (1.0, 1.0), "chain": (2.0, 3.0)}


def test_resumed_run_keeps_its_rows(tmp_path: Path) -> None:
    asked = {"drafter": "a", "limit": None, "methods": {"none": {}, "chain": {}}}
    new = Results(asked, ABOUT, None)
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
    lines = (tmp_path / "out/suite.csv").read_text().splitlines()
    assert lines[0].startswith("task,temperature,method,prompts") and len(lines) == 4
    (tmp_path / "out/suite.json").write_text(json.dumps({"format": 1, "asked": {}}))
    with pytest.raises(ValueError, match="cannot be resumed"):
        results.resumed(new, tmp_path / "out", False)
