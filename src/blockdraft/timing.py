"""Where the time of cycles goes: one timer a cycle, read at the marks between its parts.

The code of a cycle calls `mark` with the name of a part where that part ends, in the engine and in drafters alike. A
mark outside of any cycle says nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

# In the order of a cycle. What a drafter does not mark itself counts as its choice of guesses.
PASS, HEAD, GUESSES = "draft pass", "draft head", "guesses"
FORWARD, VERIFICATION, COMMIT = "target forward", "verification", "commit"
CONTEXT, OBSERVE, BOOKKEEPING = "draft context", "observe", "bookkeeping"
PARTS = (PASS, HEAD, GUESSES, FORWARD, VERIFICATION, COMMIT, CONTEXT, OBSERVE, BOOKKEEPING)
DRAFTING = (PASS, HEAD, GUESSES, CONTEXT, OBSERVE)
NETWORKS = {PASS, HEAD, FORWARD, CONTEXT}  # the rest is the host's


class Cycle:
    """The timer of one cycle, around which it is a context manager.

    Attributes:
        seconds: By part, of those that were marked.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._listener = _listener
        self._wait = None if _listener is None else _listener.wait
        self._began = self._last = time.perf_counter()

    def __enter__(self) -> Cycle:
        _thread.cycle = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _thread.cycle = None
        if self._listener is not None and kind is None:
            for part, seconds in self.seconds.items():
                self._listener.seconds[part] += seconds

    def mark(self, part: str) -> None:
        """As the function `mark`, for who has the timer at hand."""
        if self._wait is not None:
            self._wait()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from its beginning to the last mark."""
        return self._last - self._began

    def of(self, parts: Iterable[str]) -> float:
        return sum([self.seconds.get(part, 0.0) for part in parts])


class _Listener:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.seconds = dict.fromkeys(PARTS, 0.0)


class _Thread(threading.local):
    cycle: Cycle | None = None  # that this thread is in


_thread = _Thread()
_listener: _Listener | None = None


def mark(part: str) -> None:
    """Say that what this thread did since the last mark was this part of its cycle."""
    cycle = _thread.cycle
    if cycle is not None:
        cycle.mark(part)


@contextmanager
def listening(wait: Callable[[], object] = lambda: None) -> Iterator[dict[str, float]]:
    """Add up the cycles of all threads that begin meanwhile and come to their end.

    Args:
        wait: Called before the clock is read; for a GPU it has to wait until the work given to it is done.

    Yields:
        Seconds by part, in the order of `PARTS`, to be read when it is over.
    """
    global _listener
    assert _listener is None, "one listens at a time"
    _listener = _Listener(wait)
    try:
        yield _listener.seconds
    finally:
        _listener = None
