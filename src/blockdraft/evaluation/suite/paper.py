"""The benchmark of the DFlash paper (arXiv 2602.06036): its prompt sets, and the figures that it reports.

Sets, prompts, their order and numbers are those of the authors' benchmark (z-lab/dflash, `model/utils.py` and
`run_benchmark.sh` of its first release). Figures are for transformers on an H200, with one prompt at a time and
responses of at most 2048 tokens without thinking. EAGLE-3 (N) has trees of N draft tokens, DFlash (16) blocks of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SHUFFLE_SEED = 0  # of the order of a set, whose first prompts are used
STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
LIVE_CODE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)

Turns = tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A set of prompts.

    Attributes:
        name: Name on the command line.
        title: Name in the paper.
        hub: Name of the dataset on the hub.
        split: Split of the dataset, and prefix of its file names.
        columns: Required columns. A tuple lists alternatives.
        turns: Function from a record to the user's turns.
        samples: Maximum number of prompts in the paper.
        subset: Subset of the dataset, and folder of its files, if there are several.
        files: Files of a dataset that the hub's library cannot open by name.
    """

    name: str
    title: str
    hub: str
    split: str
    columns: tuple[str | tuple[str, ...], ...]
    turns: Callable[[Mapping[str, Any]], Turns]
    samples: int = 128
    subset: str | None = None
    files: tuple[str, ...] = ()


def _steps(column: str) -> Callable[[Mapping[str, Any]], Turns]:
    return lambda record: (f"{record[column]}\n{STEPS}",)


def _human_eval(record: Mapping[str, Any]) -> Turns:
    asked = "Write a solution to the following problem and make sure that it passes the tests:"
    return (f"{asked}\n```python\n{record['prompt']}\n```",)


def _live_code(record: Mapping[str, Any]) -> Turns:
    starter = record.get("starter_code")
    how = "Use the following code structure:" if starter else "Write your code in the following format:"
    parts = (
        LIVE_CODE,
        f"### Question:\n{record['question_content']}",
        f"### Format: {how}\n```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ("\n\n".join(parts),)


def _alpaca(record: Mapping[str, Any]) -> Turns:
    given = record.get("input")
    return (f"{record['instruction']}\n\nInput:\n{given}" if given else record["instruction"],)


def _mt_bench(record: Mapping[str, Any]) -> Turns:
    return tuple(record["prompt"] if record.get("prompt") is not None else record["turns"])


PAPER = (
    Task("gsm8k", "GSM8K", "openai/gsm8k", "test", ("question",), _steps("question"), subset="main"),
    Task("math500", "MATH-500", "HuggingFaceH4/MATH-500", "test", ("problem",), _steps("problem")),
    Task("aime24", "AIME24", "HuggingFaceH4/aime_2024", "train", ("problem",), _steps("problem"), 30),
    Task("aime25", "AIME25", "MathArena/aime_2025", "train", ("problem",), _steps("problem"), 30),
    Task("humaneval", "HumanEval", "openai/openai_humaneval", "test", ("prompt",), _human_eval, 164),
    Task(
        "mbpp",
        "MBPP",
        "google-research-datasets/mbpp",
        "test",
        ("prompt",),
        lambda record: (record["prompt"],),
        128,
        "sanitized",
    ),
    Task(
        "livecodebench",
        "LiveCodeBench",
        "livecodebench/code_generation_lite",
        "test",
        ("question_content", "starter_code"),
        _live_code,
        files=tuple(f"test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)),
    ),
    # FastChat's own file, which is also in the hub's folder, has a column `turns` instead.
    Task("mt-bench", "MT-Bench", "HuggingFaceH4/mt_bench_prompts", "train", (("prompt", "turns"),), _mt_bench, 80),
    Task("alpaca", "Alpaca", "tatsu-lab/alpaca", "train", ("instruction", "input"), _alpaca),
)
SUITES = {"paper": PAPER}

SOURCE = "arXiv 2602.06036; transformers, H200"
MEASURED_TASKS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")


@dataclass(frozen=True)
class Published:
    """Published figures of a method on a set.

    Attributes:
        speedup: Speed-up over plain decoding.
        tau: Tokens per target forward pass.
    """

    speedup: float
    tau: float


def _row(text: str) -> dict[str, Published]:
    """Parse figures of all `MEASURED_TASKS` from a row of the paper's table."""
    cells = [Published(*map(float, cell.split("/"))) for cell in text.split()]
    return dict(zip(MEASURED_TASKS, cells, strict=True))


# Figures by model and temperature, then by method and task. Of EAGLE-3 at temperature 1 only averages are published.
FIGURES: dict[str, dict[float, dict[str, dict[str, Published]]]] = {
    "Qwen3-4B": {
        0.0: {
            "DFlash (16)": _row("5.15/6.53 6.09/7.84 5.68/7.27 5.21/6.64 4.78/6.09 5.41/7.09 2.85/4.35"),
            "EAGLE-3 (16)": _row("1.99/3.30 1.83/3.08 1.79/3.05 1.84/3.05 1.78/2.95 1.73/2.91 1.74/3.02"),
            "EAGLE-3 (60)": _row("2.27/3.77 2.10/3.52 2.13/3.51 2.12/3.47 2.02/3.38 1.90/3.22 2.04/3.49"),
        },
        1.0: {"DFlash (16)": _row("4.71/6.00 5.09/6.67 3.73/4.92 4.74/6.04 4.42/5.66 4.90/6.50 2.67/4.07")},
    },
    "Qwen3-8B": {
        0.0: {
            "DFlash (16)": _row("5.15/6.54 6.08/7.87 5.62/7.08 5.14/6.50 4.65/5.95 5.51/7.27 2.75/4.24"),
            "EAGLE-3 (16)": _row("1.94/3.23 1.81/3.02 1.79/3.00 1.89/3.17 1.69/2.82 1.57/2.65 1.63/2.83"),
            "EAGLE-3 (60)": _row("2.23/3.71 2.05/3.49 2.05/3.44 2.17/3.65 1.93/3.25 1.81/3.03 1.90/3.26"),
        },
        1.0: {"DFlash (16)": _row("4.67/5.98 4.84/6.40 3.57/4.73 4.32/5.52 4.04/5.21 4.93/6.69 2.47/3.80")},
    },
}
SHAPES = {("qwen3", 2560, 36): "Qwen3-4B", ("qwen3", 4096, 36): "Qwen3-8B"}  # model type, hidden size, layers


def model_of(architecture: Mapping[str, Any]) -> str | None:
    """Return the paper's model with this `Target.architecture`, or None."""
    return SHAPES.get(tuple(architecture.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers")))  # type: ignore[arg-type]
