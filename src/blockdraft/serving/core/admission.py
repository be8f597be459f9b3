"""Who may come in: a bounded number of requests, and none once the server is told to end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from blockdraft.serving.core.errors import ApiError

WEIGHT = 0.1  # of the newest request in the mean of how long they take
LONGEST_WAIT = 60  # seconds that a client is told to wait at most
MOST_SCORES = 2**22  # log-probabilities of prompts' tokens that are held at a time; each takes some hundred bytes


class Admission:
    """Counts the requests that there are.

    Args:
        rows: Requests that are decoded together.
        places: Most requests, waiting ones included.

    Attributes:
        active: Requests that there are.
        draining: Whether the server is about to end.
    """

    def __init__(self, rows: int, places: int) -> None:
        self._rows, self._places = rows, places
        self._seconds = 1.0  # that a request takes, a running mean
        self._scores = 0
        self.active = 0
        self.draining = False

    @property
    def waiting(self) -> int:
        """Requests that have no row yet, if memory suffices for all rows."""
        return max(0, self.active - self._rows)

    def check(self, count: int) -> None:
        """Whether there may ever be so many requests at a time.

        Raises:
            ApiError: There may not.
        """
        if count > self._places:
            raise ApiError(
                400, f"The request asks for {count} answers, and there is room for {self._places}; ask for fewer."
            )

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Have so many places inside.

        Raises:
            ApiError: There are never so many, not now, or the server is about to end.
        """
        if self.draining:
            raise ApiError(503, "The server is shutting down; ask again later.", headers={"Retry-After": "5"})
        self.check(count)
        if self.active + count > self._places:
            wait = min(LONGEST_WAIT, math.ceil(self._seconds * (1 + self.waiting / self._rows)))
            raise _full(
                f"{self.active} requests are running or waiting, and there is room for {self._places}; ask again in "
                f"{wait} s.",
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
        """Have room for so many log-probabilities of a prompt inside.

        Raises:
            ApiError: There is never so much, or not now.
        """
        if count > MOST_SCORES:
            raise ApiError(
                400,
                f"logprobs is for {count} numbers of the prompt's tokens, and there is room for {MOST_SCORES}; ask for "
                f"fewer likely tokens, or send a shorter prompt.",
                param="logprobs",
            )
        if self._scores + count > MOST_SCORES:
            raise _full(
                f"The log-probabilities of all prompts would be more than {MOST_SCORES} numbers; ask for fewer, or for "
                f"fewer prompts at a time, or again in {LONGEST_WAIT} s.",
                LONGEST_WAIT,
            )
        self._scores += count
        try:
            yield
        finally:
            self._scores -= count


def _full(message: str, wait: int) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait)})
