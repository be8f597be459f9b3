import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from some_results import ARGUMENTS, PLAIN_TRIAL, trial

from blockdraft.cli.display import standard as plain_console
from blockdraft.evaluation import pictures, report
from blockdraft.evaluation.pictures import require_pictures
from blockdraft.evaluation.report import write
from blockdraft.evaluation.results import Results, results


def test_tables(found: Results, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(plain_console(), found)
    told = capsys.readouterr().out
    assert told.splitlines()[1:3] == ["Drafter eagle3, which has weights of 4 bits: x", ""]
    lines = [line.split() for line in told.splitlines()]
    assert [" ".join(line) for line in lines if "timed" in line] == [
        "first: 1 prompt, 1 timed",
        "second: 1 prompt, 1 timed",
        "all sets: 2 prompts, 2 timed",
    ]
    assert ["none", "1.0", "1.0-1.0", "1.00", "1.00", "1.00", "100", "0"] in lines
    assert ["x", "2.0", "2.0-2.0", "2.00", "2.00", "1.00", "67", "33", "0", "100", "0"] in lines


def test_draft_tokens_sampled_at_random_promise_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [trial(name, "a", None, 6.0, PLAIN_TRIAL) for name in ("none", "chosen", "sampled")]
    for temperature, expected in ((1.0, None), (0.0, 1.0)):
        arguments = ARGUMENTS | {"temperature": temperature}
        found = results(trials, arguments, torch.device("cpu"), sampled={"sampled"})
        assert [found.methods[name].identical for name in ("none", "chosen", "sampled")] == [1, 1, expected]
        report.show(plain_console(), found)
        told = " ".join(capsys.readouterr().out.split())
        assert ("same is ? for sampled draft tokens" in told) == (expected is None)


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
        assert str(caught.value).startswith(f"{tmp_path / 'results.json'} cannot be written (No space left on device);")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "old"


def test_results_have_their_name_only_when_they_are_complete(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is complete before it gets its name, so a killed process leaves a file of another name at most."""
    replaced: list[tuple[str, str]] = []
    replace = Path.replace

    def watched(self: Path, new: Path) -> Any:
        assert not new.exists()
        replaced.append((self.read_text(), new.name))
        return replace(self, new)

    monkeypatch.setattr(Path, "replace", watched)
    write(tmp_path, found, with_pictures=False)
    assert replaced == [(found.as_json(), "results.json")]


def test_pictures(found: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    require_pictures()
    write(tmp_path, found, with_pictures=True)
    for name in ("acceptance.png", "speedup.png", "tau.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(("name", "value"), [("speedup.png", "speedup"), ("tau.png", "tau")])
def test_bars_are_of_each_set_and_of_all(
    name: str, value: str, found: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "_png", lambda figure, axes: drawn.append(axes) or b"")
    pictures.PICTURES[name](found)
    groups = [*(one.methods for one in found.sets.values()), found.methods]
    assert [bar.get_height() for bar in drawn[0].patches] == [getattr(group["x"], value) for group in groups]


@pytest.mark.parametrize("methods", [["none"], ["none", "x"]])
def test_pictures_where_nothing_was_timed(tmp_path: Path, methods: list[str]) -> None:
    pytest.importorskip("matplotlib")
    trials = [trial(method, "a", None, 6.0, PLAIN_TRIAL) for method in methods]
    bare = results(trials, ARGUMENTS, torch.device("cpu"))
    write(tmp_path, bare, with_pictures=True)
    assert len(list(tmp_path.iterdir())) == 4


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
