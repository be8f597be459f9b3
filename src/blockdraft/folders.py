"""Folders that only one process at a time may write, and that appear whole or not at all."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from blockdraft.errors import UsageError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # full disk, exceeded quota, file beyond the largest size


@contextmanager
def held(folder: Path, doing: str) -> Iterator[None]:
    """Context in which no other process may write a folder, which need not exist yet.

    The operating system ends the lock when this process ends, however it ends.

    Args:
        doing: Activity of this process, such as "converting", for the message that another process gets.

    Raises:
        UsageError: Another process holds the folder, or nothing can be written beside it.
    """
    folder = folder.absolute()
    path, owner = (folder.with_name(f".{folder.name}.{kind}") for kind in ("lock", "owner"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=0)
        lock.acquire()
        owner.write_text(
            f"process {os.getpid()} on {socket.gethostname()}, {doing} since {time.strftime('%Y-%m-%d %H:%M:%S')}",
            encoding="utf-8",
        )
    except Timeout:
        holder = "another process"
        with suppress(OSError):  # the other process may be ending
            holder = owner.read_text(encoding="utf-8") or holder
        raise UsageError(
            f"{folder} is in use by {holder}; wait for it, end it, or choose another folder for --out."
        ) from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); choose another folder for --out.") from error
    try:
        yield
    finally:
        owner.unlink(missing_ok=True)
        path.unlink(missing_ok=True)  # before the release, since it would be another process's lock afterwards
        lock.release()


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Context with a new folder, which takes the place of `path` at the end, whether that exists or not.

    After an error the new folder is deleted, and `path` is as it was. `clear_remains` tidies up after a process that
    was killed.
    """
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        yield new
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        finally:
            if old.exists() and not path.exists():
                old.rename(path)


def clear_remains(path: str | Path) -> None:
    """Delete what a killed process left in `replaced` beside this folder. No process may be writing the folder now."""
    path = Path(path).resolve()
    for scratch in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with suppress(FileNotFoundError):  # a file of another process that tests its write access, deleted meanwhile
            if not scratch.is_dir() or {entry.name for entry in scratch.iterdir()} - {"new", "old"}:
                continue
            if (scratch / "old").exists() and not path.exists():
                (scratch / "old").rename(path)
            shutil.rmtree(scratch)
