"""Decides: who runs, on which slots, what is read, what is remembered, and how far to draft. It touches no tensor."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from blockdraft.decode.proposal import Plan
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.cache_manager import CacheManager
from blockdraft.engine.request import Request, Row
from blockdraft.engine.runner import Runner
from blockdraft.errors import BlockdraftError, NumbersError, RequestError, describe

log = logging.getLogger(__name__)

SCORED_TOKENS = 256  # of a prompt of which all logits are wanted that are read at a time; they take much memory
IDLE_READS = 4  # times `prefill_tokens` that are read at a time where no one is decoded
_DOUBT = NumbersError("There were no finite numbers.")


class Scheduler:
    """Runs requests in the order in which they came, and lets them join and leave between cycles.

    A request is let in when a row is free and so many slots lie together as its prompt and its longest answer need;
    else it waits, and those behind it wait too. Prompts are read some tokens at a time, between the cycles of the
    others. A beginning that another row holds is copied, or waited for where that row is about to read it.

    A step is atomic for each request: what goes wrong in one row ends that row, and the others do not notice.

    Args:
        runner: What executes.
        controller: How far to draft.
        slots: Tokens of the runner's stores.
        max_batch_size: Most rows.
        prefix_tokens: Tokens of ended requests that are remembered.
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
        self._sources: dict[Row, tuple[Row | None, int, int]] = {}  # whom a row waits for: (row, its start, tokens)
        self._told = set[str]()  # why cycles failed, each once: a broken drafter fails in every cycle

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, which have been checked. May be called from any thread."""
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
        # In this order: one that is let in counts as running before it no longer waits.
        requests = [*self.waiting, *self.running]
        for request in requests:
            request.cancel()
        return requests

    def step(self) -> list[Request]:
        """Let requests in, read some of their prompts, run one cycle of the others, and free the rows of those that
        ended.

        Returns:
            The requests that ended.
        """
        try:
            ended = self._end_cancelled()
            if self._waiting:
                self._admit()
            decoding = [row for row in self._rows if not row.reading]
            if len(decoding) < len(self._rows):
                began = time.perf_counter()
                # With no one to wait for it, more is read, so that those who came together begin together.
                for _ in range(1 if decoding else IDLE_READS):
                    if not self._read():
                        break
                for row in decoding:  # they stood still meanwhile
                    row.request.stats.total_seconds += time.perf_counter() - began
            if decoding:
                self._cycle(decoding)
        except BaseException as error:  # an interrupt may have come anywhere, and a row must not go on half done
            self.abort(error)
            raise
        return ended + self._end_finished()

    def abort(self, error: BaseException) -> None:
        """End every request with this error."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        rows, self._rows = self._rows, []
        for request in [*(row.request for row in rows), *waiting]:
            if not request.finished:
                request.fail(RequestError(f"Decoding was ended by an error: {describe(error)}"), error)
        self._sources.clear()
        for row in rows:
            self._cache_manager.give(row, wipe=True)
        for request in [*(row.request for row in rows), *waiting]:
            request.publish()

    # Who comes and goes.

    def _admit(self) -> None:
        """Let in as many waiting requests as there are rows and slots for."""
        while self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting[0]
            known = self._cache_manager.longest(request)
            start = self._cache_manager.take(request)
            if start is None:
                return
            row = Row(request, start, request.slots)
            if known is not None:
                source = next((other for other in self._rows if other.start == known[0]), None)
                if source is not None or self._cache_manager.remembers(known[0]):
                    self._sources[row] = source, *known
            self._rows.append(row)
            with self._lock:
                self._waiting.popleft()
            self._follow(row)

    def _follow(self, row: Row) -> None:
        """Copy the beginning that another row holds, once that has read so far; if it has gone, read it oneself."""
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
            self._cache_manager.leave(row)
        for row in gone:
            row.request.publish()
        return [row.request for row in gone]

    # What they do.

    def _read(self) -> bool:
        """Read prompts, at most `prefill_tokens`, those first that came first. Returns whether there were any."""
        group: list[Row] = []
        counts: list[int] = []
        for row in self._rows:
            self._follow(row)
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
            fits = all(each.read + longest <= each.capacity for each in [*group, row])  # all have as many nodes
            if group and not fits:
                continue
            group.append(row)
            counts.append(count)
        if not group:
            return False
        began = time.perf_counter()
        try:
            lawless = self._runner.read(group, counts)
        except Exception as error:
            self._apart(group, counts, error)
        else:
            suspects = [group[place] for place in lawless]
            self._apart(suspects, [counts[place] for place in lawless], None if len(group) == 1 else _DOUBT)
        seconds = time.perf_counter() - began
        for row in group:
            row.request.stats.prefill_seconds += seconds
        return True

    def _cycle(self, rows: list[Row]) -> None:
        """One cycle of rows that are past their prompts."""
        requests = [row.request for row in rows]
        plan = self._controller.plan(requests)
        try:
            outcome = self._runner.step(rows, plan)
        except Exception as error:
            told = describe(error)
            if plan.block_size > 1 and told not in self._told:
                self._told.add(told)
                log.warning("A cycle failed and is done again without drafts, as are all that fail like it: %s", told)
            self._apart(rows, None, error)
            return
        suspects = [rows[place] for place in outcome.lawless]
        if suspects:
            self._apart(suspects, None, None if len(rows) == 1 and plan.block_size == 1 else _DOUBT)
        else:
            self._controller.learn(
                requests, plan, outcome.guesses, outcome.deepest, outcome.lengths, outcome.expected, outcome.seconds
            )

    def _apart(self, rows: Sequence[Row], counts: Sequence[int] | None, doubt: BaseException | None) -> None:
        """Do again for each row alone, and without guesses, what failed for all of them: which of them is at fault, if
        any is, shows then.

        Args:
            counts: Tokens of the prompts that were to be read; None for a cycle.
            doubt: Why it has to be done again; None where there is no finite number even so.
        """
        for place, row in enumerate(rows):
            try:
                self._runner.restore(row)
                if doubt is None:
                    lawless = True
                elif counts is not None:
                    lawless = bool(self._runner.read([row], [counts[place]]))
                else:
                    lawless = bool(self._runner.step([row], Plan(1, [row.request.params])).lawless)
            except Exception as error:
                failed = error if isinstance(error, BlockdraftError) else RequestError(describe(error))
                row.request.fail(failed, None if failed is error else error)
            else:
                if lawless:
                    row.request.fail(row.request.dead_end())
