"""Folders and files that appear whole or not at all, and folders that only one process at a time may write."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from blockdraft.errors import UsageError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # full disk, exceeded quota, file beyond the largest size


@contextmanager
def held(folder: Path, doing: str, option: str = "--out") -> Iterator[None]:
    """Context in which no other process may write a folder, which need not exist yet.

    The operating system ends the lock when this process ends, however it ends.

    Args:
        doing: Activity of this process, such as "converting", for the message that another process gets.
        option: Option that names the folder, for the same message.

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
            f"{folder} is in use by {holder}; wait for it, end it, or choose another folder for {option}."
        ) from None
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror}); choose another folder for {option}."
        ) from error
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


def write_file(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that it appears whole or not at all.

    Raises UsageError if it cannot be written, for instance because the disk is full.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); what was finished before it stays.") from error
    finally:
        partial.unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Raise UsageError unless a folder is empty or absent. Remains of a killed `write_file` do not count."""
    if folder.exists() and (not folder.is_dir() or any(path.suffix != ".tmp" for path in folder.iterdir())):
        raise UsageError(f"{folder} holds other files; choose another folder for --out.")


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raise UsageError, which names the option, unless a folder can be written to or made. Nothing is made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "may not be written to" if existing.is_dir() else "is no folder"
        raise UsageError(f"{folder} cannot be written to, since {existing} {why}; choose another {option}.")


def check_overwrite(folder: Path, names: Iterable[str], overwrite: bool) -> None:
    """Raise UsageError unless these files can be written to a folder, or replaced with `overwrite`. Nothing is made."""
    check_writable(folder)
    for name in names:
        if (folder / name).exists() and not overwrite:
            raise UsageError(f"{folder / name} exists; choose another folder, or add --overwrite.")


def make_folder(folder: Path) -> None:
    """Make a folder, or clear an existing one of the remains of killed calls of `write_file`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(".*.tmp"):
            path.unlink()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}); choose another --out.") from error


def fingerprint(value: Any) -> str:
    """Return the fingerprint, 16 hexadecimal digits, of a value that can be written as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
