"""Chunks on their way from the thread that decodes to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from blockdraft.engine import Chunk
from blockdraft.serving.core.errors import ApiError

# Seconds between two looks of the event loop at what has come. Small models have thousands of cycles a second, and each
# time that the loop wakes, the thread that decodes waits for the interpreter and its team for a core.
PAUSE = 0.005


class ChunkDispatcher:
    """Wakes the event loop for all chunks that have come since it last looked, however many requests and tokens they
    are of: at once for the first of them and for the last of an answer, else after a pause.

    Attributes:
        loop: That which runs where this is made.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[ChunkQueue, Chunk]] = deque()
        self._woken = False  # or about to look by itself

    def send(self, queue: ChunkQueue, chunk: Chunk) -> None:
        """Called in the thread that decodes."""
        self._arrived.append((queue, chunk))
        try:
            if not self._woken:
                self._woken = True
                self.loop.call_soon_threadsafe(self._look)
            elif chunk.finish_reason is not None:
                self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop has ended, and with it all who listened
            self._arrived.clear()

    def _look(self) -> None:
        self._woken = False  # before it looks, so that nothing stays behind
        if self._arrived:
            self._woken = True
            self._deliver()
            self.loop.call_later(PAUSE, self._look)

    def _deliver(self) -> None:
        while self._arrived:
            queue, chunk = self._arrived.popleft()
            queue.put(chunk)


class ChunkQueue:
    """Chunks of one request that have not been taken.

    Args:
        most: Tokens that may wait to be taken.
        joined: Whether chunks that wait are taken as one.
        seen: Called with each chunk as it comes.

    Attributes:
        full: Called when more has come than may wait.
    """

    def __init__(self, most: int, joined: bool, seen: Callable[[Chunk], object]) -> None:
        self._chunks: deque[Chunk] = deque()
        self._most, self._joined, self._seen = most, joined, seen
        self._unread = 0
        self._news = asyncio.Event()
        self.full: Callable[[], object] = lambda: None

    def put(self, chunk: Chunk) -> None:
        self._seen(chunk)
        self._unread += len(chunk.token_ids)
        if self._unread > self._most:
            self._chunks.clear()
            self.full()
        else:
            self._chunks.append(chunk)
        self._news.set()

    async def take(self) -> Chunk:
        """What has come, at least one chunk.

        Raises:
            ApiError: More has come than may wait.
        """
        await self._news.wait()
        if self._unread > self._most:
            raise ApiError(
                408, f"{self._unread} tokens of the answer wait to be read, and at most {self._most} may; read faster."
            )
        chunks = [self._chunks.popleft() for _ in range(len(self._chunks) if self._joined else 1)]
        self._unread -= sum(len(chunk.token_ids) for chunk in chunks)
        if not self._chunks:
            self._news.clear()
        return chunks[0] if len(chunks) == 1 else _as_one(chunks)


def _as_one(chunks: list[Chunk]) -> Chunk:
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        drafted=tuple(drafted for chunk in chunks for drafted in chunk.drafted),
        logprobs=None
        if chunks[-1].logprobs is None
        else tuple(logprob for chunk in chunks for logprob in chunk.logprobs or ()),
    )
