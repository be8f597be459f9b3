"""Background thread that drafts ahead while another thread decodes."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from typing import TypeAlias
from weakref import WeakSet

from blockdraft.errors import describe

NAME = "blockdraft-ahead"

# Draft tokens and the model's probabilities of them, by the tokens between a sequence and the draft tokens.
Outcomes: TypeAlias = dict[tuple[int, ...], list[tuple[int, float]]]

log = logging.getLogger(__name__)


class Work:
    """Background drafting for the sequences of one state.

    Attributes:
        found: Length of each sequence when drafting began, and what was drafted. Read it only after `stop`.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, Outcomes]] = {}
        self._stop = Event()
        self._thread: Thread | None = None
        _works.add(self)

    def begin(self, draft: Callable[[Event], None]) -> None:
        """Call a function in a thread. It must return soon after its event is set. Errors are logged."""
        self._stop = Event()
        # A daemon thread does not keep the process from ending.
        thread = Thread(target=_logged, args=(partial(draft, self._stop),), name=NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or the process is exiting, which needs no warning
            if "shutdown" not in str(error):
                _log_failure(error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """Stop the thread after its current pass, and wait for it."""
        thread = self._thread
        if thread is not None:
            self._stop.set()
            thread.join()
            self._thread = None


def _logged(draft: Callable[[], None]) -> None:
    try:
        draft()
    except Exception as error:
        _log_failure(error)


def _log_failure(error: Exception) -> None:
    log.warning("Drafting ahead failed, and the next draft is made as usual: %s", describe(error))


_works: WeakSet[Work] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads before the process exits or forks.

    At exit, a thread inside a forward pass would crash. After a fork, the child would have the model's lock, but not
    the thread that releases it.
    """
    for work in list(_works):
        work.stop()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_stop_all)
