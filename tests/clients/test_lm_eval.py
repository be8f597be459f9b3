"""lm-eval's `local-completions`, unchanged: tasks of likelihoods and of generated text, made on the spot."""

import json
from pathlib import Path

import pytest
from served import KEY, MODEL, Server

lm_eval = pytest.importorskip("lm_eval", reason="make test-clients installs the clients")

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICES = """
task: capitals
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
TEXT = """
task: counting
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def test_likelihoods_and_texts(small: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # What the model was trained on: numbers in order are likelier than not.
    rows = [
        {"question": f"{n}, {n + 1}, {n + 2},", "choices": [f" {n + 3}", " tree"], "answer": 0, "text": ""}
        for n in range(1, 9)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("capitals", CHOICES), ("counting", TEXT)):
        (tmp_path / f"{name}.yaml").write_text(COMMON.format(data=data) + text)
    how = {
        "model": MODEL,
        "base_url": f"{small.v1}/completions",
        "tokenizer": str(small.target),
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 1024,
    }
    response = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=",".join(f"{name}={value}" for name, value in how.items()),
        tasks=["capitals", "counting"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert response["results"]["capitals"]["acc,none"] > 0.5
    scores = [sample["resps"] for sample in response["samples"]["capitals"]]
    assert all(float(choice[0][0]) < 0 for sample in scores for choice in sample)
    assert all(isinstance(sample["resps"][0][0], str) for sample in response["samples"]["counting"])
