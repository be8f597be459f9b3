"""The ways to ask an engine: all at once, in chunks, or to be told later, each for threads and for coroutines."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from blockdraft.engine.request import Chunk, Completion, Request
from blockdraft.errors import UsageError
from blockdraft.types import Prompt, RequestDrafting, SamplingParams

Params: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"


class Asking(ABC):
    """What `Engine` offers its callers, over two methods of its own."""

    @abstractmethod
    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        drafting: RequestDrafting | None = None,
        trace: bool = False,
    ) -> Request:
        """A checked request that has not begun. Errors as in `submit`."""

    @abstractmethod
    def _begin(self, requests: Sequence[Request]) -> None:
        """Queue requests, and see to it that someone decodes them."""

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


def _chunks(request: Request, chunks: SimpleQueue[Chunk]) -> Iterator[Chunk]:
    try:
        while True:
            chunk = chunks.get()
            yield chunk
            if chunk.finish_reason is not None:
                return
    finally:
        request.cancel()
