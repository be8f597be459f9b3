"""Continuous batching: requests join and leave a running batch between its cycles."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from blockdraft.engine.batch import Batch
from blockdraft.engine.request import Request
from blockdraft.errors import UsageError
from blockdraft.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from blockdraft.engine.engine import Engine


class Scheduler:
    """Runs the requests of one engine, in the order in which they came.

    A request is let in when a row is free and when the memory that all running requests can need at most, with their
    longest prompt and answer, still fits; else it waits, and those behind it wait too.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Request] = deque()
        self._batch: Batch | None = None
        self._limit = engine.free_bytes()

    def submit(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request.

        Raises:
            ValueError: It can never run: see `Engine.generate`.
        """
        request = self._engine.request(prompt, params)
        need = self._engine.memory_bytes([request])
        if need > self._limit:
            raise UsageError(
                f"Caches and logits of a request of up to {self._engine.capacity([request])} tokens take "
                f"{need / 2**30:.1f} GiB and {self._limit / 2**30:.1f} GiB are free; ask for fewer new tokens or a "
                f"smaller tree."
            )
        self._waiting.append(request)
        return request

    @property
    def idle(self) -> bool:
        return self._batch is None and not self._waiting

    @property
    def running(self) -> list[Request]:
        return list(self._batch.requests) if self._batch else []

    @property
    def waiting(self) -> list[Request]:
        return list(self._waiting)

    def step(self) -> list[Request]:
        """Let requests in and read their prompts, or else run one cycle; free the rows of those that ended.

        Returns:
            The requests that ended.
        """
        ended = self._end_cancelled()
        joining = self._admitted()
        if joining:
            began = time.perf_counter()
            group = self._engine.prefill(joining)
            for request in self.running:
                request.stats.total_seconds += time.perf_counter() - began  # they stood still meanwhile
            if self._batch is None:
                self._batch = group
            else:
                self._engine.catch_up(self._batch)
                self._batch.join(group, self._engine.capacity([*self.running, *joining]))
        elif self._batch is not None:
            self._engine.step(self._batch)
        if self._batch is not None:
            self._engine.remember(self._batch)
            ended += self._free_rows()
        return ended

    def _end_cancelled(self) -> list[Request]:
        cancelled = [request for request in [*self.running, *self._waiting] if request.cancelled]
        for request in cancelled:
            request.finish("cancelled")
        if cancelled:
            self._waiting = deque(request for request in self._waiting if not request.finished)
            self._free_rows()
        return cancelled

    def _free_rows(self) -> list[Request]:
        ended = [request for request in self.running if request.finished]
        if self._batch is not None and ended:
            if len(ended) == len(self._batch.requests):
                self._batch = None
            else:
                self._engine.catch_up(self._batch)
                self._batch.drop_finished()
        return ended

    def _admitted(self) -> list[Request]:
        """Take as many waiting requests as there are rows and memory for."""
        joining: list[Request] = []
        while self._waiting:
            together = [*self.running, *joining, self._waiting[0]]
            if len(together) > self._engine.max_batch_size or self._engine.memory_bytes(together) > self._limit:
                break
            joining.append(self._waiting.popleft())
        return joining
