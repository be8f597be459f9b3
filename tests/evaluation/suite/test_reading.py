"""Prompts read from files in the hub's layout."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from blockdraft.evaluation.suite.paper import PAPER, Turns
from blockdraft.evaluation.suite.reading import chosen_tasks, read_tasks

Write = Callable[[str, Sequence[Mapping[str, Any]]], Path]

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
# Of each set a file as the hub has it, a record of it, and what is asked.
SETS: dict[str, tuple[str, dict[str, object], Turns]] = {
    "gsm8k": (
        "openai/gsm8k/main/test-00000-of-00001.parquet",
        {"question": "2 + {2}?", "answer": "#### 4"},
        (f"2 + {{2}}?\n{BOXED}",),
    ),
    "math500": ("HuggingFaceH4/MATH-500/test.jsonl", {"problem": "p", "answer": "4"}, (f"p\n{BOXED}",)),
    "aime24": ("HuggingFaceH4/aime_2024/data/train-00000-of-00001.parquet", {"problem": "p"}, (f"p\n{BOXED}",)),
    "aime25": ("MathArena/aime_2025/data/train-00000-of-00001.parquet", {"problem": "p"}, (f"p\n{BOXED}",)),
    "humaneval": (
        "openai/openai_humaneval/openai_humaneval/test-00000-of-00001.parquet",
        {"task_id": "0", "prompt": "def f():\n"},
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n"
            "\n```",
        ),
    ),
    "mbpp": (
        "google-research-datasets/mbpp/sanitized/test-00000-of-00001.parquet",
        {"prompt": "Write it.", "code": "x"},
        ("Write it.",),
    ),
    "mt-bench": (
        "HuggingFaceH4/mt_bench_prompts/data/train-00000-of-00001-0a1b2c.parquet",
        {"prompt": ["one", "two"], "category": "writing"},
        ("one", "two"),
    ),
    "alpaca": (
        "tatsu-lab/alpaca/data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        {"instruction": "Sort.", "input": "b a", "output": "a b"},
        ("Sort.\n\nInput:\nb a",),
    ),
}
LIVE_CODE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\nAdd.\n\n### Format: Use the following code structure:\n```python\nclass A:\n"
    "```\n\n### Answer: (use the provided format with backticks)"
)
LIVE_CODE_FREE = LIVE_CODE.replace(
    "Use the following code structure", "Write your code in the following format"
).replace("class A:", "# YOUR CODE HERE")


def read(folder: Path, names: str, limit: int | None = None) -> dict[str, list[Turns]]:
    return read_tasks(chosen_tasks(names), folder, limit)


def test_every_set_has_the_papers_prompts(write: Write, tmp_path: Path) -> None:
    for file, record, _ in SETS.values():
        write(file, [record])
    for number in ("", 2, 3, 4, 5, 6):
        starter = "class A:" if number == "" else ""
        write(
            f"livecodebench/code_generation_lite/test{number}.jsonl",
            [{"question_content": "Add.", "starter_code": starter}],
        )
    found = read_tasks(PAPER, tmp_path / "data", None)
    assert found == {
        **{name: [asked] for name, (_, _, asked) in SETS.items()},
        "livecodebench": [(LIVE_CODE,), *[(LIVE_CODE_FREE,)] * 5],
    }


def test_prompts_and_order_are_those_of_the_authors(write: Write, tmp_path: Path) -> None:
    records = [{"prompt": f"Write {i}."} for i in range(200)]
    write("google-research-datasets/mbpp/sanitized/test-00000-of-00002.parquet", records[:150])
    write("google-research-datasets/mbpp/sanitized/test-00001-of-00002.parquet", records[150:])
    shuffled = datasets.Dataset.from_list(records).shuffle(seed=0)["prompt"]
    found = read(tmp_path / "data", "mbpp")["mbpp"]
    assert found == [(text,) for text in shuffled[:128]]
    assert read(tmp_path / "data", "mbpp", 3)["mbpp"] == found[:3]
    assert read(tmp_path / "data", "mbpp", 500)["mbpp"] == [(record["prompt"],) for record in records]
    assert {task.name: task.samples for task in PAPER} == {
        **dict.fromkeys(("gsm8k", "math500", "mbpp", "livecodebench", "alpaca"), 128),
        "aime24": 30,
        "aime25": 30,
        "humaneval": 164,
        "mt-bench": 80,
    }


def test_only_the_files_of_its_split_and_subset(data: Path) -> None:
    found = read(data, "mt-bench,gsm8k")
    assert list(found) == ["gsm8k", "mt-bench"]  # the suite's order
    assert found["mt-bench"] == [("Say one.", "And two.")]  # FastChat's file, in a folder without the owner
    assert [asked[0].split("\n")[0] for asked in found["gsm8k"]] == [f"Sum {i}?" for i in range(5)]


def test_bad_data_is_named(write: Write, data: Path) -> None:
    file = write("openai/gsm8k/main/test-00000-of-00001.parquet", [{"query": "2 + 2?", "answer": "4"}])
    with pytest.raises(ValueError) as caught:
        read(data, "gsm8k,mbpp,mt-bench")
    message = str(caught.value)
    assert "2 things do not fit" in message
    assert f"GSM8K: {file} has no column 'question', and 'query', 'answer' instead; fetch it" in message
    assert f"MBPP: there is neither {data / 'google-research-datasets/mbpp'} nor {data / 'mbpp'}" in message
    assert "hf download --repo-type dataset openai/gsm8k --local-dir DIR/openai/gsm8k" in message


@pytest.mark.parametrize(
    ("names", "file", "records", "message"),
    [
        ("alpaca", "alpaca/train.jsonl", [{"instruction": " ", "input": ""}], "train.jsonl asks nothing"),
        ("mt-bench", "mt_bench_prompts/train.jsonl", [{"prompt": 5}], "record 1 of .*train.jsonl asks nothing: .*5"),
        ("mt-bench", "mt_bench_prompts/train.jsonl", [{"text": "a"}], "has no column 'turns'"),
        ("alpaca", "alpaca/notes.txt", [], "holds no .parquet or .jsonl file"),
        ("math500", "MATH-500/test.jsonl", [], "test.jsonl cannot be read|holds no records of HuggingFaceH4/MATH-500"),
        ("livecodebench", "code_generation_lite/test.jsonl", [{}], "lacks test2.jsonl, test3.jsonl"),
    ],
)
def test_bad_files(
    write: Write, tmp_path: Path, names: str, file: str, records: list[dict[str, object]], message: str
) -> None:
    write(file, records)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "data", names)


def test_broken_files_and_names(write: Write, tmp_path: Path) -> None:
    write("MATH-500/test.jsonl", []).write_text("{no JSON")
    with pytest.raises(ValueError, match=r"MATH-500: .*test.jsonl cannot be read"):
        read(tmp_path / "data", "math500")
    with pytest.raises(ValueError, match="which is no folder"):
        read(tmp_path / "nowhere", "math500")
    with pytest.raises(ValueError, match="tasks must be some of gsm8k,math500.*, got 'gsm9k'"):
        chosen_tasks("gsm9k")
    with pytest.raises(ValueError, match="openai/gsm8k cannot be read .*--suite-data DIR"):  # there is no hub here
        read_tasks(chosen_tasks("gsm8k"), None, None)
