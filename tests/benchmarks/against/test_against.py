import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.against import __main__ as against
from benchmarks.against.__main__ import Tree, checked_out, compare
from benchmarks.against.report import Cell, Sample, interval, summary, table

LOOP = [7] * 40


def sample(seconds: float, answers: list[list[int]], host: float | None = 1e-4) -> Sample:
    return Sample(seconds, host, answers, cycles=3)


def test_ratios_are_of_neighbours_and_have_an_interval() -> None:
    old, new = [sample(s, [[1, 2]]) for s in (1.0, 2.0, 4.0)], [sample(s, [[1, 2]]) for s in (0.5, 1.0, 4.0)]
    cell = Cell("plain", 1, old, new)
    assert cell.ratios == [2.0, 2.0, 1.0] and cell.identical
    low, high = interval([1.0 + i / 100 for i in range(21)])
    assert 1.02 < low < 1.10 < high < 1.18
    assert interval([2.0] * 5) == (2.0, 2.0)
    found = summary(cell)
    assert (found["ratio"], found["old_tokens_per_second"], found["new_tokens_per_second"]) == (2.0, 1.0, 2.0)
    assert found["old_host_microseconds"] == pytest.approx(100)
    assert "answers" not in found["samples"][0] and len(found["samples"]) == 6


def test_other_tokens_and_loops_are_told() -> None:
    cells = [
        Cell("plain", 4, [sample(1.0, [[1, 2], LOOP])], [sample(1.0, [[1, 3], LOOP])]),
        Cell("tree", 1, [sample(1.0, [[1, 2]], None)], [sample(1.0, [[1, 2]], None)]),
    ]
    lines = table([summary(cell) for cell in cells]).splitlines()
    assert lines[2] == "| plain | 4 | 42.0 | 42.0 | 1.000 (1.000 to 1.000) | 100 us | 100 us | NO, 1 of 2 loop |"
    assert lines[3] == "| tree | 1 | 2.0 | 2.0 | 1.000 (1.000 to 1.000) |  |  | yes |"


class FakeTree:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def measure(self, **asked: Any) -> Sample:
        self.log.append(f"{self.name} {asked['method']} {asked['rows']} {len(asked['prompts'])}")
        return sample(1.0, [[len(self.log)]])


def test_trees_take_turns_after_a_warm_up() -> None:
    log: list[str] = []
    old, new = FakeTree("old", log), FakeTree("new", log)
    cells = list(compare(old, new, ["plain"], [1, 16], ["a", "b"], 8, rounds=1))  # type: ignore[arg-type]
    assert [line.split()[0] for line in log[:6]] == ["old", "new", "old", "new", "new", "old"]
    assert {line for line in log if " 16 " in line} == {"old plain 16 16", "new plain 16 16"}
    assert [s.answers for s in cells[0].old] == [[[3]], [[6]]] and [s.answers for s in cells[0].new] == [[[4]], [[5]]]


def test_a_commit_is_checked_out_and_removed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    (tmp_path / "file").write_text("old")
    git("add", ".")
    git("commit", "--quiet", "-m", "old")
    (tmp_path / "file").write_text("new")
    with checked_out("HEAD", tmp_path) as folder:
        assert (folder / "file").read_text() == "old"
    assert not folder.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


@pytest.mark.slow
def test_this_tree_against_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    root = Path(against.__file__).parents[2]
    monkeypatch.setattr(against, "checked_out", lambda commit: _same(root))
    options = ["HEAD", "--methods", "plain,chain", "--rows", "2", "--rounds", "1", "--tokens", "6", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["against", *options, "--out", str(tmp_path)])
    assert against.main() == 0
    found = json.loads((tmp_path / "against.json").read_text())
    assert [one["method"] for one in found] == ["plain", "chain"] and all(one["identical"] for one in found)
    assert found[0]["old_host_microseconds"] > 0
    assert "native, compiled" in (tmp_path / "against.md").read_text()


class _same:
    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> Path:
        return self.root

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_what_does_not_run_compiled_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="ended with 1"):
        Tree(Path(against.__file__).parents[2], "native", 1)
