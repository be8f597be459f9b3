"""Chunks from the decoding thread to the event loop."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from blockdraft.engine.request import Chunk
from blockdraft.engine.stats import Stats
from blockdraft.serving.core.chunk_queue import PAUSE, ChunkDispatcher, ChunkQueue
from blockdraft.serving.core.errors import ApiError


def test_chunks_come_in_bundles_and_the_last_one_at_once() -> None:
    async def work() -> None:
        dispatcher, looked = ChunkDispatcher(), list[str]()
        queue = SimpleNamespace(put=lambda chunk: looked.append(chunk.text))

        def send(text: str, reason: str | None = None) -> None:
            dispatcher.send(queue, SimpleNamespace(text=text, finish_reason=reason))  # type: ignore[arg-type]

        send("a")
        await asyncio.sleep(0)
        assert looked == ["a"]
        send("b")
        await asyncio.sleep(0)
        assert looked == ["a"]  # it waits
        send("c", "stop")
        await asyncio.sleep(0)
        assert looked == ["a", "b", "c"]
        send("d")
        ends = time.monotonic() + 20
        while len(looked) < 4:
            assert time.monotonic() < ends
            await asyncio.sleep(PAUSE)

    asyncio.run(work())


def test_a_full_queue_says_so_to_both_sides() -> None:
    async def work() -> None:
        queue, told = ChunkQueue(3, joined=False, seen=lambda chunk: None), list[str]()
        queue.full = lambda: told.append("full")
        queue.put(Chunk("ab", (1, 2), (False, False), Stats()))
        assert not told and (await queue.take()).token_ids == (1, 2)
        queue.put(Chunk("cde", (3, 4, 5), (False,) * 3, Stats()))
        assert not told
        queue.put(Chunk("f", (6,), (False,), Stats()))
        assert told == ["full"]
        with pytest.raises(ApiError, match="4 tokens of the answer are unread, and the limit is 3"):
            await queue.take()

    asyncio.run(work())
