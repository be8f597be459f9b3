"""Chunks from the decoding thread to the event loop, one queue for each request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from blockdraft.engine import Chunk
from blockdraft.serving.core.errors import ApiError

# Seconds between two deliveries. Small models run thousands of cycles a second, and each time that the event loop
# wakes, the decoding thread waits for the interpreter, and its team of threads for a core.
PAUSE = 0.005


class ChunkDispatcher:
    """Hands chunks of all requests to their queues, in the event loop.

    The loop is woken at once for the first chunk after a pause and for the last chunk of an answer. All others wait for
    the end of the pause and are then delivered together.

    Attributes:
        loop: The event loop that runs where this is made.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[ChunkQueue, Chunk]] = deque()
        self._woken = False  # whether `_look` is scheduled

    def send(self, queue: ChunkQueue, chunk: Chunk) -> None:
        """Send a chunk to its queue. Called in the decoding thread."""
        self._arrived.append((queue, chunk))
        try:
            if not self._woken:
                self._woken = True
                self.loop.call_soon_threadsafe(self._look)
            elif chunk.finish_reason is not None:
                self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop has ended, and so have all readers
            self._arrived.clear()

    def _look(self) -> None:
        self._woken = False  # before looking, so that a chunk which arrives meanwhile schedules the next look
        if self._arrived:
            self._woken = True
            self._deliver()
            self.loop.call_later(PAUSE, self._look)

    def _deliver(self) -> None:
        while self._arrived:
            queue, chunk = self._arrived.popleft()
            queue.put(chunk)


class ChunkQueue:
    """Chunks of one request that have not been read.

    Args:
        most: Most tokens that may wait.
        joined: Whether all waiting chunks are read as one.
        seen: Called with each chunk as it arrives.

    Attributes:
        full: Called when more than `most` tokens wait.
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
        """The next chunk, or all that wait joined into one; waits for the first.

        Raises:
            ApiError: More than `most` tokens wait.
        """
        await self._news.wait()
        if self._unread > self._most:
            raise ApiError(
                408,
                f"{self._unread} tokens of the answer are unread, and the limit is {self._most}; read faster, or "
                f"start the server with a larger --max-unread.",
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
