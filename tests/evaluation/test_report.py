import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from blockdraft.cli.display import plain as plain_console
from blockdraft.engine import Completion, Stats
from blockdraft.evaluation import report
from blockdraft.evaluation.report import Results, check_folder, write
from blockdraft.evaluation.speed import Trial

PLAIN_TRIAL, DRAFTED_TRIAL = [1] * 6, [3, 1, 2]

ARGUMENTS = {"temperature": 0.0, "repeats": 2, "running": "native, compiled", "dtype": "float32", "device": "cpu"}


def trial(method: str, prompt_set: str, repeat: int | None, seconds: float, committed: list[int]) -> Trial:
    stats = Stats(committed, [0 if method == "none" else 3] * len(committed))
    return Trial(method, prompt_set, (0,), repeat, (Completion("", [0] * 7, "stop", [], stats),), seconds)


@pytest.fixture
def found() -> Results:
    """Two sets, and a method that is twice as fast on one of them and thrice on the other."""
    trials = []
    for prompt_set, seconds in (("first", 3.0), ("second", 2.0)):
        trials += [trial("none", prompt_set, repeat, 6.0, PLAIN_TRIAL) for repeat in (None, 0, 1)]
        trials += [trial("x", prompt_set, repeat, seconds, DRAFTED_TRIAL) for repeat in (0, 1)]
    return report.results(trials, ARGUMENTS, torch.device("cpu"))


def test_results_hold_the_sets_and_what_they_were_measured_with(found: Results) -> None:
    content = json.loads(found.as_json())
    assert content.keys() == {"methods", "sets", "arguments", "versions", "hardware", "profiles"}
    assert content["versions"].keys() == {"blockdraft", "torch", "transformers", "python"}
    assert content["hardware"].keys() == {"cpu", "cores", "logical_cores", "threads", "memory_bytes", "gpu"}
    assert content["hardware"]["memory_bytes"] == psutil.virtual_memory().total
    assert content["hardware"]["cpu"] and content["hardware"]["gpu"] is None
    assert {name: one["methods"]["x"]["speedup"] for name, one in content["sets"].items()} == {"first": 2, "second": 3}
    assert content["methods"]["x"]["speedup"] == pytest.approx(12 / 5)  # 12 tokens in 5 seconds against 12 in 12
    assert content["methods"]["x"]["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert found.arguments == ARGUMENTS


def test_tables(found: Results, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(plain_console(), found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(line) for line in lines if "timed" in line] == [
        "first: 1 prompt, 1 timed",
        "second: 1 prompt, 1 timed",
        "all sets: 2 prompts, 2 timed",
    ]
    assert ["none", "1.0", "1.0-1.0", "1.00", "1.00", "1.00", "100", "0"] in lines
    assert ["x", "2.0", "2.0-2.0", "2.00", "2.00", "1.00", "67", "33", "0", "100", "0"] in lines


def test_guesses_drawn_at_random_promise_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [trial(name, "a", None, 6.0, PLAIN_TRIAL) for name in ("none", "chosen", "drawn")]
    for temperature, expected in ((1.0, None), (0.0, 1.0)):
        arguments = ARGUMENTS | {"temperature": temperature}
        found = report.results(trials, arguments, torch.device("cpu"), drawn={"drawn"})
        assert [found.methods[name].identical for name in ("none", "chosen", "drawn")] == [1, 1, expected]
        report.show(plain_console(), found)
        told = " ".join(capsys.readouterr().out.split())
        assert ("same is ? where guesses are drawn at random" in told) == (expected is None)


def test_tables_never_round_up_to_all() -> None:
    assert [report._percent(share) for share in (None, 0.9999, 1.0, 0.3333, 0.0)] == ["?", "99.9", "100", "33.3", "0"]


def test_write(found: Results, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write(folder, found, with_pictures=False)
    assert [path.name for path in folder.iterdir()] == ["results.json"]
    assert (folder / "results.json").read_text() == found.as_json()


def test_pictures_of_other_results_go(found: Results, tmp_path: Path) -> None:
    (tmp_path / "speedup.png").write_bytes(b"old")
    write(tmp_path, found, with_pictures=False)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_no_half_file(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "results.json").write_text("old")

    def half(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise error

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        write(tmp_path, found, with_pictures=False)
    if isinstance(error, OSError):
        assert str(caught.value) == f"{tmp_path} cannot be written to (No space left on device)."
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "old"


def test_results_have_their_name_only_when_they_are_complete(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed cannot clean up; then a file of another name stays behind."""
    replaced: list[tuple[str, str]] = []
    replace = Path.replace

    def watched(self: Path, new: Path) -> Any:
        assert not new.exists()
        replaced.append((self.read_text(), new.name))
        return replace(self, new)

    monkeypatch.setattr(Path, "replace", watched)
    write(tmp_path, found, with_pictures=False)
    assert replaced == [(found.as_json(), "results.json")]


def test_check_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(tmp_path / "new" / "folder", overwrite=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "results.json").write_text("old")
    check_folder(tmp_path, overwrite=True)
    with pytest.raises(ValueError, match=r"results\.json exists; .* --overwrite"):
        check_folder(tmp_path, overwrite=False)
    for folder in (tmp_path / "results.json", tmp_path / "results.json" / "inside"):
        with pytest.raises(ValueError, match="is no writable folder"):
            check_folder(folder, overwrite=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="is no writable folder"):
        check_folder(tmp_path, overwrite=True)


def test_pictures(found: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.require_pictures()
    write(tmp_path, found, with_pictures=True)
    for name in ("acceptance.png", "speedup.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("methods", [["none"], ["none", "x"]])
def test_pictures_where_nothing_was_timed(tmp_path: Path, methods: list[str]) -> None:
    pytest.importorskip("matplotlib")
    trials = [trial(method, "a", None, 6.0, PLAIN_TRIAL) for method in methods]
    bare = report.results(trials, ARGUMENTS, torch.device("cpu"))
    write(tmp_path, bare, with_pictures=True)
    assert len(list(tmp_path.iterdir())) == 3
