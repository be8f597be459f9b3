"""Chunks from the decoding thread to the event loop."""

import asyncio
import time
from types import SimpleNamespace

from blockdraft.serving.core.chunk_queue import PAUSE, ChunkDispatcher


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
