"""Times the parts of a step, and reports what takes long.

Each step has one timer. The engine and drafters call `mark` with the name of a part where that part ends. A mark
outside of any step is ignored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

# Parts in the order of a step. Time that a drafter does not mark counts as its choice of draft tokens.
PASS, HEAD, DRAFT_CHOICE = "draft pass", "draft head", "draft choice"
FORWARD, VERIFICATION, COMMIT = "target forward", "verification", "commit"
CONTEXT, OBSERVE, BOOKKEEPING = "draft context", "observe", "bookkeeping"
PARTS = (PASS, HEAD, DRAFT_CHOICE, FORWARD, VERIFICATION, COMMIT, CONTEXT, OBSERVE, BOOKKEEPING)
DRAFTING = (PASS, HEAD, DRAFT_CHOICE, CONTEXT, OBSERVE)
NETWORKS = {PASS, HEAD, FORWARD, CONTEXT}  # the rest is host time
TELL_SECONDS = 10.0  # between reports on what takes long


@contextmanager
def telling(note: Callable[[str], None], what: str | Callable[[], str], at_once: bool = True) -> Iterator[None]:
    """Report what goes on in this context every `TELL_SECONDS`, and, if `at_once`, at its beginning."""
    text = what if callable(what) else lambda: what
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(TELL_SECONDS):
            note(f"{text()} ... ({time.monotonic() - began:.0f} s)")

    if at_once:
        note(f"{text()} ...")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class StepTimer:
    """Timer and context manager of one step.

    Attributes:
        seconds: Seconds of the marked parts.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._listener = _listener
        self._wait = None if _listener is None else _listener.wait
        self._began = self._last = time.perf_counter()

    def __enter__(self) -> StepTimer:
        _thread.timer = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _thread.timer = None
        if self._listener is not None and kind is None:
            for part, seconds in self.seconds.items():
                self._listener.seconds[part] += seconds

    def mark(self, part: str) -> None:
        """Count the time since the last mark to this part."""
        if self._wait is not None:
            self._wait()
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the beginning of the step to the last mark."""
        return self._last - self._began

    def of(self, parts: Iterable[str]) -> float:
        return sum([self.seconds[part] for part in parts])


class _Listener:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.seconds = dict.fromkeys(PARTS, 0.0)


class _Thread(threading.local):
    timer: StepTimer | None = None  # present step of this thread


_thread = _Thread()
_listener: _Listener | None = None


def mark(part: str) -> None:
    """Count the time of this thread since the last mark to this part of its step."""
    timer = _thread.timer
    if timer is not None:
        timer.mark(part)


@contextmanager
def listening(wait: Callable[[], object] = lambda: None) -> Iterator[dict[str, float]]:
    """Add up all steps that begin and end inside this context, in any thread.

    Args:
        wait: Called before the clock is read. For a GPU it must wait until the GPU's work is done.

    Yields:
        Seconds by part, in the order of `PARTS`, complete at the end of the context.
    """
    global _listener
    assert _listener is None, "only one listener at a time"
    _listener = _Listener(wait)
    try:
        yield _listener.seconds
    finally:
        _listener = None
