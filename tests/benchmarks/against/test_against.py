import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from benchmarks.against import __main__ as against
from benchmarks.against.__main__ import Sample, checked_out, child, compare, line, summary
from benchmarks.harness.process import PeerError

LOOP = [7] * 40


def sample(seconds: float, answers: list[list[int]], host: float | None = 1e-4) -> Sample:
    return Sample(seconds, host, answers, steps=3)


def test_ratios_are_of_neighbours() -> None:
    old, new = ([sample(s, [[1, 2]]) for s in each] for each in ((1.0, 2.0, 4.0), (0.5, 1.0, 4.0)))
    found = summary("plain", 1, old, new)
    assert (found["ratio"], found["old_tokens_per_second"], found["new_tokens_per_second"]) == (2.0, 1.0, 2.0)
    assert found["old_host_microseconds"] == pytest.approx(100) and found["identical"]
    assert "answers" not in found["samples"][0] and len(found["samples"]) == 6


def test_other_tokens_and_repetitive_outputs_are_shown() -> None:
    other = summary("plain", 4, [sample(1.0, [[1, 2], LOOP])], [sample(1.0, [[1, 3], LOOP])])
    assert line(other)[-3:] == ["100 us", "100 us", "NO, 1 of 2 repetitive"]
    same = [sample(1.0, [[1, 2]], None)]
    assert line(summary("tree", 1, same, same))[-4:] == ["1.000 (1.000 to 1.000)", "", "", "yes"]


class FakeTree:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def ask(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        self.log.append(f"{self.name} {asked['method']} {asked['rows']} {len(asked['prompts'])}")
        return {"seconds": 1.0, "host_seconds_per_forward": None, "answers": [[1] * len(self.log)], "steps": 3}


def test_trees_take_turns_after_a_warm_up() -> None:
    log: list[str] = []
    old, new = FakeTree("old", log), FakeTree("new", log)
    found = list(compare(old, new, ["plain"], [1, 16], ["a", "b"], 8, rounds=1))  # type: ignore[arg-type]
    assert [each.split()[0] for each in log[:6]] == ["old", "new", "old", "new", "new", "old"]
    assert {each for each in log if " 16 " in each} == {"old plain 16 16", "new plain 16 16"}
    assert found[0]["ratio"] == pytest.approx((4 / 3 + 5 / 6) / 2) and len(found) == 2


def test_a_commit_is_checked_out_and_removed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    (tmp_path / "file").write_text("old")
    git("add", ".")
    git("commit", "--quiet", "-m", "old")
    (tmp_path / "file").write_text("new")
    with checked_out("HEAD", tmp_path) as folder:
        assert (folder / "file").read_text() == "old"
    assert not folder.exists() and len(git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
def test_this_tree_against_itself(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "checked_out", lambda commit: nullcontext(against.ROOT))
    monkeypatch.setattr(against, "CACHE", own_cache)  # whose libraries need not be compiled
    options = ["HEAD", "--methods", "plain,chain", "--rows", "2", "--rounds", "1", "--tokens", "6", "--threads", "1"]
    pair = ["--target", "bundled", "--drafter", "bundled"]
    assert against.main([*options, *pair, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "against.json").read_text())
    assert [one["method"] for one in found] == ["plain", "chain"] and all(one["identical"] for one in found)
    assert found[0]["old_host_microseconds"] > 0
    page = (tmp_path / "against.md").read_text()
    assert "native, compiled" in page and page.startswith("bundled, old")


@pytest.mark.slow
def test_what_does_not_run_compiled_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(against, "CACHE", tmp_path)
    with pytest.raises(PeerError, match="ended with 1"):
        child(against.ROOT, "native", 1, tmp_path / "log")
