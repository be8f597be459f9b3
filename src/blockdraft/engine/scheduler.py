"""Decides who runs, on which slots, what is read and what is remembered. It touches no tensor."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from blockdraft.decode.proposal import Plan
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.cache_manager import CacheManager
from blockdraft.engine.request import Request, Row
from blockdraft.engine.runner import Runner
from blockdraft.errors import BlockdraftError, NumbersError, RequestError, describe

log = logging.getLogger(__name__)

SCORED_TOKENS = 256  # most tokens read at a time of a prompt whose logprobs are wanted: their logits take much memory
IDLE_READS = 4  # reads of `prefill_tokens` in a step in which nothing is decoded
_NOT_FINITE = NumbersError("The logits are not finite.")


class Source(NamedTuple):
    """Source of the beginning of a row's prompt.

    Attributes:
        row: The running row that holds it or is about to read it; None for a row of a finished request.
        start: First slot of that row.
        length: Tokens that the two have in common.
    """

    row: Row | None
    start: int
    length: int


class Scheduler:
    """Runs requests in the order in which they came, and lets them join and leave between cycles.

    A request is admitted when a row is free and enough slots lie side by side for its prompt and its longest answer;
    until then it waits, and those behind it wait too. Prompts are read some tokens at a time, between the cycles of
    running requests. A beginning that another row holds is copied; if that row has yet to read it, the request waits.

    A step is atomic for each request: an error in one row ends that row and leaves the others as they were.

    Args:
        runner: Executes.
        controller: Plans how far to draft.
        slots: Slots of the runner's caches.
        max_batch_size: Most rows.
        prefix_tokens: Most tokens of finished requests that stay in the caches.
        prefill_tokens: Most tokens of prompts that are read between two cycles.
    """

    def __init__(
        self,
        runner: Runner,
        controller: Controller,
        slots: int,
        max_batch_size: int,
        prefix_tokens: int,
        prefill_tokens: int,
    ) -> None:
        self._runner, self._controller = runner, controller
        self._cache_manager = CacheManager(runner, slots, prefix_tokens)
        self._max_rows, self._prefill_tokens = max_batch_size, prefill_tokens
        self._lock = threading.Lock()  # of the queue: requests come from other threads
        self._waiting: deque[Request] = deque()
        self._rows: list[Row] = []
        self._sources: dict[Row, Source] = {}  # of rows that have yet to copy from another
        self._warned = set[str]()  # errors of drafters, each logged once: a broken one fails in every cycle

    def add(self, requests: Sequence[Request]) -> None:
        """Queue checked requests. May be called from any thread."""
        with self._lock:
            self._waiting += requests

    @property
    def idle(self) -> bool:
        return not self._rows and not self._waiting

    @property
    def running(self) -> list[Request]:
        return [row.request for row in self._rows]

    @property
    def waiting(self) -> list[Request]:
        with self._lock:
            return list(self._waiting)

    def cancel(self) -> list[Request]:
        """Cancel all requests, and return them. May be called from any thread."""
        # In this order: a request that is admitted meanwhile joins the running before it leaves the waiting.
        requests = [*self.waiting, *self.running]
        for request in requests:
            request.cancel()
        return requests

    def step(self) -> list[Request]:
        """Admit requests, read some of their prompts, run one cycle of the others, and free the rows of those that
        have ended.

        Returns:
            The requests that have ended.
        """
        try:
            ended = self._end_cancelled()
            if self._waiting:
                self._admit()
            decoding = [row for row in self._rows if not row.reading]
            if len(decoding) < len(self._rows):
                began = time.perf_counter()
                # Several reads where no cycle waits for them, so that requests that came together begin together.
                for _ in range(1 if decoding else IDLE_READS):
                    if not self._read():
                        break
                for row in decoding:  # they had to wait
                    row.request.stats.total_seconds += time.perf_counter() - began
            if decoding:
                self._cycle(decoding)
        except BaseException as error:  # an interrupt may come anywhere, and no row may go on with half a step
            self.abort(error)
            raise
        return ended + self._end_finished()

    def abort(self, error: BaseException) -> None:
        """End every request with this error."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        rows, self._rows = self._rows, []
        requests = [*(row.request for row in rows), *waiting]
        for request in requests:
            if not request.finished:
                request.fail(RequestError(f"Decoding was ended by an error: {describe(error)}"), error)
        self._sources.clear()
        for row in rows:
            self._cache_manager.release(row, zero_slots=True)
        for request in requests:
            request.publish()

    # Coming and going.

    def _admit(self) -> None:
        """Admit waiting requests while there are rows and slots for them."""
        while self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting[0]
            known = self._cache_manager.longest_prefix(request)
            start = self._cache_manager.allocate(request)
            if start is None:
                return
            row = Row(request, start, request.slots)
            if known is not None:
                source = next((other for other in self._rows if other.start == known.start), None)
                # A remembered row may have been evicted by `allocate`.
                if source is not None or self._cache_manager.remembers(known.start):
                    self._sources[row] = Source(source, known.start, known.length)
            self._rows.append(row)
            with self._lock:
                self._waiting.popleft()
            self._copy_prefix(row)

    def _copy_prefix(self, row: Row) -> None:
        """Copy a row's beginning from its source once that has read so far. If the source has gone, the row will read
        the beginning itself."""
        if row not in self._sources:
            return
        source, start, length = self._sources[row]
        if source is not None and source not in self._rows:
            del self._sources[row]
        elif source is None or source.read >= length:
            del self._sources[row]
            self._runner.copy(start, row.start, length)
            row.request.stats.remembered = length
            row.read = length

    def _end_cancelled(self) -> list[Request]:
        cancelled: list[Request] = []
        if self._waiting:
            with self._lock:
                cancelled = [request for request in self._waiting if request.cancelled]
                self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for request in cancelled:
            request.finish("cancelled")
            request.publish()
        rows = [row for row in self._rows if row.request.cancelled]
        for row in rows:
            row.request.finish("cancelled")
        return cancelled + self._free() if rows else cancelled

    def _end_finished(self) -> list[Request]:
        """Publish what is new, and free the rows of requests that have ended."""
        ended = False
        for row in self._rows:
            if row.request.finished:
                ended = True
            elif row.request.listener is not None:
                row.request.publish()
                ended = ended or row.request.finished
        return self._free() if ended else []

    def _free(self) -> list[Request]:
        gone = [row for row in self._rows if row.request.finished]
        self._rows = [row for row in self._rows if not row.request.finished]
        for row in gone:
            self._sources.pop(row, None)
            self._cache_manager.free(row)
        for row in gone:
            row.request.publish()
        return [row.request for row in gone]

    # Reading and decoding.

    def _read(self) -> bool:
        """Read prompts in the order in which they came, at most `prefill_tokens`. Returns whether there were any."""
        group: list[Row] = []
        counts: list[int] = []
        for row in self._rows:
            self._copy_prefix(row)
            if not row.reading or row.request.finished or row in self._sources:
                continue
            count = min(len(row.request.prompt) - row.read, self._prefill_tokens)
            if row.request.params.prompt_logprobs is not None:  # is read alone
                if group:
                    continue
                group, counts = [row], [min(count, SCORED_TOKENS)]
                break
            longest = max(count, *counts) if counts else count
            if group and (len(group) + 1) * longest > self._prefill_tokens:
                continue
            # All rows of a forward have as many nodes as the longest.
            fits = all(each.read + longest <= each.capacity for each in [*group, row])
            if group and not fits:
                continue
            group.append(row)
            counts.append(count)
        if not group:
            return False
        began = time.perf_counter()
        try:
            invalid = self._runner.read(group, counts)
        except Exception as error:
            self._retry_alone(group, counts, error)
        else:
            self._retry_alone(
                [group[i] for i in invalid],
                [counts[i] for i in invalid],
                None if len(group) == 1 else _NOT_FINITE,
            )
        seconds = time.perf_counter() - began
        for row in group:
            row.request.stats.prefill_seconds += seconds
            row.request.stats.read_seconds += seconds / len(group)
        return True

    def _cycle(self, rows: list[Row]) -> None:
        """One cycle of rows whose prompts have been read."""
        requests = [row.request for row in rows]
        plan = self._controller.plan(requests)
        try:
            outcome = self._runner.step(rows, plan)
        except Exception as error:
            told = describe(error)
            if plan.block_size > 1 and told not in self._warned:
                self._warned.add(told)
                log.warning("A cycle failed and is repeated without drafts, as are all that fail like it: %s", told)
            self._retry_alone(rows, None, error)
            return
        suspects = [rows[i] for i in outcome.invalid]
        if suspects:
            self._retry_alone(suspects, None, None if len(rows) == 1 and plan.block_size == 1 else _NOT_FINITE)
        else:
            self._controller.learn(
                requests,
                plan,
                draft_tokens=outcome.draft_tokens,
                deepest=outcome.deepest,
                lengths=outcome.lengths,
                expected=outcome.expected,
                seconds=outcome.seconds,
                late=outcome.late,
                part=outcome.part,
            )

    def _retry_alone(self, rows: Sequence[Row], counts: Sequence[int] | None, error: BaseException | None) -> None:
        """Repeat a failed step for each row alone and without guesses, and end the rows for which it fails again.

        Args:
            counts: Tokens of the prompts that were to be read; None for a cycle.
            error: Error of the step; None if each row was alone and without guesses already, so that it is at fault.
        """
        for i, row in enumerate(rows):
            try:
                self._runner.restore(row)
                if error is None:
                    failed = True
                elif counts is not None:
                    failed = bool(self._runner.read([row], [counts[i]]))
                else:
                    failed = bool(self._runner.step([row], Plan(1, [row.request.params])).invalid)
            except Exception as again:
                known = again if isinstance(again, BlockdraftError) else RequestError(describe(again))
                row.request.fail(known, None if known is again else again)
            else:
                if failed:
                    row.request.fail(row.request.dead_end())
