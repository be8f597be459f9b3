"""`blockdraft data` and `blockdraft hidden-states` on tiny random models."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.targets import load_target
from blockdraft_train.data import prepare
from blockdraft_train.data.documents import read_data
from blockdraft_train.data.hidden_states import read_hidden_states

Run = Callable[..., Any]
DOCS = Path(__file__).parents[4] / "docs/data.md"


@pytest.fixture
def run(blockdraft: Run, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path, tmp_path: Path) -> Run:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "say {i}", "response": "yes"}}\n' for i in range(6)))
    (tmp_path / "foreign.jsonl").write_text('{"question": "why?"}\n')
    monkeypatch.chdir(tmp_path)
    return lambda command, *args: blockdraft(command, "--target", tiny_target_dir, *args, "--device", "cpu")


def test_records_to_hidden_states(run: Run, tiny_target_dir: Path, tmp_path: Path) -> None:
    code, out, err = run("data", "rows.jsonl", "--out", "data")
    data = read_data(tmp_path / "data")
    assert (
        code == 0 and "6 records, 6 to do" in err and "started: 0 of 6 records\n" in err and ": 6 of 6 records\n" in err
    )
    supervised = sum(int(entry.supervised.sum()) for entry in data)
    share = f"({supervised / sum(data.lengths):.0%})"
    assert (
        out == f"data: 6 documents of 6 records, {sum(data.lengths)} tokens, {supervised} of them supervised {share}\n"
    )
    code, out, err = run("hidden-states", "--data", "data", "--out", "hidden_states", "--target-layers", "0,2")
    assert (
        code == 0
        and "layers 0, 2: 0.0 MiB to write, " in err
        and out.startswith("hidden_states: hidden states of 6 doc")
    )
    report = read_hidden_states(tmp_path / "hidden_states")
    report.check(load_target(tiny_target_dir, device="cpu"), data, (0, 2))
    assert len(report) == 6


def test_regenerated(run: Run, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    options = ("--regenerate", "--temperature", 0.9, "--seed", 4, "--max-new-tokens", 12, "--limit", 4)
    report = run("data", "rows.jsonl", "--out", "plain", *options, "--json")
    manifest = json.loads(report.out)
    assert manifest["counts"]["rows"] == 4 and manifest["arguments"]["limit"] == 4
    assert manifest["written_by"]["writer"] == "target" and manifest["written_by"]["seed"] == 4
    drafted = run("data", "rows.jsonl", "--out", "drafted", *options, "--drafter", tiny_drafter_dir, "--json")
    assert json.loads(drafted.out)["fingerprint"] == manifest["fingerprint"]
    assert read_data(tmp_path / "plain").lengths == [len(entry.tokens) for entry in read_data(tmp_path / "drafted")]


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    add = prepare.DataWriter.add

    def interrupted(self: prepare.DataWriter, row: int, *rest: object) -> None:
        add(self, row, *rest)  # type: ignore[arg-type]
        if row == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare.DataWriter, "add", interrupted)
        code, out, err = run("data", "rows.jsonl", "--out", "data")
    assert (code, out) == (130, "")
    assert err.endswith("Interrupted; 4 of 6 records are kept in data. The same command goes on.\n")
    assert "6 records, 2 to do" in run("data", "rows.jsonl", "--out", "data").err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["foreign.jsonl"], "foreign.jsonl, record 1: it has the fields ['question']"),
        (["absent.jsonl"], "There is no absent.jsonl"),
        (["rows.jsonl", "--server", "http://x"], "Only one of --server and --model is given"),
        (["rows.jsonl", "--server", "http://x", "--model", "m"], "add --regenerate"),
        (["rows.jsonl", "--drafter", "none"], "add --regenerate"),
        (["rows.jsonl", "--regenerate", "--server", "x", "--model", "m", "--drafter", "none"], "leave it out"),
        (["rows.jsonl", "--length", "1000"], "length is 1000 and the target's context 256"),
        (["rows.jsonl", "--chat-template", "absent.jinja"], "absent.jinja cannot be read"),
        (["rows.jsonl", "--template-args", "x"], "must be a JSON object"),
    ],
)
def test_bad_input_of_data(run: Run, tmp_path: Path, args: list[str], message: str) -> None:
    code, out, err = run("data", *args, "--out", "data")
    assert (code, out) == (2, "") and f"error: {message}" in err or message in err
    assert "Traceback" not in err and not (tmp_path / "data").exists()


def test_bad_input_of_features(run: Run, tmp_path: Path) -> None:
    code, out, err = run("hidden-states", "--data", "data", "--out", "hidden_states")
    assert (code, out) == (2, "") and "error: data/data.json does not exist" in err
    run("data", "rows.jsonl", "--out", "data")
    for target_layers, message in (
        ("9,", "the target has 3 layers"),
        ("x", "--target-layers must be a whole number, got 'x'"),
        ("5", "is 5, a number of layers"),
        ("0", "--target-layers must be at least 1 or a list, got '0'"),
    ):
        code, out, err = run(
            "hidden-states", "--data", "data", "--out", "hidden_states", "--target-layers", target_layers
        )
        assert (code, out) == (2, "") and message in err
    assert not (tmp_path / "hidden_states").exists()


def test_another_chat_template(run: Run, tmp_path: Path) -> None:
    (tmp_path / "marked.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}: {% endif %}{% endfor %}"
    )
    assert run("data", "rows.jsonl", "--out", "data", "--chat-template", "marked.jinja").code == 0
    entry = read_data(tmp_path / "data")[0]
    assert len(entry.tokens) == len("say 0: yes") and int(entry.supervised.sum()) == len("yes")


@pytest.fixture
def base(tmp_path: Path, altered: Callable[..., Path]) -> Path:
    """The tiny target without its chat template, and things to continue."""
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 30)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "once upon"}\n')
    return altered(without="chat_template.jinja")


def test_commands_of_the_docs_for_base_models(run: Run, base: Path, tmp_path: Path) -> None:
    [section] = re.findall(r"^## Base models\n(.*?)^## ", DOCS.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.split() for line in section.splitlines() if line.startswith("blockdraft data")]
    assert len(lines) == 2
    for words in lines:
        words[words.index("--target") + 1] = str(base)
        report = run("data", *words[2:], "--max-new-tokens", 8)
        assert report.code == 0, report.err
    first = run("data", *lines[0][2:], "--max-new-tokens", 8)
    assert "continues the first 64 tokens of each text; a {prompt} record is continued as a whole." in first.err
    data = read_data(tmp_path / "build/continued")
    assert len(data) == 4 and all(int(entry.supervised.sum()) <= 8 and max(data.lengths) <= 72 for entry in data)
    assert json.loads((tmp_path / "build/sampled/data.json").read_text())["continued"] == {"tokens": 32, "prompts": 32}


def test_bad_input_is_reported_before_the_weights_are_loaded(
    run: Run, altered: Callable[..., Path], tmp_path: Path
) -> None:
    target = altered(without="model.safetensors")
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.")
    (tmp_path / "file").touch()
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
    for args, message in (
        (
            ["chats.jsonl", "--continue", 5],
            "chats.jsonl, record 1: this is a chat, whose roles only a chat template can",
        ),
        (["book.txt"], "book.txt, record 1: this is a plain text, not a prompt"),
        (["rows.jsonl", "--out", "file/data"], "file/data cannot be written to, since "),
        (["rows.jsonl", "absent.jsonl"], "There is no absent.jsonl"),
        (["book.txt", "--continue", 256], "256 tokens of each text are to be continued and a document has at most 256"),
    ):
        code, out, err = run("data", "--out", "data", *args, "--regenerate", "--target", target)
        assert (code, out) == (2, "") and message in err, err
        assert "Traceback" not in err and not (tmp_path / "data").exists()


def test_bad_files_are_reported_together_before_anything_of_the_target_is_read(run: Run) -> None:
    args = ["rows.jsonl", "absent.csv", "--chat-template", "absent.jinja", "--target", "/no/such"]
    code, _, err = run("data", *args, "--out", "rows.jsonl/data")
    assert code == 2 and re.search(
        r"(?s)3 things .*rows.jsonl is no folder.*no absent.csv.*absent.jinja cannot be read",
        err,
    )


def test_few_rows_are_reported(run: Run) -> None:
    report = run("data", "rows.jsonl", "--out", "data", "--limit", 50)
    assert "There are fewer than the 50 records of --limit; add sources to have more." in report.err
