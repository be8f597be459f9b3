"""Files that blockdraft keeps on this machine, each in a folder of `cache_folder()` for its kind.

A file appears whole or not at all, is found by a key of the facts that decide its content, and is deleted when others
need its place and it was unused for longest.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

PARTIAL = ".partial"  # suffix of files and folders that are being written
PARTIAL_SECONDS = 86_400.0  # age after which one is abandoned


def key_of(*facts: object) -> str:
    """Return 16 hexadecimal digits for these facts, of which those that JSON lacks count as their `repr`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:16]


@cache
def code_key(*places: str) -> str:
    """Return a key of the source files below these folders of the package, and of its version.

    A file whose content depends on this code has it among its facts.
    """
    package, digest = Path(__file__).parent, hashlib.sha256(version("blockdraft").encode())
    for place in places:
        for path in sorted(path for kind in ("py", "h", "c") for path in (package / place).rglob(f"*.{kind}")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Context with a new file that only this user may read, and that takes the place of `path` at the end.

    It is deleted after an error.

    Raises:
        OSError: The folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f"{path.stem}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def touch(path: Path) -> None:
    """Note that a file was used. The folder may be read-only."""
    with suppress(OSError):
        os.utime(path)


def is_partial(path: Path) -> bool:
    """Return whether a file is, or lies in, one that is being written."""
    return any(part.endswith(PARTIAL) for part in path.parts)


def delete_abandoned(folder: Path, beginning: str = "", seconds: float = PARTIAL_SECONDS) -> None:
    """Delete what processes left in a folder that were ended while they wrote.

    Args:
        beginning: That of the names of the files.
        seconds: Age after which a file is abandoned.
    """
    for path in folder.glob(f"{beginning}*{PARTIAL}"):
        with suppress(OSError):  # another process has deleted it
            if time.time() - path.stat().st_mtime >= seconds:
                path.unlink()


def least_used(folder: Path, pattern: str, limit: int, keep: Collection[Path] = ()) -> Iterator[Path]:
    """Yield the least recently used files to delete, until the others take at most `limit` bytes.

    Args:
        pattern: Pattern of the names of all files that count.
        keep: Files that are in use.
    """
    files = {}
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process has deleted it
            files[path] = path.stat()
    total = sum(status.st_size for status in files.values())
    for path in sorted(files.keys() - set(keep), key=lambda path: files[path].st_mtime):
        if total <= limit:
            return
        yield path
        total -= files[path].st_size
