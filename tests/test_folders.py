"""One process at a time."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft import folders
from blockdraft.folders import clear_remains, held, replaced

HOLD = """
import sys, time
from pathlib import Path
from blockdraft.folders import held
with held(Path(sys.argv[1]), "training"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_learns_who_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "drafter"
    environment = os.environ | {"PYTHONPATH": str(Path(folders.__file__).parents[1])}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        message = rf"{re.escape(str(folder))} is in use by process {holder.pid} on \S+, training since 20\d\d-"
        with pytest.raises(ValueError, match=message), held(folder, "testing"):
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


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match="cannot be written .*choose another folder for --out"),
        held(tmp_path / "file" / "x", ""),
    ):
        pass


def test_remains_go_and_what_they_replaced_comes_back(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / ".drafter.x" / name).mkdir(parents=True)
    (tmp_path / ".drafter.mine").mkdir()
    (tmp_path / ".drafter.mine" / "notes").touch()
    clear_remains(tmp_path / "drafter")
    assert {path.name for path in tmp_path.iterdir()} == {"drafter", ".drafter.mine"}


def test_files_deleted_by_another_process_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def late(path: Path) -> None:
        remove(path)
        remove(path)

    for name in "ab":
        (tmp_path / f".drafter.{name}").mkdir()
    monkeypatch.setattr(shutil, "rmtree", late)
    clear_remains(tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [True, False])
def test_a_replaced_folder_appears_whole_or_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    folder = tmp_path / "drafter"
    if exists:
        folder.mkdir()
        (folder / "old").touch()
    rename = Path.rename

    def fail(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise OSError("no more")
        return rename(path, to)

    for patched in (False, True):
        with pytest.raises(OSError, match="no more"), monkeypatch.context() as patch, replaced(folder) as new:
            (new / "file").touch()
            if not patched:
                raise OSError("no more")
            patch.setattr(Path, "rename", fail)
        assert [file.name for file in tmp_path.rglob("*")] == (["drafter", "old"] if exists else [])
    with replaced(folder) as new:
        (new / "file").touch()
        assert not (folder / "file").exists()
    assert [file.name for file in tmp_path.rglob("*")] == ["drafter", "file"]
