import json
import sys
from pathlib import Path

import pytest
from fakes import fake

from benchmarks.peers import __main__ as program
from benchmarks.peers.registry import PLAIN, REFERENCE


@pytest.fixture
def command(tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of fake peers; their answers begin with the prompt's first token, which the chat template sets."""
    monkeypatch.setattr(program, "BUILD", tmp_path / "build")
    monkeypatch.setattr(program, "JOURNAL", tmp_path / "build" / "journal.jsonl")
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text('{"prompt": "1 + 1"}\n{"prompt": "2 + 2"}\n')
    folders = ["--target", str(tiny_target_dir), "--drafter", str(tmp_path)]
    return [*folders, "--prompts", str(prompts), "--max-new-tokens", "5", "--out", str(tmp_path / "out")]


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], *peers: object) -> None:
    monkeypatch.setattr(program, "choose", lambda names: list(peers))
    monkeypatch.setattr(sys, "argv", ["peers", *arguments])
    program.main()


def test_one_command_measures_and_writes(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = fake(REFERENCE), fake("a", differ=1), fake("b", missing="no wheel"), fake("c", die=1), fake(PLAIN)
    run(monkeypatch, [*command, "--repeats", "2"], *peers)
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert set(found["sets"]["sums"]) == {REFERENCE, "a", PLAIN}
    assert found["missing"] == {"b": "no wheel", "c": "failed: it ended with 1: out of memory"}
    assert [(one["peer"], one["place"], one["margin"]) for one in found["differences"]] == [("a", 3, 0.25)] * 2
    assert found["settings"]["prompts"] == {"sums": 2} and found["looping"] == {"sums": 0}
    assert "| b | missing: no wheel |" in capsys.readouterr().out
    for file in ("peers.json", "peers.md"):
        assert str(tmp_path) not in (tmp_path / "out" / file).read_text()
    assert not (tmp_path / "build" / "journal.jsonl").exists()


def test_nothing_to_compare_with(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, command, fake(REFERENCE, missing="no wheel"), fake("a"))
    assert ended.value.code == 2
    assert "Without transformers there is nothing to compare with: no wheel" in capsys.readouterr().err


def test_prompts_that_do_not_fit(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, [*command, "--max-new-tokens", "250"], fake(REFERENCE))
    assert ended.value.code == 2
    assert "Prompt 1 of sums has" in capsys.readouterr().err


def test_an_interrupt_keeps_the_journal(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(program, "measure", interrupted)
        run(patch, command, fake(REFERENCE))
    assert ended.value.code == 130
    assert "goes on from here" in capsys.readouterr().err
    assert (tmp_path / "build" / "journal.jsonl").exists()
    run(monkeypatch, [*command, "--repeats", "5"], fake(REFERENCE))  # the default written out


def test_the_bundled_prompts_are_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers"])
    args = program.arguments()
    assert args.repeats == 5 and args.dtype == "float32"
    tasks = program.read_tasks(args, program.load_target_text(args.target))
    assert len(tasks) >= 5 and {task.prompt_set for task in tasks} == {"prompts"}
