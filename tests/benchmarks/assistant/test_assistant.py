"""The benchmark of a coding assistant: its requests and its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.assistant.__main__ import DRAFTED, LLAMA, PLAIN, PREDICTED, Run, body, report, takes
from benchmarks.assistant.tasks import COMMIT, EDIT, FIELDS, JSON, KINDS, LINES, TESTS, make_tasks
from benchmarks.harness.sources import source_texts


def test_requests_are_the_same_in_each_run() -> None:
    tasks = make_tasks(source_texts(None), 3)
    assert tasks == make_tasks(source_texts(None), 3)
    assert [task.kind for task in tasks] == 3 * list(KINDS)
    texts = [task.fields["messages"][0]["content"] for task in tasks]
    assert len(set(texts)) == len(texts)


def test_an_edit_predicts_the_file() -> None:
    for task in make_tasks(source_texts(None), 3, [EDIT]):
        text = task.fields["messages"][0]["content"]
        [(old, new)] = re.findall(r"Rename `(\w+)` to `(\w+)`", text)
        assert text.endswith(task.prediction) and len(re.findall(rf"\b{old}\b", task.prediction)) >= 4
        assert new not in task.prediction and len(task.prediction.splitlines()) - 2 in LINES
        assert takes(task, PREDICTED) and body(task, PREDICTED)["prediction"]["content"] == task.prediction


def test_other_requests() -> None:
    texts = source_texts(None)
    json, tests, commit = make_tasks(texts, 1, [JSON, TESTS, COMMIT])
    schema = json.fields["response_format"]["json_schema"]["schema"]
    assert len(FIELDS) == 20 and schema["required"] == list(FIELDS) and not takes(json, PREDICTED)
    function = tests.fields["messages"][0]["content"].split("```python\n")[1].removesuffix("\n```")
    assert any(function in text for text in texts)
    assert all(f"+{line}" in commit.fields["messages"][0]["content"] for line in function.splitlines())


def test_too_few_files() -> None:
    with pytest.raises(ValueError, match="suit 0 requests of the kind 'edit of a file'; 1 were asked"):
        make_tasks(["x = 1\n"], 1)


def test_the_report_compares_with_the_fastest(tmp_path: Path) -> None:
    ways = {PLAIN: (2.0, "a"), DRAFTED: (1.0, "a"), f"{LLAMA} plain": (3.0, "b"), f"{LLAMA} ngram-mod": (2.5, "b")}
    runs = [
        Run(kind, name, way, 101, 0.5, 0.5 + seconds * (1 + name), 100.0, text)
        for kind in (JSON, TESTS)
        for name in range(3)
        for way, (seconds, text) in ways.items()
    ]
    runs[1] = Run(JSON, 0, DRAFTED, 101, 0.5, 1.5, 100.0, "other")
    report(runs, tmp_path)
    page = (tmp_path / "assistant.md").read_text()
    assert f"| {TESTS} | {DRAFTED} | 101 | 0.50 | 2.50 | 50.0 (33.3 to 100.0) | 2.50 (2.50 to 2.50) |" in page
    assert "2 of 3 |" in page and "3 of 3 |" in page and f"| **{LLAMA} ngram-mod** |" in page
    assert (tmp_path / "assistant.png").stat().st_size > 1000
