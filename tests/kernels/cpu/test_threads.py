"""The number of threads is measured once, unless the user sets it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blockdraft.kernels.cpu import threads
from blockdraft.targets import load_target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty cache folder, on an idle machine of three cores without settings."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (1.0, 9.0, 9.0), raising=False)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "candidates", lambda: [1, 2, 3])
    yield tmp_path
    torch.set_num_threads(before)


def test_more_threads_must_pay() -> None:
    assert threads.fastest({1: 1.0, 2: 0.97, 4: 0.96}) == 1
    assert threads.fastest({1: 1.0, 2: 0.6, 4: 0.59}) == 2
    assert threads.fastest({1: 1.0, 2: 1.2, 4: 0.7}) == 4


def test_every_number_is_tried_and_the_threads_are_set(folder: Path) -> None:
    tried: list[int] = []

    def work() -> None:
        tried.append(torch.get_num_threads())
        time.sleep(0.002 * (4 - torch.get_num_threads()))

    threads.use_best_threads(work, ("a model",))
    assert set(tried) == {1, 2, 3} and torch.get_num_threads() == 3
    tried.clear()
    torch.set_num_threads(1)
    threads.use_best_threads(work, ("a model",))
    assert tried == [] and torch.get_num_threads() == 3  # known by now
    threads.use_best_threads(lambda: tried.append(0), ("another",))
    assert tried
    assert len(list((folder / "threads").iterdir())) == 2


def test_what_a_busy_machine_says_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (4.6, 0.0, 0.0), raising=False)
    tried: list[int] = []
    for _ in range(2):
        tried.clear()
        threads.use_best_threads(lambda: tried.append(0), ())
        assert tried and list(folder.iterdir()) == []


def test_a_spoilt_file_is_measured_again(folder: Path) -> None:
    threads.use_best_threads(lambda: None, ())
    [path] = (folder / "threads").iterdir()
    path.write_text("{")
    threads.use_best_threads(lambda: None, ())
    assert json.loads(path.read_text())["threads"] in (1, 2, 3)


def test_the_environment_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads.use_best_threads(lambda: pytest.fail("measured"), ())
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_targets_are_measured_unless_a_number_is_given(folder: Path, tiny_target_dir: Path) -> None:
    load_target(tiny_target_dir, device="cpu", compile="on", threads="auto")
    [path] = (folder / "threads").iterdir()
    assert torch.get_num_threads() == json.loads(path.read_text())["threads"]
    load_target(tiny_target_dir, device="cpu", threads=1)
    assert torch.get_num_threads() == 1
    for number in (0, 100_000):
        with pytest.raises(ValueError, match=f"threads must be from 1 to 1024, got {number}"):
            load_target(tiny_target_dir, device="cpu", threads=number)
        assert torch.get_num_threads() == 1
