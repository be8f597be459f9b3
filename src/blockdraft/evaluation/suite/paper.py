"""The prompt sets of the DFlash paper (arXiv 2602.06036).

Sets, prompts, their order and numbers are those of the authors' benchmark (z-lab/dflash, `model/utils.py` and
`run_benchmark.sh` of its first release).
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
        turns: Function from a record to the user's turns.
        samples: Maximum number of prompts in the paper.
        subset: Subset of the dataset, and folder of its files, if there are several.
        files: Files of a dataset that the hub's library cannot open by name.
    """

    name: str
    title: str
    hub: str
    split: str
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
    Task("gsm8k", "GSM8K", "openai/gsm8k", "test", _steps("question"), subset="main"),
    Task("math500", "MATH-500", "HuggingFaceH4/MATH-500", "test", _steps("problem")),
    Task("aime24", "AIME24", "HuggingFaceH4/aime_2024", "train", _steps("problem"), 30),
    Task("aime25", "AIME25", "MathArena/aime_2025", "train", _steps("problem"), 30),
    Task("humaneval", "HumanEval", "openai/openai_humaneval", "test", _human_eval, 164),
    Task(
        "mbpp",
        "MBPP",
        "google-research-datasets/mbpp",
        "test",
        lambda record: (record["prompt"],),
        128,
        "sanitized",
    ),
    Task(
        "livecodebench",
        "LiveCodeBench",
        "livecodebench/code_generation_lite",
        "test",
        _live_code,
        files=tuple(f"test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)),
    ),
    # FastChat's own file, which is also in the hub's folder, has a column `turns` instead.
    Task("mt-bench", "MT-Bench", "HuggingFaceH4/mt_bench_prompts", "train", _mt_bench, 80),
    Task("alpaca", "Alpaca", "tatsu-lab/alpaca", "train", _alpaca),
)
