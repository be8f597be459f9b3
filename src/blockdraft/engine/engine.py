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

from blockdraft.decode.sampling import RandomNumbers
from blockdraft.drafters import Drafter, load_drafter, slots_behind
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.engine.adaptive.stored_costs import Costs, load, path, store
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.engine.memory import Memory
from blockdraft.engine.request import Chunk, Completion, Request
from blockdraft.engine.runner import Runner
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.text import AnswerText, check_request, encode
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

    Any thread may call it. A thread of its own decodes while there are requests, and ends with the last of them.
    Several engines may share one target: they take turns. After `close`, or the end of a `with` block, it takes no
    more.

    Args:
        target: From `load_target`.
        drafter: From `load_drafter`; None decodes plainly.
        max_batch_size: Most requests that are decoded together.
        drafting: How far to draft.
        memory_limit: Most bytes that the engine may take, see `memory_bytes`; None is what is free now.
        prefix_tokens: Tokens of ended requests that are remembered; a request that begins with them does not read them
            again. 0 remembers none. What requests that still run have in common is read once in any case.
        cache_tokens: Tokens of all requests, remembered ones included, that target and drafter have room for; None is
            as many as `max_batch_size` longest requests have, or as fit the memory.
        prefill_tokens: Most tokens of prompts that are read between two cycles of those that are decoded; None is 256
            on a CPU and 2048 elsewhere.

    Raises:
        UsageError: A number below 1, or a block longer than the drafter's.

    Attributes:
        cache_tokens: As above, a number.
        memory: What it takes.
        slots_behind: That each row needs behind its text.
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
                f"block_size is {drafting.block_size}; this drafter's blocks hold at most {drafter.block_size}."
            )
        if drafting.tree_budget != 0 and not target.has_trees:
            raise UsageError(
                f"tree_budget is {drafting.tree_budget}, and the backend {target.backend} scores chains only; use 0."
            )
        self.target, self.drafter, self.drafting = target, drafter, drafting
        self.controller = Controller(drafter, drafting, lambda: load(path(target, drafter)))
        self.max_batch_size, self.prefix_tokens, self.prefill_tokens = max_batch_size, prefix_tokens, prefill_tokens
        nodes = 1 + self.controller.most_guesses
        self.slots_behind = slots_behind(drafter, nodes) if drafting.tree_budget else nodes
        automatic = self.controller.automatic
        self.memory = Memory(target, drafter, max_batch_size, nodes, prefill_tokens, automatic, self.slots_behind)
        self._given_slots, self._limit = cache_tokens, memory_limit
        self._lock = threading.Lock()
        self._scheduler: Scheduler | None = None
        self._worker = worker_of(target)
        self._closed = False

    @property
    def cache_tokens(self) -> int:
        if self._given_slots is None:
            self._given_slots = self.memory.slots(self.prefix_tokens, self._limit)
        return self._given_slots

    def memory_bytes(self) -> int:
        """Memory that the engine takes at most: the stores of target and drafter, and what a step needs meanwhile. A
        CPU hands it out as it is used."""
        return self.memory.bytes(self.cache_tokens)

    @property
    def scheduler(self) -> Scheduler:
        """Who decides; made at first use, with the stores."""
        if self._scheduler is None:
            self.controller.prepare()
            runner = Runner(self.target, self.drafter, self.cache_tokens, self.drafting.sampled)
            self._scheduler = Scheduler(
                runner, self.controller, self.cache_tokens, self.max_batch_size, self.prefix_tokens, self.prefill_tokens
            )
        return self._scheduler

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
            listener: Called with each chunk of the answer, in the thread that decodes, so it should be quick. An
                exception in it ends the request.
            drafting: How far to draft for this request; None is as far as the engine drafts.
            trace: Let chunks tell of the cycles that they come from.

        Returns:
            The request: `result()` waits for the answer, `cancel()` ends it early.

        Raises:
            UsageError: The prompt is empty or too long for the context, the parameters name tokens that there are not,
                the grammar is not one that the target can follow, or the memory does not suffice.
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
        """Answer one prompt, a chunk a cycle. Arguments and errors as in `submit`, before the first chunk.

        Returns:
            An iterator of chunks; their texts and tokens, joined, are those of `generate`. If it is not read to its
            end, the request is cancelled.
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
        """`submit` for a coroutine: a long prompt is turned into tokens in another thread. The listener is called in
        the event loop."""
        loop = asyncio.get_running_loop()

        def in_loop(chunk: Chunk) -> None:
            assert listener is not None
            loop.call_soon_threadsafe(listener, chunk)

        request = await asyncio.to_thread(self.request, prompt, params or SamplingParams(), drafting, trace)
        request.listener = in_loop if listener else None
        self._begin([request])  # here, so that a coroutine that is called off leaves nothing running
        return request

    async def agenerate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Completion]:
        """`generate` for a coroutine; if that is cancelled, so are the requests."""
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

    def cancel(self) -> None:
        """Cancel all requests that there are. May be called from any thread."""
        scheduler = self._scheduler  # which this must not make: another thread may be about to
        if scheduler is not None:
            scheduler.cancel()

    def close(self) -> None:
        """Cancel what still runs, give back the memory, and keep what "auto" has learned of costs for the next engine
        of this pair. Closing again does nothing."""
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
        learned = self.controller.learned() if self.controller.automatic else None
        if learned is not None:
            self._keep(learned)

    def _keep(self, learned: Costs) -> None:
        """Write what cycles cost, for the next engine of this pair to begin with."""
        file = path(self.target, self.drafter)
        known = load(file)
        try:
            store(file, learned if known is None else known.updated(learned))
        except OSError as error:
            log.warning("What cycles cost was learned, and cannot be kept in %s: %s", file, describe(error))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Request:
        """A checked request, which `scheduler.add` takes. Errors as in `submit`."""
        ids = encode(prompt, self.target)
        check_request(ids, params, self.target)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.target.eos_token_ids)
        text = AnswerText(self.target.tokenizer, params.stop)
        slots = self.target.row_slots(len(ids) + params.max_new_tokens + self.slots_behind)
        if slots > self.cache_tokens:
            raise UsageError(
                f"A request of {len(ids)} and up to {params.max_new_tokens} new tokens needs {slots} slots with its "
                f"guesses, and there is room for {self.cache_tokens}; ask for fewer new tokens or a smaller tree, or "
                f"give the engine more cache_tokens or memory."
            )
        random, bounds = RandomNumbers(params.seed), self.controller.bounds(drafting)
        grammar = None if params.grammar is None else AnswerGrammar(params.grammar, self.target)
        return Request(
            ids, params, frozenset(stops), random, text, slots, drafting=bounds, grammar=grammar, trace=trace
        )

    def _begin(self, requests: Sequence[Request]) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("The engine is closed; make another one.")
            if requests:
                _working.add(self)
                self._worker.begin(self.scheduler, requests)


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
    end_all()  # of engines too that nobody holds any more
