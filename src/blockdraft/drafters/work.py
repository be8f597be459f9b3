"""A thread beside the one that decodes, for what is drafted ahead."""

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

# By the tokens that follow the text a row had: guesses after them, with the model's probabilities.
Outcomes: TypeAlias = dict[tuple[int, ...], list[tuple[int, float]]]

log = logging.getLogger(__name__)


class Work:
    """What is drafted ahead for the rows of one store, in a thread that ends with it.

    Attributes:
        found: By row, how long its text was, and what was drafted. To be read when the work has stopped.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, Outcomes]] = {}
        self._stop = Event()
        self._thread: Thread | None = None
        _works.add(self)

    def begin(self, draft: Callable[[Event], None]) -> None:
        """Call this in a thread; it is to end soon after the event is set. What goes wrong in it is logged."""
        self._stop = Event()
        # A thread that is no daemon would keep a process that ends waiting.
        thread = Thread(target=_logged, args=(partial(draft, self._stop),), name=NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many, or the process ends, which is no news
            if "shutdown" not in str(error):
                _tell(error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """Let the thread end after its present pass, and wait for that."""
        thread = self._thread
        if thread is not None:
            self._stop.set()
            thread.join()
            self._thread = None


def _logged(draft: Callable[[], None]) -> None:
    try:
        draft()
    except Exception as error:
        _tell(error)


def _tell(error: Exception) -> None:
    log.warning("Drafting ahead failed, and the next draft is made as usual: %s", describe(error))


_works: WeakSet[Work] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Before a process ends, since a thread inside of a forward would not survive it, or is forked: the child has no
    thread that would end its pass and give back the model's lock."""
    for work in list(_works):
        work.stop()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_stop_all)
