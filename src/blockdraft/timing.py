"""Where the time of cycles goes: marks between the parts of a cycle, to which nobody listens unless asked to.

The code of a cycle calls `mark` with the name of a part where that part ends. The marks stay in the code: one that
nobody listens to costs a tenth of a microsecond, and a cycle has about ten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# In the order of a cycle. What a drafter does not mark itself counts as its choice of guesses.
PASS, HEAD, GUESSES = "draft pass", "draft head", "guesses"
FORWARD, VERIFICATION, COMMIT = "target forward", "verification", "commit"
CONTEXT, OBSERVE, BOOKKEEPING = "draft context", "observe", "bookkeeping"
PARTS = (PASS, HEAD, GUESSES, FORWARD, VERIFICATION, COMMIT, CONTEXT, OBSERVE, BOOKKEEPING)
NETWORKS = {PASS, HEAD, FORWARD, CONTEXT}  # the rest is the host's

_listener: Callable[[str | None], None] | None = None


def mark(part: str | None) -> None:
    """Say that what was done since the last mark was this part of a cycle; None: that it was no part of any."""
    if _listener is not None:
        _listener(part)


@contextmanager
def unheard() -> Iterator[None]:
    """Around what is no part of any cycle, whatever marks it may come by."""
    global _listener
    listener, _listener = _listener, None
    try:
        yield
    finally:
        _listener = listener
        mark(None)


@contextmanager
def listening(wait: Callable[[], object] = lambda: None) -> Iterator[dict[str, float]]:
    """Listen to the marks of everything that runs meanwhile in this process.

    Args:
        wait: Called before the clock is read; for a GPU it has to wait until the work given to it is done.

    Yields:
        Seconds by part, in the order of `PARTS`, to be read when it is over.
    """
    global _listener
    assert _listener is None, "one listens at a time"
    seconds, last = dict.fromkeys(PARTS, 0.0), time.perf_counter()

    def listen(part: str | None) -> None:
        nonlocal last
        wait()
        now = time.perf_counter()
        if part is not None:
            seconds[part] += now - last
        last = now

    _listener = listen
    try:
        yield seconds
    finally:
        _listener = None
