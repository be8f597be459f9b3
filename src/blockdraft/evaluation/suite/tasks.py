"""The sets of the DFlash paper (arXiv 2602.06036): where each lies on the hub, what is asked, how many prompts count.

Sets, prompts, their order and numbers are those of the authors' benchmark (z-lab/dflash, `model/utils.py` and
`run_benchmark.sh` of its first release).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SHUFFLE_SEED = 0  # of the order from which a set's prompts are taken
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
        name: As the command line has it.
        title: As the paper has it.
        hub: The dataset's name on the hub.
        split: Of the dataset, with which the names of its files begin.
        columns: That a row must have. A tuple among them names columns of which one is enough.
        turns: What a row asks, turn by turn.
        samples: Prompts that the paper takes at most.
        subset: Of the dataset, which is also a folder of its files; None where it has one only.
        files: Its files, for a dataset that the hub's library cannot open by name.
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
    return lambda row: (f"{row[column]}\n{STEPS}",)


def _human_eval(row: Mapping[str, Any]) -> Turns:
    asked = "Write a solution to the following problem and make sure that it passes the tests:"
    return (f"{asked}\n```python\n{row['prompt']}\n```",)


def _live_code(row: Mapping[str, Any]) -> Turns:
    starter = row.get("starter_code")
    how = "Use the following code structure:" if starter else "Write your code in the following format:"
    parts = (
        LIVE_CODE,
        f"### Question:\n{row['question_content']}",
        f"### Format: {how}\n```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ("\n\n".join(parts),)


def _alpaca(row: Mapping[str, Any]) -> Turns:
    given = row.get("input")
    return (f"{row['instruction']}\n\nInput:\n{given}" if given else row["instruction"],)


def _mt_bench(row: Mapping[str, Any]) -> Turns:
    return tuple(row["prompt"] if row.get("prompt") is not None else row["turns"])


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
        lambda row: (row["prompt"],),
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
    # FastChat's own file, which the hub's folder holds too, calls them turns.
    Task("mt-bench", "MT-Bench", "HuggingFaceH4/mt_bench_prompts", "train", (("prompt", "turns"),), _mt_bench, 80),
    Task("alpaca", "Alpaca", "tatsu-lab/alpaca", "train", ("instruction", "input"), _alpaca),
)
SUITES = {"paper": PAPER}
