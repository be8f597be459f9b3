"""Limits on the choices in the server at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from blockdraft.serving.errors import ApiError

MEAN_WEIGHT = 0.1  # weight of the newest request in the running mean of seconds
MAX_RETRY_SECONDS = 60
MAX_PROMPT_LOGPROBS = 2**22  # held by all requests together; each takes some hundred bytes


class Admission:
    """Counts the choices in the server and refuses those beyond its limits.

    Args:
        batch_size: Maximum choices that are decoded together.
        places: Maximum choices at a time, waiting ones included.

    Attributes:
        active: Choices that run or wait.
        draining: Whether the server is about to end.
    """

    def __init__(self, batch_size: int, places: int) -> None:
        self._batch_size, self._places = batch_size, places
        self._mean_seconds = 1.0
        self._prompt_logprobs = 0
        self.active = 0
        self.draining = False

    @property
    def waiting(self) -> int:
        """Choices without a place in the batch, if memory suffices for a whole batch."""
        return max(0, self.active - self._batch_size)

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places while the context lasts.

        Raises:
            ApiError: `count` exceeds the number of places (400) or of free ones (429), or the server is about to end
                (503).
        """
        if self.draining:
            raise ApiError(503, "The server is shutting down; try again later.", headers={"Retry-After": "5"})
        if count > self._places:
            raise ApiError(
                400, f"The request asks for {count} choices, and the server has room for {self._places}; ask for fewer."
            )
        if self.active + count > self._places:
            wait = min(MAX_RETRY_SECONDS, math.ceil(self._mean_seconds * (1 + self.waiting / self._batch_size)))
            raise _queue_full(
                f"{self.active} requests are running or waiting, and the server has room for {self._places}; try again "
                f"in {wait} s.",
                wait,
            )
        self.active += count
        start = time.monotonic()
        try:
            yield
        finally:
            self.active -= count
            self._mean_seconds += MEAN_WEIGHT * (time.monotonic() - start - self._mean_seconds)

    @contextmanager
    def prompt_logprobs(self, count: int) -> Iterator[None]:
        """Hold room for `count` log-probabilities of prompt tokens while the context lasts.

        Raises:
            ApiError: `count` exceeds `MAX_PROMPT_LOGPROBS` (400), or what other requests leave of it (429).
        """
        if count > MAX_PROMPT_LOGPROBS:
            raise ApiError(
                400,
                f"logprobs asks for {count} log-probabilities of prompt tokens, and the limit is "
                f"{MAX_PROMPT_LOGPROBS}; lower logprobs, or send fewer or shorter prompts.",
                param="logprobs",
            )
        if self._prompt_logprobs + count > MAX_PROMPT_LOGPROBS:
            raise _queue_full(
                f"The log-probabilities of all prompts in the server would exceed {MAX_PROMPT_LOGPROBS}; lower "
                f"logprobs, send fewer prompts at a time, or try again in {MAX_RETRY_SECONDS} s.",
                MAX_RETRY_SECONDS,
            )
        self._prompt_logprobs += count
        try:
            yield
        finally:
            self._prompt_logprobs -= count


def _queue_full(message: str, wait: int) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait)})
