"""The number of threads is measured once, while nothing else runs, unless the user sets it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blockdraft.kernels.cpu import threads
from blockdraft.machine import OtherWork
from blockdraft.targets import load_target


@pytest.fixture
def folder(
    tmp_path: Path, other_work: object, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> Iterator[Path]:
    """Return an empty cache folder, on a machine of three cores without settings."""
    before = torch.get_num_threads()
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    constants(threads, MIN_SECONDS=0.0)
    yield tmp_path
    torch.set_num_threads(before)


def work() -> None:
    """Take 6 ms with one thread, 4 ms with two and 2 ms with three."""
    time.sleep(0.002 * (4 - torch.get_num_threads()))


def test_of_nearly_equal_numbers_the_largest_is_taken() -> None:
    assert threads.fastest({1: 0.3289, 2: 0.3306}) == 2
    assert threads.fastest({1: 1.0, 2: 0.6, 4: 0.59}) == 4
    assert threads.fastest({1: 1.0, 2: 0.5, 4: 0.7}) == 2


def test_every_number_is_tried_and_the_threads_are_set(folder: Path) -> None:
    tried: list[int] = []

    def noted() -> None:
        tried.append(torch.get_num_threads())
        work()

    threads.use_best_threads(noted, ("a model",))
    assert set(tried) == {1, 2, 3} and torch.get_num_threads() == 3
    assert str(threads.thread_choice()).startswith("3 of 3 cores, measured now: ")
    tried.clear()
    torch.set_num_threads(1)
    threads.use_best_threads(noted, ("a model",))
    assert tried == [] and torch.get_num_threads() == 3  # known by now
    assert threads.thread_choice().reason.startswith("measured earlier: ")
    threads.use_best_threads(noted, ("another",))
    assert tried
    assert len(list((folder / "threads").iterdir())) == 2


def test_a_few_slow_rounds_do_not_decide(folder: Path) -> None:
    """The least of several rounds counts: other programs only ever make a round slower."""
    rounds: list[int] = []

    def disturbed() -> None:
        rounds.append(0)
        work()
        if len(rounds) > 12 and torch.get_num_threads() > 1:
            time.sleep(0.02)

    threads.use_best_threads(disturbed, ())
    assert torch.get_num_threads() == 3


def test_what_is_measured_beside_other_programs_is_not_stored(
    folder: Path, other_work: dict[str, float | None]
) -> None:
    other_work["cores"] = 1.5
    for _ in range(2):
        threads.use_best_threads(lambda: time.sleep(0.002 * torch.get_num_threads()), ())
        assert torch.get_num_threads() == 3 and list(folder.iterdir()) == []
        assert "since other programs used 1.5 cores" in threads.thread_choice().reason
    other_work["cores"] = None
    threads.use_best_threads(lambda: time.sleep(0.002 * torch.get_num_threads()), ())
    assert torch.get_num_threads() == 1 and len(list((folder / "threads").iterdir())) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"least_seconds": {"1": 0.1}}'])
def test_an_invalid_file_is_measured_again(folder: Path, content: str) -> None:
    threads.use_best_threads(work, ())
    [path] = (folder / "threads").iterdir()
    path.write_text(content)
    threads.use_best_threads(work, ())
    assert list(json.loads(path.read_text())["least_seconds"]) == ["1", "2", "3"]


def test_a_folder_that_cannot_be_written_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "threads").write_text("no folder")
    threads.use_best_threads(work, ())
    assert torch.get_num_threads() == 3 and str(folder / "threads") in caplog.text


def test_the_environment_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads.use_best_threads(lambda: pytest.fail("measured"), ())
    assert list(folder.iterdir()) == []
    torch.set_num_threads(2)
    assert threads.thread_choice() == (2, "OMP_NUM_THREADS")


@pytest.mark.slow
def test_targets_are_measured_unless_a_number_is_given(folder: Path, tiny_target_dir: Path) -> None:
    load_target(tiny_target_dir, device="cpu", compile="on", threads="auto")
    assert len(list((folder / "threads").iterdir())) == 1
    assert threads.thread_choice().reason.startswith("measured now: ")
    load_target(tiny_target_dir, device="cpu", threads=1)
    assert torch.get_num_threads() == 1 and threads.thread_choice().reason == "as requested"
    for number in (0, 100_000):
        with pytest.raises(ValueError, match=f"threads must be from 1 to 1024, got {number}"):
            load_target(tiny_target_dir, device="cpu", threads=number)
        assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_work_of_other_programs_is_seen_and_own_work_is_not() -> None:
    """Compares the same second with and without a busy child process, so that other load cancels out."""

    def used(seconds: float = 0.6) -> float:
        others, until = OtherWork(), time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        return others.disturbing_cores() or 0.0

    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)  # its start
        beside = used()
    finally:
        child.kill()
        child.wait()
    assert beside > 0.3
