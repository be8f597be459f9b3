"""Pools of threads for the compiled kernels (`pool.h`).

A pool serves one call at a time, so concurrent calls have a pool each. Idle pools are kept for the next call: their
threads sleep after a millisecond.
"""

from __future__ import annotations

import atexit
import ctypes
import os

import psutil


class Pool:
    """Threads that share the work of a call.

    Args:
        library: Library of the kernels.
        threads: Number of threads, the caller included.

    Attributes:
        address: Address of the pool in C; None if its threads cannot be started, and the caller works alone.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads, self._library = threads, library
        library.pool_new.argtypes, library.pool_new.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_void_p
        library.pool_free.argtypes, library.pool_free.restype = (ctypes.c_void_p,), None
        self.address: int | None = library.pool_new(threads, threads <= allowed_cores())

    def close(self) -> None:
        """End the threads."""
        self._library.pool_free(self.address)


_idle: list[Pool] = []


def borrow_pool(library: ctypes.CDLL, threads: int) -> Pool:
    """Return an idle pool of this many threads, or a new one. Idle pools of other sizes are closed."""
    while _idle:
        try:
            pool = _idle.pop()
        except IndexError:  # another thread was faster
            break
        if pool.threads == threads:
            return pool
        pool.close()
    return Pool(library, threads)


def return_pool(pool: Pool) -> None:
    """Keep a pool for the next call."""
    _idle.append(pool)


def allowed_cores() -> int:
    """Return the number of logical cores that this process may use."""
    if hasattr(psutil.Process, "cpu_affinity"):
        return len(psutil.Process().cpu_affinity())
    return os.cpu_count() or 1


def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


atexit.register(_close_idle)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)  # threads stay in the parent process
