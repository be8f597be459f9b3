"""Threads that processes of a training still have when they end."""

import inspect
import os
from pathlib import Path


def write_threads() -> None:
    """Write the names of this process's threads, as Linux has them, into the folder that `THREADS` names."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    Path(os.environ["THREADS"], str(os.getpid())).write_text("".join(names))


WRITER = f"""
import atexit, os
from pathlib import Path

{inspect.getsource(write_threads)}
atexit.register(write_threads)
"""


def writing_threads(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Environment in which each Python process writes, into `folder`, which threads it has at its end."""
    folder.mkdir()
    (folder / "code").mkdir()
    (folder / "code" / "sitecustomize.py").write_text(WRITER)
    (folder / "threads").mkdir()
    paths = os.pathsep.join((str(folder / "code"), environment["PYTHONPATH"]))
    return environment | {"PYTHONPATH": paths, "THREADS": str(folder / "threads")}


def assert_no_process_group(folder: Path, processes: int) -> None:
    """None of the processes had a thread of its process group left, which could abort it."""
    left = [path.read_text() for path in (folder / "threads").iterdir()]
    assert len(left) >= processes and not any("gloo" in names for names in left)
