"""`blockdraft cache` on folders made up for it, and the kinds against those who write them."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockdraft import cli
from blockdraft.cpu import weight_cache
from blockdraft.cpu.build import Build
from blockdraft.drafters import load_drafter
from blockdraft.engine.adaptive import stored_costs
from blockdraft.machine import CACHED
from blockdraft.targets import load_target

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    for name, content in (("costs/a.json", "12"), ("costs/b.json", "345"), ("libraries/c.so", "6" * 3 * 2**20)):
        file = tmp_path / "cache" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "cache" / "thesis.tex").write_text("mine")
    return tmp_path / "cache"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def blockdraft_cache(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["blockdraft", "cache", *args])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return (int(exit_info.value.code or 0), *capsys.readouterr())

    return blockdraft_cache


def test_list(cache: Path, run: Run) -> None:
    code, out, err = run("list")
    assert (code, err, out.splitlines()[0]) == (0, "", str(cache))
    lines = [line.split() for line in out.splitlines()]
    assert any(line[:4] == ["costs", "2", "0.0", "KiB"] for line in lines)
    assert any(line[:4] == ["libraries", "1", "3.0", "MiB"] for line in lines)
    found = json.loads(run("list", "--json")[1])
    newest = (cache / "costs" / "b.json").stat().st_mtime
    assert found["folder"] == str(cache) and list(found["kinds"]) == list(CACHED)
    assert found["kinds"]["costs"] == {"files": 2, "bytes": 5, "newest": pytest.approx(newest, abs=60)}
    assert found["kinds"]["threads"] == {"files": 0, "bytes": 0, "newest": None}


def test_clear_takes_what_is_named_or_all_and_nothing_else(cache: Path, run: Run) -> None:
    code, out, err = run("clear", "costs")
    assert (code, out, err) == (0, "costs: 2 files, 0.0 KiB deleted\n", "")
    assert not any((cache / "costs").iterdir()) and (cache / "libraries" / "c.so").exists()
    assert run("clear")[0] == 0
    assert [path for path in cache.rglob("*") if path.is_file()] == [cache / "thesis.tex"]
    code, out, err = run("clear", "cost")
    assert (code, out) == (
        2,
        "",
    ) and err == "error: kind is 'cost'; it must be one of libraries, weights, costs, threads.\n"


def test_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "none"))
    assert run("list")[0] == run("clear")[0] == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_what_is_kept_is_of_a_known_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 1)
    threads = torch.get_num_threads()
    library = Build(torch.float32, torch.float32).library()
    target = load_target(tiny_target_dir, device="cpu", threads="auto")
    torch.set_num_threads(threads)
    stored_costs.store(
        stored_costs.path(target, load_drafter("none", target=target)), stored_costs.Costs((1,), (1.0,), ((),), ((),))
    )
    kinds = {path.name for path in tmp_path.iterdir()}
    assert kinds <= set(CACHED)
    assert kinds == set(CACHED) or library is None  # without a compiler there are no libraries to count threads for


def test_what_another_process_may_still_be_writing_is_left_alone(cache: Path, run: Run) -> None:
    for name in ("costs/new.partial", "costs/old.partial"):
        (cache / name).write_text("half")
    os.utime(cache / "costs/old.partial", (0, 0))
    assert run("clear", "costs")[0] == 0
    assert [file.name for file in (cache / "costs").iterdir()] == ["new.partial"]
