import json
from pathlib import Path

import pytest

from benchmarks.diffusion.problems import REQUEST, Problem, number_in, own_problems, read_problems
from blockdraft.errors import UsageError


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("2 + 2 = 4\nThe answer is \\boxed{4}.", "4"),
        ("\\boxed{1} and then \\boxed{$1,200}.", "1200"),
        ("He has 16 - 3 = <<16-3=13>>13 left.\n#### 1,013", "1013"),
        ("It is 4.", ""),
        ("\\boxed{4", "4"),
        ("", ""),
    ],
)
def test_the_result_of_an_answer(answer: str, number: str) -> None:
    assert number_in(answer) == number


def test_problems_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    row = {"question": "How much is 3 * 4?", "answer": "3 * 4 = 12\n#### 12"}
    path.write_text(json.dumps(row) + "\n")
    assert read_problems(path) == [Problem("How much is 3 * 4?" + REQUEST, "12")]
    for text, message in (
        ("", "holds no problem"),
        ('{"question": "a"}\n', "line 1, is not of the form"),
        ('{"question": 1, "answer": "#### 2"}\n', "line 1, is not of the form"),
        (json.dumps(row) + "\nno JSON\n", "line 2, is not of the form"),
        ('{"question": "a", "answer": "four"}\n', "line 1: the answer has neither"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_problems(path)
    with pytest.raises(UsageError, match="--problems takes JSON lines"):
        read_problems(tmp_path / "none")


def test_own_problems_are_new_each() -> None:
    asked = own_problems(50, 1)
    learned = own_problems(50, 1, asked)
    assert len({*asked, *learned}) == 100 and own_problems(50, 1) == asked
    assert all(problem.prompt.endswith(REQUEST) and problem.result for problem in asked)
