"""What holds for all tests, and the fixtures that all of them may use."""

import errno
import gc
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

with suppress(ImportError):
    import setuptools  # noqa: F401  before distutils, which it replaces and torch.compile imports

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
# What tests measure and learn is none of what the user's own runs begin with; compiled libraries are kept for the next.
OWN_CACHE = Path(__file__).parent / "build/tests-cache"
os.environ.setdefault("BLOCKDRAFT_CACHE", str(OWN_CACHE))
if "PYTEST_XDIST_WORKER" not in os.environ and os.environ["BLOCKDRAFT_CACHE"] == str(OWN_CACHE):
    shutil.rmtree(OWN_CACHE / "costs", ignore_errors=True)

sys.path.insert(0, str(Path(__file__).parent / "tests"))


def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures, except where tests are only handed out to workers, which would wait for torch."""
    gc.disable()  # what is imported and collected stays; looking through it again and again takes a quarter of the time
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        for name in ("tiny_models", "command_line", "installed_plugin"):
            config.pluginmanager.import_plugin(name)


def pytest_collection_finish() -> None:
    """Exempt what stays from later collections of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets constants of a module, such as sizes and times, until the test ends."""

    def set_constants(module: ModuleType | str, **values: Any) -> None:
        module = import_module(module) if isinstance(module, str) else module
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    return set_constants


@pytest.fixture
def free_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that pretends how many bytes of every disk are free."""

    def pretend(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2 * free, used=free, free=free))

    return pretend


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], AbstractContextManager[None]]:
    """Return a context manager, within which the disk is full for files whose names contain a text."""
    write = Path.write_bytes

    @contextmanager
    def fill(part: str = "") -> Iterator[None]:
        def write_half(path: Path, content: bytes) -> int:
            if part not in path.name:
                return write(path, content)
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", write_half)
            yield

    return fill


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets what is typed."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that pretends how many bytes of this machine's memory are free."""

    def pretend(free: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * free, available=free))

    return pretend


@pytest.fixture
def set_processor_flags(tmp_path: Path, constants: Callable[..., None]) -> Callable[[Collection[str]], None]:
    """Return a function that sets the flags that this machine lists for its processors."""

    def pretend(flags: Collection[str]) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(f"flags : {' '.join(sorted(flags))}\n")
        constants("blockdraft.machine", CPUINFO=file)

    return pretend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose one number `time.perf_counter` returns until the test ends."""
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


@pytest.fixture
def other_work(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """Return how many cores other programs seem to use: none, until the test says otherwise. Each step is checked."""
    from blockdraft.machine import OtherWork

    load: dict[str, float | None] = {"cores": None}
    measured = {"seconds": property(lambda self: 1.0), "disturbing_cores": lambda self: load["cores"]}
    for name, figure in measured.items():
        monkeypatch.setattr(OtherWork, name, figure)
    return load
