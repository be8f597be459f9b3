"""The prompts of the DFlash paper's sets."""

import datasets
import pytest
from benchmarks.paper_sets import SETS, STEPS

RECORDS = {
    "gsm8k": ({"question": "2 + {2}?", "answer": "#### 4"}, [f"2 + {{2}}?\n{STEPS}"]),
    "math500": ({"problem": "p"}, [f"p\n{STEPS}"]),
    "mbpp": ({"prompt": "Write it."}, ["Write it."]),
    "mt-bench": ({"prompt": ["one", "two"]}, ["one", "two"]),
    "alpaca": ({"instruction": "Sort.", "input": "b a"}, ["Sort.\n\nInput:\nb a"]),
    "humaneval": (
        {"prompt": "def f():\n"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_templates(name: str) -> None:
    record, turns = RECORDS[name]
    assert SETS[name].prompts([record]) == [turns]


def test_live_code_shows_the_starter() -> None:
    given, free = SETS["livecodebench"].prompts(
        [{"question_content": "Add.", "starter_code": "class A:"}, {"question_content": "Add.", "starter_code": ""}]
    )
    assert "### Question:\nAdd.\n\n### Format: Use the following code structure:\n```python\nclass A:\n```" in given[0]
    assert "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in free[0]


def test_prompts_and_order_are_those_of_the_authors() -> None:
    records = [{"prompt": f"Write {i}."} for i in range(200)]
    shuffled = datasets.Dataset.from_list(records).shuffle(seed=0)["prompt"]
    assert SETS["mbpp"].prompts(records) == [[text] for text in shuffled[:128]]
    assert {name: paper_set.count for name, paper_set in SETS.items()} == {
        **dict.fromkeys(("gsm8k", "math500", "mbpp", "livecodebench", "alpaca"), 128),
        "aime24": 30,
        "aime25": 30,
        "humaneval": 164,
        "mt-bench": 80,
    }
