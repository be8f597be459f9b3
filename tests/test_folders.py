"""One process at a time."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft import folders
from blockdraft.folders import held

HOLD = """
import sys, time
from pathlib import Path
from blockdraft.folders import held
with held(Path(sys.argv[1]), "training"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_told_who_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "drafter"
    environment = os.environ | {"PYTHONPATH": str(Path(folders.__file__).parents[1])}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        told = rf"{re.escape(str(folder))} is in use by process {holder.pid} on \S+, training since 20\d\d-"
        with pytest.raises(ValueError, match=told), held(folder, "testing"):
            pass
        with held(tmp_path / "build" / "other", "testing"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with (
        held(folder, "testing"),
        pytest.raises(ValueError, match=f"process {os.getpid()} .*, testing since"),
        held(folder, "again"),
    ):
        pass
    assert not list((tmp_path / "build").iterdir())


def test_a_lock_is_gone_before_another_process_may_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, release = list[list[Path]](), folders.FileLock.release
    monkeypatch.setattr(
        folders.FileLock, "release", lambda lock: [left.append(list(tmp_path.iterdir())), release(lock)]
    )
    with held(tmp_path / "out", "training"):
        assert list(tmp_path.iterdir())
    assert left[0] == []


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match="cannot be written .*choose another folder for --out"),
        held(tmp_path / "file" / "x", ""),
    ):
        pass
