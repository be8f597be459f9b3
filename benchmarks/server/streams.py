"""Streams that each send a request, read its answer, and send the next: a closed loop, in a process of its own.

The first argument is JSON, {"host", "port"}; the protocol is that of the peers. `load` takes {"bodies": [JSON texts],
"streams": n, "seconds": s, "first": index} and returns what was heard. Requests under way at the end are read out.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from itertools import count
from typing import Any

from benchmarks.peers.adapters.serve import serve
from benchmarks.server.heard import Heard, streamed
from benchmarks.server.wire import Exchange, exchange, parse

PATH = "/v1/chat/completions"


async def closed_loop(
    host: str, port: int, bodies: list[bytes], streams: int, seconds: float, first: int
) -> list[Heard]:
    """Raises nothing: what went wrong is a `problem` of its request."""
    began, numbers = time.monotonic(), count(first)
    found = list[tuple[int, Exchange]]()

    async def stream() -> None:
        while time.monotonic() - began < seconds:
            index = next(numbers) % len(bodies)
            found.append((index, await exchange(host, port, PATH, bodies[index])))

    await asyncio.gather(*(stream() for _ in range(streams)))
    heard = list[Heard]()
    for index, each in found:  # taken apart only now, when nothing is measured any more
        heard.append(streamed(index, began, each.sent, parse(each)))
        heard[-1].problem = each.error or heard[-1].problem
    return heard


def load(settings: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        bodies = [body.encode() for body in request["bodies"]]
        given = (request["streams"], request["seconds"], request["first"])
        heard = asyncio.run(closed_loop(settings["host"], settings["port"], bodies, *given))
        return {"heard": [asdict(each) for each in heard]}

    return {}, {"load": answer}


if __name__ == "__main__":
    serve(load)
