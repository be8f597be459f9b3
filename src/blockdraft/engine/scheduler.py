"""Decides which requests run, on which KV slots, and what is prefilled and kept. It touches no tensor."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from blockdraft.decode.proposal import ChainPlan
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.kv_slots import KVSlots
from blockdraft.engine.prefix_store import PrefixStore
from blockdraft.engine.request import Recorder, Request, RunningSequence
from blockdraft.engine.runner import Runner
from blockdraft.errors import BlockdraftError, NumbersError, RequestError, describe, duration

log = logging.getLogger(__name__)

SCORED_TOKENS = 256  # tokens per read of a prompt with log probabilities, whose logits take much memory
LOG_SECONDS = 2.0  # of prefill between two lines in the log
EXPLAINED_TOKENS = 4096  # unread instructions of which the log explains how long they take
IDLE_READS = 4  # reads of `prefill_tokens` in a step without a batch to decode
LAST_TOKENS = 16  # of a prompt that are read apart
MAX_PASSED = 16  # requests that pass the oldest waiting one, and steps in which the oldest prompt is not read
TYPING_SECONDS = 60.0  # after an urgent request, in which the next one is expected
# Longest read of a long prompt: beside sequences that decode or somebody who types, and alone, where a new request or
# the end of the process waits for it.
BESIDE_SECONDS, ALONE_SECONDS = 0.25, 0.5
FIRST_TOKENS, MIN_TOKENS = 128, 16  # of a read before any was timed, and of the shortest one
_NOT_FINITE = NumbersError("The logits are not finite.")


class Source(NamedTuple):
    """Where the prefix of a sequence's prompt is copied from.

    Attributes:
        sequence: The running sequence that holds it or is about to read it; None for a finished one.
        start: First KV slot of that sequence.
        length: Tokens of the prefix.
    """

    sequence: RunningSequence | None
    start: int
    length: int


class Scheduler:
    """Runs requests, short ones first, and lets them join and leave between steps.

    A request is admitted when the batch has room and enough adjacent KV slots are free for its prompt and its longest
    answer. Short requests (`Request.is_short`) are admitted first, then those that came first. One that does not fit
    lets others pass, at most `MAX_PASSED`; then the others wait for it.

    Prompts are read some tokens at a time, between the steps of running requests: those of short requests first, then
    the one with the fewest tokens left. While a short request runs, long prompts wait. But the oldest prompt is read
    at least in every `MAX_PASSED + 1`th step. Sequences whose prompts have been read decode in every step.

    A read of a long prompt takes at most `BESIDE_SECONDS` while others decode or somebody types, and no more of the
    time than their steps; else `ALONE_SECONDS`. Its tokens follow from the speed of the last read.

    A prefix that another sequence holds is copied. If that sequence has yet to read it, the request waits, but a short
    one for short ones only.

    A step is atomic for each request: an error in one ends that request and leaves the others as they were.

    Args:
        runner: Executes.
        controller: Plans how far to draft.
        slots: KV slots of the runner's caches.
        max_batch_size: Most running sequences.
        prefix_tokens: Most tokens of finished sequences that are kept.
        prefill_tokens: Most prompt tokens that are read between two steps.
        prefix_store: Keeps instructions on disk; None keeps none.
        recorder: Gets finished requests; None if nothing is recorded.
    """

    def __init__(
        self,
        runner: Runner,
        controller: Controller,
        slots: int,
        max_batch_size: int,
        prefix_tokens: int,
        prefill_tokens: int,
        prefix_store: PrefixStore | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.runner, self._controller, self._recorder = runner, controller, recorder
        self._kv_slots = KVSlots(runner, slots, prefix_tokens, prefix_store)
        self._max_batch_size, self._prefill_tokens = max_batch_size, prefill_tokens
        self._lock = threading.Lock()  # of the queue: requests come from other threads
        self._waiting: deque[Request] = deque()
        self._sequences: list[RunningSequence] = []
        self._sources: dict[RunningSequence, Source] = {}  # of sequences that have yet to copy their prefix
        self._tokens_per_second: float | None = None  # of the last read
        self._read_ahead = 0.0  # seconds by which reads of long prompts are ahead of the steps beside them
        self._passed = 0  # steps since the oldest prompt was read
        self._typing_until = 0.0  # time at which no urgent request is expected any more
        self._explained = False  # whether the log has said what long instructions mean
        self._warned = set[str]()  # errors of drafters, each logged once: a broken one fails in every step

    def add(self, requests: Sequence[Request]) -> None:
        """Queue checked requests. May be called from any thread."""
        with self._lock:
            self._waiting += requests

    @property
    def idle(self) -> bool:
        return not self._sequences and not self._waiting

    @property
    def running(self) -> list[Request]:
        return [sequence.request for sequence in self._sequences]

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
        """Admit requests, prefill some, decode one step of the others, and return the finished ones."""
        try:
            ended = self._end_cancelled()
            if self._waiting:
                self._admit()
            decoding = [sequence for sequence in self._sequences if not sequence.in_prefill]
            if len(decoding) < len(self._sequences):
                began, num_waiting = time.perf_counter(), len(self._waiting)
                # Several reads if no batch waits for them, so that requests that came together begin together.
                for _ in range(1 if decoding else IDLE_READS):
                    if not self._prefill(bool(decoding)) or len(self._waiting) > num_waiting or self._any_cancelled():
                        break
                for sequence in decoding:  # they had to wait
                    sequence.request.stats.total_seconds += time.perf_counter() - began
            if decoding:
                began = time.perf_counter()
                self._decode(decoding)
                self._read_ahead = max(0.0, self._read_ahead - (time.perf_counter() - began))
            return ended + self._end_finished()
        except BaseException as error:  # an interrupt may come anywhere, and no sequence may go on with half a step
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """End every request with this error."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        sequences, self._sequences = self._sequences, []
        requests = [*(sequence.request for sequence in sequences), *waiting]
        for request in requests:
            if not request.finished:
                request.fail(RequestError(f"Decoding was ended by an error: {describe(error)}"), error)
        self._sources.clear()
        try:
            for sequence in sequences:
                self._kv_slots.release(sequence, zero_slots=True)
        finally:
            for request in requests:
                request.publish()

    # Coming and going.

    def _admit(self) -> None:
        """Admit waiting requests while the batch and the caches have room."""
        waiting, too_large = self.waiting, float("inf")
        for request in sorted(waiting, key=lambda request: (request.passed < MAX_PASSED, not request.is_short())):
            if len(self._sequences) == self._max_batch_size:
                return
            if request.slots < too_large and self._start(request):
                passed = waiting[: waiting.index(request)]
                waiting = [*passed, *waiting[len(passed) + 1 :]]
                for older in passed:
                    older.passed += 1
            elif request.passed >= MAX_PASSED:
                return
            else:
                too_large = min(too_large, request.slots)

    def _start(self, request: Request) -> bool:
        """Admit a request if there are KV slots for it. Return whether there are."""
        prefix = self._kv_slots.longest_prefix(request)
        allocated = self._kv_slots.allocate(request, prefix)
        if allocated is None:
            return False
        start, num_held = allocated
        source, num_known = None, num_held  # tokens that need not wait for the prefill of a long request
        if prefix is not None and not num_held:
            source = next((other for other in self._sequences if other.start == prefix.start), None)
            if source is not None:
                num_known = prefix.length if source.short else min(prefix.length, source.prefilled)
            elif self._kv_slots.is_finished(prefix.start):
                num_known = prefix.length
            else:  # `allocate` has evicted it
                prefix = None
        sequence = RunningSequence(request, start, request.slots, short=request.is_short(num_known))
        if prefix is not None and not sequence.short:
            num_known = prefix.length
        if not self._kv_slots.begin_loading(sequence, num_known) and prefix is not None:
            if num_held:
                request.num_prefilled = request.stats.remembered = num_held
            else:
                self._sources[sequence] = Source(source, prefix.start, num_known)
        if request.urgent:
            self._typing_until = time.monotonic() + TYPING_SECONDS
        self._sequences.append(sequence)
        with self._lock:
            self._waiting.remove(request)
        self._copy_prefix(sequence)
        return True

    def _copy_prefix(self, sequence: RunningSequence) -> None:
        """Copy a prefix once its source has read it, or as much as the source has read when it ends."""
        self._kv_slots.finish_loading(sequence, wait=False)
        if sequence not in self._sources:
            return
        source, start, length = self._sources[sequence]
        if source is not None and source.request.finished:
            length = 0 if source.request.failure is not None else min(length, source.prefilled)
        if source is None or source.prefilled >= length:
            del self._sources[sequence]
            length = self.runner.reusable(start, length)
            if length:
                self.runner.copy(start, sequence.start, length)
                sequence.request.num_prefilled = sequence.request.stats.remembered = length

    def _any_cancelled(self) -> bool:
        return any(sequence.request.cancelled for sequence in self._sequences)

    def _end_cancelled(self) -> list[Request]:
        cancelled: list[Request] = []
        if self._waiting:
            with self._lock:
                cancelled = [request for request in self._waiting if request.cancelled]
                self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for request in cancelled:
            request.finish("cancelled")
            request.publish()
        running = [sequence for sequence in self._sequences if sequence.request.cancelled]
        for sequence in running:
            sequence.request.finish("cancelled")
        return cancelled + self._free() if running else cancelled

    def _end_finished(self) -> list[Request]:
        """Publish what is new, and free the sequences whose requests have ended."""
        ended = False
        for sequence in self._sequences:
            if sequence.request.finished:
                ended = True
            elif sequence.request.listener is not None:
                sequence.request.publish()
                ended = ended or sequence.request.finished
        return self._free() if ended else []

    def _free(self) -> list[Request]:
        finished = [sequence for sequence in self._sequences if sequence.request.finished]
        self._sequences = [sequence for sequence in self._sequences if not sequence.request.finished]
        try:
            for sequence in finished:
                self._sources.pop(sequence, None)
                for other in [other for other, source in self._sources.items() if source.sequence is sequence]:
                    self._copy_prefix(other)
                self._record(sequence)
                self._kv_slots.free(sequence)
                self._remember(sequence.request)
        except BaseException as error:
            for sequence in finished:
                if sequence.request.failure is None:
                    sequence.request.fail(RequestError(f"The request could not be ended: {describe(error)}"), error)
            raise
        finally:  # whoever waits for the end must not wait forever
            for sequence in finished:
                sequence.request.publish()
        return [sequence.request for sequence in finished]

    def _remember(self, request: Request) -> None:
        """Let the drafter keep the output. It changes no output, so one that fails is logged alone."""
        try:
            self.runner.remember(request)
        except Exception as error:
            log.warning("The drafter cannot keep an output: %s", describe(error))

    def _record(self, sequence: RunningSequence) -> None:
        """Give a finished request to the recorder, unless its answer is cut off or its client declined."""
        request = sequence.request
        ended = request.finish_reason in ("stop", "length") or request.complete
        if self._recorder is None or not request.recorded or not ended or request.failure is not None:
            return
        try:
            self._recorder.record(request, self.runner.hidden_states(sequence.start))
        except Exception as error:  # such as too little memory
            log.warning("A request cannot be recorded: %s", describe(error))

    # Prefill and decode.

    def _readable(self, beside: bool) -> list[RunningSequence]:
        """Return the sequences whose prompts may be read now, the one to read first at the beginning.

        Args:
            beside: Whether other sequences decode.
        """
        reading = [
            sequence
            for sequence in self._sequences
            if sequence.in_prefill
            and not sequence.request.finished
            and sequence not in self._sources
            and not self._kv_slots.is_loading(sequence)
        ]
        if not reading:
            return []
        if self._passed >= MAX_PASSED:
            oldest = reading[0]
            return sorted(reading, key=lambda sequence: (sequence is not oldest, not sequence.short))
        if any(sequence.short for sequence in self._sequences) or (beside and self._read_ahead):
            reading = [sequence for sequence in reading if sequence.short]
        return sorted(reading, key=lambda sequence: sequence.num_unread)

    def _tokens_within(self, seconds: float) -> int:
        """Return how many tokens of prompts are read at once so that it takes at most `seconds`."""
        if self._tokens_per_second is None:
            return min(FIRST_TOKENS, self._prefill_tokens)
        count = int(self._tokens_per_second * seconds) // MIN_TOKENS * MIN_TOKENS
        return min(max(count, MIN_TOKENS), self._prefill_tokens)

    def _prefill(self, beside: bool) -> bool:
        """Read prompts, at most `prefill_tokens`. Return whether any was read.

        Args:
            beside: Whether other sequences decode.
        """
        for sequence in self._sequences:
            self._copy_prefix(sequence)
        readable = self._readable(beside)
        if not readable and all(sequence.in_prefill for sequence in self._sequences):  # nothing else can be done
            for sequence in self._sequences:
                self._kv_slots.finish_loading(sequence, wait=True)
            readable = self._readable(beside)
        chosen: dict[RunningSequence, int] = {}  # tokens to read
        waited_for = beside or time.monotonic() < self._typing_until
        most_short = self._tokens_within(ALONE_SECONDS)
        most_long = self._tokens_within(BESIDE_SECONDS) if waited_for else most_short
        most = most_short  # tokens of all sequences
        for sequence in readable:
            if not sequence.short:
                most = min(most, most_long)
            count = self._to_read(sequence, most_short if sequence.short else most_long)
            if sequence.request.params.prompt_logprobs is not None:  # is read alone
                if chosen:
                    continue
                chosen[sequence] = min(count, SCORED_TOKENS)
                break
            # All sequences of a forward have as many nodes as the longest.
            longest = max(count, *chosen.values()) if chosen else count
            if chosen and (
                (len(chosen) + 1) * longest > most
                or any(other.prefilled + longest > other.capacity for other in [*chosen, sequence])
            ):
                continue
            chosen[sequence] = count
        oldest = next((sequence for sequence in self._sequences if sequence.in_prefill), None)
        self._passed = 0 if oldest is None or oldest in chosen else self._passed + 1
        if not chosen:
            return False
        group = [sequence for sequence in self._sequences if sequence in chosen]  # torch reads slots in order in place
        counts = [chosen[sequence] for sequence in group]
        began = time.perf_counter()
        try:
            invalid = self.runner.prefill(group, counts)
        except Exception as error:
            self._retry_alone(group, counts, error)
        else:
            self._retry_alone(
                [group[i] for i in invalid],
                [counts[i] for i in invalid],
                None if len(group) == 1 else _NOT_FINITE,
            )
        seconds = time.perf_counter() - began
        self._tokens_per_second = len(group) * max(counts) / max(seconds, 1e-9)
        if beside and not all(sequence.short for sequence in group):
            self._read_ahead += seconds
        for sequence in group:
            intervals = sequence.request.stats.prefill_seconds // LOG_SECONDS
            sequence.request.stats.prefill_seconds += seconds
            if sequence.in_prefill and sequence.request.stats.prefill_seconds // LOG_SECONDS > intervals:
                self._log_prefill(sequence)
            sequence.request.stats.read_seconds += seconds / len(group)
        return True

    def _log_prefill(self, sequence: RunningSequence) -> None:
        """Log how much of a prompt has been read, and once what long instructions mean."""
        request = sequence.request
        num_read = sequence.prefilled - request.stats.remembered
        left = f"about {duration(sequence.num_unread * request.stats.prefill_seconds / max(num_read, 1))} left"
        if not self._explained and request.instruction_tokens - request.stats.remembered > EXPLAINED_TOKENS:
            self._explained = True
            log.info(
                "First request of this client: its instructions of %s tokens are read once, %s. Then they are kept, "
                "and later requests start sooner.",
                f"{request.instruction_tokens:,}",
                left,
            )
        read = f"{sequence.prefilled:,} of {len(request.prompt):,} tokens"
        log.info("Prefill: %s, %s", read, left, extra={"progress": True})

    def _to_read(self, sequence: RunningSequence, most: int) -> int:
        """Return how many tokens of a prompt to read at once.

        Where a target cannot cut rows, the instructions and the last tokens of a long prompt are read apart, so that
        there are checkpoints before them. A conversation goes on with other tokens than those that began the answer.
        """
        unread, count = sequence.num_unread, min(sequence.num_unread, most)
        if not self.runner.target.keeps_checkpoints:
            return count
        instructions = sequence.request.instruction_tokens - sequence.prefilled
        if 0 < instructions < count:
            count = instructions
        return min(count, unread - LAST_TOKENS) if unread > 2 * LAST_TOKENS else count

    def _decode(self, sequences: list[RunningSequence]) -> None:
        """Decode one step of sequences whose prompts have been read."""
        plan = self._controller.plan([sequence.request for sequence in sequences])
        try:
            outcome = self.runner.step(sequences, plan)
        except Exception as error:
            message = describe(error)
            if plan.block_size > 1 and message not in self._warned:
                self._warned.add(message)
                log.warning("A step failed and is repeated without drafts, as are all that fail like it: %s", message)
            self._retry_alone(sequences, None, error)
            return
        invalid = [sequences[i] for i in outcome.invalid]
        if invalid:
            plain = len(sequences) == plan.block_size == 1 and not outcome.has_own_drafts
            self._retry_alone(invalid, None, None if plain else _NOT_FINITE)
        else:
            self._controller.learn(outcome)

    def _retry_alone(
        self, sequences: Sequence[RunningSequence], counts: Sequence[int] | None, error: BaseException | None
    ) -> None:
        """Repeat a failed step for each sequence alone and without a draft, and end those for which it fails again.

        Args:
            counts: Prompt tokens that were to be read; None for a decode step.
            error: Error of the step; None if the sequence was alone and without a draft already.
        """
        for i, sequence in enumerate(sequences):
            request = sequence.request
            try:
                self.runner.restore(sequence)
                if error is None:
                    failed = True
                elif counts is not None:
                    failed = bool(self.runner.prefill([sequence], [counts[i]]))
                else:
                    outcome = self.runner.step([sequence], ChainPlan(1, [request.params]), own_drafts=False)
                    failed = bool(outcome.invalid)
            except Exception as again:
                known = again if isinstance(again, BlockdraftError) else RequestError(describe(again))
                request.fail(known, None if known is again else again)
            else:
                if failed:
                    request.fail(request.dead_end())
