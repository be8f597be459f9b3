"""The engine: what users call, from any thread or coroutine."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from weakref import WeakSet

from blockdraft.decode.prediction import Prediction
from blockdraft.drafters import Drafter, HiddenStateObserver, load_drafter, slots_behind
from blockdraft.engine.adaptive.costs import load_for, update
from blockdraft.engine.adaptive.policy import MAX_AUTO_BUDGET, MAX_AUTO_BUDGET_CPU, controller
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.engine.infill import ExtraFile, infill_params, infill_prompt
from blockdraft.engine.kv_slots import Memory
from blockdraft.engine.prefix_store import PrefixStore
from blockdraft.engine.request import Chunk, Completion, Recorder, Request
from blockdraft.engine.runner import Runner
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.text import check_request, encode, encode_prediction, end_token_ids
from blockdraft.engine.worker import end_all, worker_of
from blockdraft.errors import ClosedError, UsageError
from blockdraft.targets import Target
from blockdraft.types import Drafting, Prompt, RequestDrafting, SamplingParams

PREFILL_TOKENS, PREFILL_TOKENS_CPU = 2048, 256


class Engine:
    """Decodes with a target and a drafter. The output is the target's own.

    Any thread may call it. A worker thread decodes while there are requests, and exits soon after the last one. Engines
    that share a target take turns. After `close`, or the end of a `with` block, an engine refuses new requests.

    Args:
        target: From `load_target`.
        drafter: From `load_drafter`; None decodes plainly.
        max_batch_size: Most requests that are decoded together.
        drafting: How far to draft.
        memory_limit: Most bytes that the engine may take, see `memory_bytes`; None is the memory that is free now.
        prefix_tokens: Most tokens of finished requests that are kept, so that a request with the same prefix need not
            read it again; 0 keeps none. Running requests share prefixes in any case.
        cache_tokens: KV slots of target and drafter, those of finished requests included; None is room for
            `max_batch_size` requests of the greatest length, or what the memory allows.
        prefill_tokens: Most prompt tokens that are read between two steps; None is 256 on a CPU and 2048 elsewhere.
        stored_prefix_tokens: Least `instruction_tokens` of a request that are stored in the cache folder, from which
            later engines of this pair load them; 0 stores none, nor does a pair that `PrefixStore` does not support,
            nor an engine that records hidden states.
        shares_memory: Whether other programs use the memory as well. Then `cache_tokens` are fewer where they need
            more than 1.5 GiB or a quarter of the free memory, but enough for one request of the greatest length.
        recorder: Gets each finished request, with hidden states if it has target layers; None records nothing.

    Raises:
        UsageError: A number is too small, the block is longer than the drafter's, or the target cannot score trees.

    Attributes:
        memory: Plan of the memory that the engine takes.
        slots_behind: KV slots that each sequence needs behind its tokens.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        max_batch_size: int = 8,
        drafting: Drafting | None = None,
        memory_limit: int | None = None,
        prefix_tokens: int = 0,
        cache_tokens: int | None = None,
        prefill_tokens: int | None = None,
        stored_prefix_tokens: int = 0,
        shares_memory: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        if prefill_tokens is None:
            prefill_tokens = PREFILL_TOKENS_CPU if target.device.type == "cpu" else PREFILL_TOKENS
        for name, value, least in (
            ("max_batch_size", max_batch_size, 1),
            ("prefix_tokens", prefix_tokens, 0),
            ("cache_tokens", 1 if cache_tokens is None else cache_tokens, 1),
            ("prefill_tokens", prefill_tokens, 1),
            ("stored_prefix_tokens", stored_prefix_tokens, 0),
        ):
            if value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}.")
        drafting = drafting or Drafting()
        drafter = load_drafter("none", target=target) if drafter is None else drafter
        if not hasattr(drafter, "propose"):
            raise UsageError(f"drafter must come from load_drafter, or be None to decode plainly; got {drafter!r}.")
        if isinstance(drafting.block_size, int) and drafting.block_size > drafter.block_size:
            raise UsageError(
                f"block_size must be at most {drafter.block_size} for this drafter, got {drafting.block_size}."
            )
        if drafting.tree_budget != 0 and not target.has_trees:
            raise UsageError(
                f"tree_budget must be 0 with the backend {target.backend}, which scores chains only; got "
                f"{drafting.tree_budget}."
            )
        self.target, self.drafter, self.drafting = target, drafter, drafting
        budget = MAX_AUTO_BUDGET_CPU if target.device.type == "cpu" else MAX_AUTO_BUDGET
        self.controller = controller(drafter, drafting, partial(load_for, target, drafter), max_auto_budget=budget)
        self.max_batch_size, self.prefix_tokens, self.prefill_tokens = max_batch_size, prefix_tokens, prefill_tokens
        nodes = 1 + self.controller.max_draft_tokens
        self.slots_behind = slots_behind(drafter, nodes) if drafting.tree_budget else nodes
        self._recorder, self._observer = recorder, None
        if recorder is not None and recorder.target_layers:
            self._observer = HiddenStateObserver(recorder.target_layers, target.hidden_size)
            stored_prefix_tokens = 0  # hidden states of a stored prefix would be missing
        self.memory = Memory(
            target=target,
            drafter=drafter,
            observer=self._observer,
            max_batch_size=max_batch_size,
            nodes=nodes,
            prefill_tokens=prefill_tokens,
            automatic=self.controller.automatic,
            behind=self.slots_behind,
        )
        self.stored_prefix_tokens = stored_prefix_tokens if PrefixStore.supports(target, drafter) else 0
        self._prefix_store: PrefixStore | None = None
        if shares_memory:
            cache_tokens = self.memory.usual_slots(prefix_tokens, cache_tokens)
        self._cache_tokens, self._memory_limit = cache_tokens, memory_limit
        self._lock = threading.Lock()
        self._scheduler: Scheduler | None = None
        self.worker = worker_of(target)
        self._closed = False

    @property
    def cache_tokens(self) -> int:
        """KV slots of target and drafter."""
        if self._cache_tokens is None:
            self._cache_tokens = self.memory.slots(self.prefix_tokens, self._memory_limit)
        return self._cache_tokens

    def memory_bytes(self) -> int:
        """Return the most memory that the engine takes: the caches of target and drafter, and the workspace of a step.

        A CPU hands it out as it is used.
        """
        return self.memory.bytes(self.cache_tokens)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, made at first use, which allocates the caches."""
        if self._scheduler is None:
            self.controller.prepare()
            if self.stored_prefix_tokens:
                self._prefix_store = PrefixStore(self.target, self.drafter, self.stored_prefix_tokens)
            self._scheduler = Scheduler(
                runner=Runner(
                    self.target,
                    self.drafter,
                    slots=self.cache_tokens,
                    sampled=self.drafting.sampled,
                    observer=self._observer,
                ),
                controller=self.controller,
                slots=self.cache_tokens,
                max_batch_size=self.max_batch_size,
                prefix_tokens=self.prefix_tokens,
                prefill_tokens=self.prefill_tokens,
                prefix_store=self._prefix_store,
                recorder=self._recorder,
            )
        return self._scheduler

    @property
    def running(self) -> list[Request]:
        """Requests that are being prefilled or decoded."""
        return [] if self._scheduler is None else self._scheduler.running

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        listener: Callable[[Chunk], object] | None = None,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
        instruction_tokens: int = 0,
        urgent: bool = False,
        recorded: bool = True,
    ) -> Request:
        """Queue one prompt, and return at once.

        Args:
            instruction_tokens: Leading tokens of the prompt that may be stored, see `stored_prefix_tokens`.
            listener: Called with each chunk of the answer, in the worker thread, so it should be quick. An exception
                in it ends the request.
            drafting: Draft limits of this request; None is as far as the engine drafts.
            trace: Report in each chunk the step that it comes from.
            urgent: Run it before other requests, as a completion for somebody who types. Short requests go first in
                any case, see `Scheduler`.
            recorded: Whether the engine's recorder gets it.

        Returns:
            The request: `result()` waits for the answer, `cancel()` ends it early.

        Raises:
            UsageError: The prompt is empty or too long for the context, the parameters name tokens outside the
                vocabulary, the target cannot follow the grammar, or the request needs more KV slots than there are.
            ClosedError: The engine is closed.
        """
        request = self.request(prompt, params or SamplingParams(), drafting, trace)
        request.listener, request.instruction_tokens, request.urgent = listener, instruction_tokens, urgent
        request.recorded = recorded
        self.start([request])
        return request

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer several prompts.

        Args:
            prompts: Texts, chats or lists of token ids.
            params: One for all, or one per prompt.

        Raises:
            UsageError, ClosedError: As in `submit`. All prompts are checked before the first is decoded.
        """
        if isinstance(prompts, str):
            raise UsageError("prompts must be a list of prompts, got one text.")
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts came with {len(params)} SamplingParams; give one, or one each.")
        return self._results([self.request(prompt, p) for prompt, p in zip(prompts, params, strict=True)])

    def infill(
        self, prefix: str, suffix: str, extra: Sequence[ExtraFile] = (), params: SamplingParams | None = None
    ) -> Completion:
        """Return the text between a prefix and a suffix, before other requests run.

        `infill_prompt` gives prompts for `submit` and `stream`.

        Args:
            extra: Parts of other files of the project, the most important last.

        Raises:
            UsageError, ClosedError: As in `submit`; or the target was not trained to fill in the middle.
        """
        tokenizer = self.target.tokenizer
        params = infill_params(tokenizer, params or SamplingParams())
        context = min(self.target.max_context, self.cache_tokens - self.slots_behind)
        room = context - params.max_new_tokens
        request = self.request(infill_prompt(tokenizer, prefix, suffix, extra, max_tokens=room), params)
        request.urgent = True
        return self._results([request])[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Iterator[Chunk]:
        """Answer one prompt, one chunk per step.

        Arguments and errors are those of `submit`; it raises before the first chunk.

        Returns:
            An iterator of chunks. Their texts and tokens, joined, are those of `generate`. Dropping the iterator before
            its end cancels the request.
        """
        chunks: SimpleQueue[Chunk] = SimpleQueue()
        return _chunks(self.submit(prompt, params, chunks.put, drafting, trace), chunks)

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Answer one prompt from a coroutine, as `stream`. Another thread tokenizes the prompt."""
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Chunk]()
        request = await asyncio.to_thread(self.request, prompt, params or SamplingParams(), drafting, trace)
        request.listener = lambda chunk: loop.call_soon_threadsafe(chunks.put_nowait, chunk)
        self.start([request])  # not in the other thread: a cancelled coroutine would leave the request running
        try:
            while True:
                chunk = await chunks.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            request.cancel()

    def _results(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests, and return their completions."""
        self.start(requests)
        try:
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Request:
        """Return a checked request that is not queued; `scheduler.add` takes it. Errors are those of `submit`."""
        ids = encode(prompt, self.target)
        check_request(ids, params, self.target)
        predicted = encode_prediction(params.prediction, self.target)
        slots = self.target.row_slots(len(ids) + params.max_new_tokens + self.slots_behind)
        if slots > self.cache_tokens:
            raise UsageError(
                f"A request of {len(ids)} and up to {params.max_new_tokens} new tokens needs {slots} slots with its "
                f"draft tokens, and the cache has {self.cache_tokens}; ask for fewer new tokens or a smaller tree, or "
                f"give the engine more cache_tokens or memory."
            )
        return Request(
            prompt=ids,
            params=params,
            tokenizer=self.target.tokenizer,
            stop_ids=end_token_ids(params, self.target),
            slots=slots,
            drafting=self.controller.tighter_limits(drafting),
            grammar=None if params.grammar is None else AnswerGrammar(params.grammar, self.target),
            prediction=Prediction(predicted) if predicted else None,
            max_depth=_max_depth(drafting),
            trace=trace,
        )

    def start(self, requests: Sequence[Request]) -> None:
        """Queue requests, and wake the worker."""
        with self._lock:
            if self._closed:
                raise ClosedError("The engine is closed; make a new one.")
            if requests:
                _working.add(self)
                self.worker.begin(self.scheduler, requests)

    # End.

    def cancel(self) -> None:
        """Cancel all requests. May be called from any thread."""
        scheduler = self._scheduler  # not the property, which would make one while another thread may be doing so
        if scheduler is not None:
            scheduler.cancel()

    def close(self) -> None:
        """Cancel all requests, free the memory, and store the learned step times for the next engine of this pair.

        Times of steps that other programs disturbed are not stored. Closing again does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            scheduler = self._scheduler
        if scheduler is not None:
            requests = scheduler.cancel()
            if self.worker.thread is not threading.current_thread():
                for request in requests:
                    request.wait()
                self.worker.join()
                self._scheduler = None
                if self._prefix_store is not None:
                    self._prefix_store.close()
        if self.controller.automatic:
            for drafter, learned in self.controller.learned():
                update(self.target, drafter, learned)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _max_depth(drafting: RequestDrafting | None) -> int | None:
    """Return the most draft tokens on a path within a request's limits, or None without a limit."""
    if drafting is None or (drafting.enabled and drafting.block_size is None):
        return None
    return drafting.block_size - 1 if drafting.enabled and drafting.block_size else 0


def _chunks(request: Request, chunks: SimpleQueue[Chunk]) -> Iterator[Chunk]:
    try:
        while True:
            chunk = chunks.get()
            yield chunk
            if chunk.finish_reason is not None:
                return
    finally:
        request.cancel()


_working: WeakSet[Engine] = WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_working):
        engine.close()
    end_all()  # also the workers of engines that have been garbage collected
