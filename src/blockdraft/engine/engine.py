"""The engine: what users call, from any thread or coroutine."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import TypeAlias
from weakref import WeakSet

from blockdraft.drafters import Drafter, load_drafter, slots_behind
from blockdraft.engine.adaptive.joint import JointController
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.adaptive.stored_costs import Costs, load, pair_of, path, store
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.engine.memory import Memory
from blockdraft.engine.request import Chunk, Completion, Request
from blockdraft.engine.runner import Runner
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.text import check_request, encode
from blockdraft.engine.worker import end_all, worker_of
from blockdraft.errors import ClosedError, UsageError, describe
from blockdraft.targets import Target
from blockdraft.types import Drafting, Prompt, RequestDrafting, SamplingParams

log = logging.getLogger(__name__)

PREFILL_TOKENS = {"cpu": 256}  # by kind of device
MOST_PREFILL_TOKENS = 2048

Params: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"


class Engine:
    """Decodes with a target and a drafter; the output is the target's own.

    Any thread may call it. A worker thread decodes while there are requests and exits soon after the last one. Engines
    that share a target take turns. After `close`, or the end of a `with` block, an engine refuses new requests.

    Args:
        target: From `load_target`.
        drafter: From `load_drafter`; None decodes plainly.
        max_batch_size: Most requests that are decoded together.
        drafting: How far to draft.
        memory_limit: Most bytes that the engine may take, see `memory_bytes`; None is the memory that is free now.
        prefix_tokens: Most tokens of finished requests that stay in memory, so that a request with the same beginning
            need not read it again; 0 keeps none. Running requests share a common beginning in any case.
        cache_tokens: Tokens that the caches of target and drafter hold, those of finished requests included; None is
            room for `max_batch_size` requests of the longest kind, or what the memory allows.
        prefill_tokens: Most tokens of prompts that are read between two cycles; None is 256 on a CPU and 2048
            elsewhere.

    Raises:
        UsageError: A number is too small, the block is longer than the drafter's, or the target cannot score trees.

    Attributes:
        memory: What the engine takes, by what it is taken for.
        slots_behind: Cache slots that each row needs behind its text.
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
    ) -> None:
        if prefill_tokens is None:
            prefill_tokens = PREFILL_TOKENS.get(target.device.type, MOST_PREFILL_TOKENS)
        for name, value, least in (
            ("max_batch_size", max_batch_size, 1),
            ("prefix_tokens", prefix_tokens, 0),
            ("cache_tokens", 1 if cache_tokens is None else cache_tokens, 1),
            ("prefill_tokens", prefill_tokens, 1),
        ):
            if value < least:
                raise UsageError(f"{name} is {value}; it must be at least {least}.")
        drafting = drafting or Drafting()
        drafter = load_drafter("none", target=target) if drafter is None else drafter
        if not hasattr(drafter, "propose"):
            raise UsageError(f"drafter is {drafter!r}; give what load_drafter returns, or None to decode plainly.")
        if isinstance(drafting.block_size, int) and drafting.block_size > drafter.block_size:
            raise UsageError(
                f"block_size is {drafting.block_size}; this drafter's blocks hold at most {drafter.block_size} tokens."
            )
        if drafting.tree_budget != 0 and not target.has_trees:
            raise UsageError(
                f"tree_budget is {drafting.tree_budget}, and the backend {target.backend} scores chains only; use 0."
            )
        self.target, self.drafter, self.drafting = target, drafter, drafting
        if JointController.suits(drafter, drafting):
            self.controller: Controller = JointController(drafter, drafting, self._costs_of)
        else:
            self.controller = Controller(drafter, drafting, lambda: load(path(target, drafter)))
        self.max_batch_size, self.prefix_tokens, self.prefill_tokens = max_batch_size, prefix_tokens, prefill_tokens
        nodes = 1 + self.controller.max_draft_tokens
        self.slots_behind = slots_behind(drafter, nodes) if drafting.tree_budget else nodes
        self.memory = Memory(
            target=target,
            drafter=drafter,
            max_batch_size=max_batch_size,
            nodes=nodes,
            prefill_tokens=prefill_tokens,
            automatic=self.controller.automatic,
            behind=self.slots_behind,
        )
        self._cache_tokens, self._memory_limit = cache_tokens, memory_limit
        self._lock = threading.Lock()
        self._scheduler: Scheduler | None = None
        self._worker = worker_of(target)
        self._closed = False

    @property
    def cache_tokens(self) -> int:
        """Tokens that the caches of target and drafter hold."""
        if self._cache_tokens is None:
            self._cache_tokens = self.memory.slots(self.prefix_tokens, self._memory_limit)
        return self._cache_tokens

    def memory_bytes(self) -> int:
        """Most memory that the engine takes: the caches of target and drafter, and what a step needs besides. A CPU
        hands it out as it is used."""
        return self.memory.bytes(self.cache_tokens)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; made at first use, which allocates the caches."""
        if self._scheduler is None:
            self.controller.prepare()
            self._scheduler = Scheduler(
                runner=Runner(self.target, self.drafter, slots=self.cache_tokens, sampled=self.drafting.sampled),
                controller=self.controller,
                slots=self.cache_tokens,
                max_batch_size=self.max_batch_size,
                prefix_tokens=self.prefix_tokens,
                prefill_tokens=self.prefill_tokens,
            )
        return self._scheduler

    # Asking for answers.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        listener: Callable[[Chunk], object] | None = None,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Request:
        """Begin to answer one prompt, and return at once.

        Args:
            listener: Called with each chunk of the answer, in the worker thread, so it should be quick. An exception
                in it ends the request.
            drafting: How far to draft for this request; None is as far as the engine drafts.
            trace: Report in each chunk the cycle that it comes from.

        Returns:
            The request: `result()` waits for the answer, `cancel()` ends it early.

        Raises:
            UsageError: The prompt is empty or too long for the context, the parameters name tokens outside the
                vocabulary, the target cannot follow the grammar, or the request needs more cache than there is.
            ClosedError: The engine is closed.
        """
        request = self.request(prompt, params or SamplingParams(), drafting, trace)
        request.listener = listener
        self._begin([request])
        return request

    def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Completion]:
        """Answer several prompts.

        Args:
            prompts: Texts, chats or lists of token ids.
            params: One for all, or one a prompt.

        Raises:
            UsageError, ClosedError: As in `submit`. All prompts are checked before the first is decoded.
        """
        requests = self._requests(prompts, params)
        self._begin(requests)
        try:
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Iterator[Chunk]:
        """Answer one prompt, a chunk a cycle. Arguments and errors are those of `submit`, and errors come before the
        first chunk.

        Returns:
            An iterator of chunks. Their texts and tokens, joined, are those of `generate`. Dropping the iterator before
            its end cancels the request.
        """
        chunks: SimpleQueue[Chunk] = SimpleQueue()
        return _chunks(self.submit(prompt, params, chunks.put, drafting, trace), chunks)

    async def asubmit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        listener: Callable[[Chunk], object] | None = None,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Request:
        """`submit` for a coroutine: another thread tokenizes the prompt, and the event loop calls the listener."""
        loop = asyncio.get_running_loop()

        def in_loop(chunk: Chunk) -> None:
            assert listener is not None
            loop.call_soon_threadsafe(listener, chunk)

        request = await asyncio.to_thread(self.request, prompt, params or SamplingParams(), drafting, trace)
        request.listener = in_loop if listener else None
        self._begin([request])  # not in the other thread: a cancelled coroutine would leave the request running
        return request

    async def agenerate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Completion]:
        """`generate` for a coroutine; cancelling it cancels the requests."""
        requests = await asyncio.to_thread(self._requests, prompts, params)
        loop, ended = asyncio.get_running_loop(), asyncio.Queue[None]()

        def listen(chunk: Chunk) -> None:
            if chunk.finish_reason is not None:
                loop.call_soon_threadsafe(ended.put_nowait, None)

        for request in requests:
            request.listener = listen
        self._begin(requests)
        try:
            for _ in requests:
                await ended.get()
        finally:
            for request in requests:
                request.cancel()
        return [request.result() for request in requests]

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> AsyncIterator[Chunk]:
        """`stream` for a coroutine."""
        chunks = asyncio.Queue[Chunk]()
        request = await self.asubmit(prompt, params, chunks.put_nowait, drafting, trace)
        try:
            while True:
                chunk = await chunks.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            request.cancel()

    def _requests(self, prompts: Sequence[Prompt], params: Params) -> list[Request]:
        if isinstance(prompts, str):
            raise UsageError("prompts is one text; give a list of prompts.")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts came with {len(each)} SamplingParams; give one, or one each.")
        return [self.request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Request:
        """A checked request that has not begun; `scheduler.add` takes it. Errors as in `submit`."""
        ids = encode(prompt, self.target)
        check_request(ids, params, self.target)
        slots = self.target.row_slots(len(ids) + params.max_new_tokens + self.slots_behind)
        if slots > self.cache_tokens:
            raise UsageError(
                f"A request of {len(ids)} and up to {params.max_new_tokens} new tokens needs {slots} slots with its "
                f"guesses, and the cache has {self.cache_tokens}; ask for fewer new tokens or a smaller tree, or give "
                f"the engine more cache_tokens or memory."
            )
        own_stop_ids = frozenset() if params.ignore_eos else self.target.eos_token_ids
        return Request(
            prompt=ids,
            params=params,
            tokenizer=self.target.tokenizer,
            stop_ids=own_stop_ids | set(params.stop_token_ids),
            slots=slots,
            drafting=self.controller.bounds(drafting),
            grammar=None if params.grammar is None else AnswerGrammar(params.grammar, self.target),
            trace=trace,
        )

    def _begin(self, requests: Sequence[Request]) -> None:
        """Queue requests, and see to it that the worker decodes them."""
        with self._lock:
            if self._closed:
                raise ClosedError("The engine is closed; make another one.")
            if requests:
                _working.add(self)
                self._worker.begin(self.scheduler, requests)

    # Ending.

    def cancel(self) -> None:
        """Cancel all requests. May be called from any thread."""
        scheduler = self._scheduler  # not the property, which would make one while another thread may be doing so
        if scheduler is not None:
            scheduler.cancel()

    def close(self) -> None:
        """Cancel what runs, free the memory, and store the measured cycle times for the next engine of this pair.
        Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            scheduler = self._scheduler
        if scheduler is not None:
            requests = scheduler.cancel()
            if self._worker.thread is not threading.current_thread():
                for request in requests:
                    request.wait()
                self._worker.join()
                self._scheduler = None
        if self.controller.automatic:
            for drafter, learned in self.controller.learned():
                self._store_costs(drafter, learned)

    def _costs_of(self, part: Drafter) -> Costs | None:
        """What is stored of one drafter of a combination; else, of a model, what was measured of all together."""
        return load(path(self.target, part)) or (load(path(self.target, self.drafter)) if part.has_pass else None)

    def _store_costs(self, drafter: Drafter, learned: Costs) -> None:
        file = path(self.target, drafter)
        known = load(file)
        try:
            store(file, learned if known is None else known.updated(learned), pair_of(self.target, drafter))
        except OSError as error:
            log.warning("The measured cycle times cannot be stored in %s: %s", file, describe(error))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
