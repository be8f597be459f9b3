"""Other calculators on the same speeds: the questions, and the answers that are kept."""

import json

from benchmarks.radar.others import FILE, TOO_SMALL, compared, questions


def test_every_question_is_answered() -> None:
    asked, rows = questions(), list(compared())
    assert len(asked) == len(rows) + len(TOO_SMALL) and len({row.device for row in rows}) >= 10
    assert all(row.method == "plain" or row.plain for row in rows)
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(kept["versions"]) == set(kept["answers"]) == {"whichllm", "llm-checker"}
    for answers in kept["answers"].values():
        assert len(answers) == len(asked) and all(answer["speed"] > 0 for answer in answers)


def test_questions_tell_the_weights() -> None:
    for question, row in zip(questions(), compared(), strict=False):
        assert question["bytes"] < 2.01 * question["parameters"] and question["memory_gb"]
        assert question["quant"] == {"bf16": "F16", "mxfp4": "MXFP4"}.get(row.weights, row.weights)
