"""Delivers chunks from the decoding thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from blockdraft.engine import Chunk
from blockdraft.serving.errors import ApiError

# Seconds between two deliveries. Small models run thousands of decoding steps a second. Each wake-up of the event loop
# takes the interpreter from the decoding thread and a core from its thread team.
DELIVERY_INTERVAL = 0.005


class ChunkDispatcher:
    """Hands the chunks of all requests to their queues, inside the event loop.

    The first chunk after a pause and the last chunk of a choice wake the loop at once. All others are delivered
    together at the end of the interval.

    Attributes:
        loop: The event loop that was running when the dispatcher was created.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pending: deque[tuple[ChunkQueue, int, Chunk]] = deque()
        self._scheduled = False  # whether the loop will call `_tick`

    def send(self, queue: ChunkQueue, index: int, chunk: Chunk) -> None:
        """Send a chunk of choice `index` to its queue. Called in the decoding thread."""
        self._pending.append((queue, index, chunk))
        try:
            if not self._scheduled:
                self._scheduled = True
                self.loop.call_soon_threadsafe(self._tick)
            elif chunk.finish_reason is not None:
                self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and so are all readers
            self._pending.clear()

    def _tick(self) -> None:
        self._scheduled = False  # first, so that a chunk that arrives meanwhile schedules the next tick
        if self._pending:
            self._scheduled = True
            self._deliver()
            self.loop.call_later(DELIVERY_INTERVAL, self._tick)

    def _deliver(self) -> None:
        while self._pending:
            queue, index, chunk = self._pending.popleft()
            queue.put(index, chunk)


class ChunkQueue:
    """Unread chunks of all choices of one HTTP request.

    Args:
        max_unread: Maximum unread tokens of a choice.
        join: Whether unread chunks of a choice are read as one.
        on_chunk: Called with the choice and the chunk when a chunk arrives.

    Attributes:
        on_overflow: Called when a choice has more than `max_unread` unread tokens.
    """

    def __init__(self, max_unread: int, join: bool, on_chunk: Callable[[int, Chunk], object]) -> None:
        self._max_unread, self._join, self._on_chunk = max_unread, join, on_chunk
        self._chunks: deque[tuple[int, Chunk]] = deque()
        self._unread: Counter[int] = Counter()
        self._failure: ApiError | None = None
        self._arrived = asyncio.Event()
        self.on_overflow: Callable[[], object] = lambda: None

    def put(self, index: int, chunk: Chunk) -> None:
        self._on_chunk(index, chunk)
        self._unread[index] += len(chunk.token_ids)
        if self._unread[index] > self._max_unread:
            self.fail(
                ApiError(
                    408,
                    f"{self._unread[index]} tokens of the response are unread, and the limit is {self._max_unread}; "
                    f"read faster, or start the server with a larger --max-unread.",
                )
            )
            self.on_overflow()
        else:
            self._chunks.append((index, chunk))
        self._arrived.set()

    def fail(self, error: ApiError) -> None:
        """Let the reader get an error in the place of chunks, without waiting for the engine."""
        self._failure = error
        self._arrived.set()

    async def take(self, seconds: float | None = None) -> list[tuple[int, Chunk]]:
        """Wait for chunks and return all unread ones, each with the index of its choice.

        Args:
            seconds: Maximum time to wait; then the list is empty.

        Raises:
            ApiError: That of `fail`, or a choice has more than `max_unread` unread tokens (408).
        """
        # Not `asyncio.wait_for`, which before Python 3.12 may lose a cancellation.
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()
        if self._failure is not None:
            raise self._failure
        chunks = list(self._chunks)
        self._chunks.clear()
        self._unread.clear()
        self._arrived.clear()
        if not self._join:
            return chunks
        by_choice: dict[int, list[Chunk]] = {}
        for index, chunk in chunks:
            by_choice.setdefault(index, []).append(chunk)
        return [(index, _join(several)) for index, several in by_choice.items()]


def _join(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        drafted=tuple(drafted for chunk in chunks for drafted in chunk.drafted),
        logprobs=None
        if chunks[-1].logprobs is None
        else tuple(logprob for chunk in chunks for logprob in chunk.logprobs or ()),
    )
