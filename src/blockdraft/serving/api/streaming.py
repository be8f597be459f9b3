"""Server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blockdraft.serving.core.errors import as_api_error

T = TypeVar("T")
QUIET_SECONDS = 10.0  # without an event, as while a tool call is written, until clients and proxies get a comment
LINE_ENDS = "\x85\u2028\u2029"  # line ends of Unicode that JSON does not escape


class ClientGone(Exception):
    """The client has disconnected before its answer."""


def data(value: Any) -> str:
    """A server-sent event, without characters at which some clients end a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for end in LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return f"data: {text}\n\n"


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of work for a client. The work is cancelled when the client disconnects.

    Raises:
        ClientGone: The client has disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task)
        await _end(gone)


async def stream(request: Request, events: AsyncIterator[str], stall_seconds: float) -> Response:
    """The response that sends these events. Errors before the first event are raised."""
    first = await until_gone(request, anext(events))
    return EventStream(request.url.path, first, events, stall_seconds)


class EventStream(Response):
    """Sends server-sent events as they come. An error meanwhile becomes an event, in the shape of the path's API.

    Args:
        path: Path of the request.
        first: The first event.
        events: The others; an empty text is no event, and shows that the answer goes on.
        stall_seconds: Seconds that the client may take nothing. The iterator is closed then, and when the client
            disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, path: str, first: str, events: AsyncIterator[str], stall_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._path, self._first, self._events, self._stall = path, first, events, stall_seconds
        self._since: float | None = None  # start of a send that the client has not taken yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not (sending.done() or gone.done() or self._stalls()):
                await asyncio.wait({sending, gone}, timeout=self._stall, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(sending)
            await _end(gone)
            await _close(self._events)

    def _stalls(self) -> bool:
        return self._since is not None and time.monotonic() - self._since > self._stall

    async def _send(self, send: Send) -> None:
        async def put(message: dict[str, Any]) -> None:
            self._since = time.monotonic()
            await send(message)
            self._since = None

        with suppress(OSError):  # the client has disconnected
            await put({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await put(_body(self._first))
            sent = time.monotonic()
            try:
                async for event in self._events:
                    if event or time.monotonic() > sent + QUIET_SECONDS:
                        await put(_body(event or ": the answer goes on\n\n"))
                        sent = time.monotonic()
            except OSError:
                raise
            except Exception as error:
                told = as_api_error(error).body(self._path)
                name = "event: error\n" if told.get("type") == "error" else ""
                await put(_body(name + data(told)))
            await put({"type": "http.response.body", "body": b"", "more_body": False})


def _body(event: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event.encode(), "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # marks it as read, or asyncio would log it


async def _close(events: AsyncIterator[str]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
