"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from blockdraft.serving.core.merge_streams import merge_streams


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_no_exception_ends_all_streams_too(count: int) -> None:
    class Panic(BaseException):
        pass

    ended = []

    async def stream(number: int) -> AsyncGenerator[int, None]:
        try:
            yield number
            if number == count - 1:
                raise Panic
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    async def work() -> None:
        async for _ in merge_streams([stream(number) for number in range(count)]):
            pass

    with pytest.raises(Panic):
        asyncio.run(asyncio.wait_for(work(), 10))
    assert sorted(ended) == list(range(count))
