"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Values of several streams as they arrive, each with the number of its stream.

    An error in one stream ends all of them, and so does closing this generator.
    """
    if len(streams) == 1:
        try:
            async for value in streams[0]:
                yield 0, value
        finally:
            await streams[0].aclose()
        return
    news: asyncio.Queue[tuple[int, T | BaseException | None]] = asyncio.Queue(len(streams))

    async def read(number: int) -> None:
        try:
            async for value in streams[number]:
                await news.put((number, value))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # panics of Rust code are not of the class Exception
            await news.put((number, error))
        else:
            await news.put((number, None))

    tasks = [asyncio.ensure_future(read(number)) for number in range(len(streams))]
    try:
        running = len(tasks)
        while running:
            number, new = await news.get()
            if isinstance(new, BaseException):
                raise new
            if new is None:
                running -= 1
            else:
                yield number, new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
