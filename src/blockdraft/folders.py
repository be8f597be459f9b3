"""Lock on folders that only one process at a time may write."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from blockdraft.errors import UsageError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # full disk, exceeded quota, file beyond the largest size


@contextmanager
def held(folder: Path, doing: str) -> Iterator[None]:
    """Context in which no other process may write a folder, which need not exist yet. The operating system ends the
    lock when this process ends, however it ends.

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
