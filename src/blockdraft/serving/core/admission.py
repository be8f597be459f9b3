"""Limits on the requests at a time; none is admitted once the server is about to end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from blockdraft.serving.core.errors import ApiError

WEIGHT = 0.1  # weight of the newest request in the running mean of seconds
LONGEST_WAIT = 60  # seconds; the most that a refused client is told to wait
MOST_SCORES = 2**22  # most log-probabilities of prompt tokens held at a time; each takes some hundred bytes


class Admission:
    """Counts the requests in the server, and refuses those beyond the limit.

    Args:
        rows: Most requests that are decoded together.
        places: Most requests at a time, waiting ones included.

    Attributes:
        active: Requests now running or waiting.
        draining: Whether the server is about to end.
    """

    def __init__(self, rows: int, places: int) -> None:
        self._rows, self._places = rows, places
        self._seconds = 1.0  # running mean of the time of a request
        self._scores = 0
        self.active = 0
        self.draining = False

    @property
    def waiting(self) -> int:
        """Requests without a row, provided that memory suffices for all rows."""
        return max(0, self.active - self._rows)

    def check(self, count: int) -> None:
        """Check that a request for `count` answers can ever be admitted.

        Raises:
            ApiError: `count` exceeds the number of places.
        """
        if count > self._places:
            raise ApiError(
                400, f"The request asks for {count} answers, and the server has room for {self._places}; ask for fewer."
            )

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places while the context lasts.

        Raises:
            ApiError: `count` exceeds the number of places (400) or of free ones (429), or the server is about to
                end (503).
        """
        if self.draining:
            raise ApiError(503, "The server is shutting down; ask again later.", headers={"Retry-After": "5"})
        self.check(count)
        if self.active + count > self._places:
            wait = min(LONGEST_WAIT, math.ceil(self._seconds * (1 + self.waiting / self._rows)))
            raise _full(
                f"{self.active} requests are running or waiting, and the server has room for {self._places}; ask again "
                f"in {wait} s.",
                wait,
            )
        self.active += count
        began = time.monotonic()
        try:
            yield
        finally:
            self.active -= count
            self._seconds += WEIGHT * (time.monotonic() - began - self._seconds)

    @contextmanager
    def scores(self, count: int) -> Iterator[None]:
        """Hold room for `count` log-probabilities of a prompt while the context lasts.

        Raises:
            ApiError: `count` exceeds `MOST_SCORES` (400), or what other requests leave of it (429).
        """
        if count > MOST_SCORES:
            raise ApiError(
                400,
                f"logprobs asks for {count} log-probabilities of prompt tokens, and the limit is {MOST_SCORES}; lower "
                f"logprobs, or send a shorter prompt.",
                param="logprobs",
            )
        if self._scores + count > MOST_SCORES:
            raise _full(
                f"The log-probabilities of all prompts at this time would exceed {MOST_SCORES}; lower logprobs, send "
                f"fewer prompts at a time, or ask again in {LONGEST_WAIT} s.",
                LONGEST_WAIT,
            )
        self._scores += count
        try:
            yield
        finally:
            self._scores -= count


def _full(message: str, wait: int) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait)})
