"""Sends responses whole or as server-sent events, and cancels the work when a client disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from blockdraft.serving.errors import ApiError, as_api_error
from blockdraft.serving.request import Event, GenerationRequest, PrefillProgress, Started, ToolCallDelta
from blockdraft.serving.service import Service

T = TypeVar("T")
QUIET_SECONDS = 10.0  # without an event, as while a tool call is generated, until the client gets a keep-alive
SKIPPED = "X-Blockdraft-Skipped"
UNICODE_LINE_ENDS = "\x85\u2028\u2029"  # JSON does not escape them, and some clients split lines at them


class ClientDisconnected(Exception):
    """The client disconnected before its response."""


class ApiResponse(ABC):
    """Builds the response of one API from the events of a generation.

    Attributes:
        keep_alive: Server-sent event that tells a client that the stream is alive.
        has_comments: Whether a stream may hold comments, which clients ignore.
        tail: Text after the last event of a stream.
        media_type: Media type of a stream.
        warnings: Parts of the request that were left out. The response, or the first event of its stream, names them.
    """

    keep_alive = ": keep-alive\n\n"
    has_comments = True
    tail = ""
    media_type = "text/event-stream"
    warnings: Sequence[str] = ()

    @abstractmethod
    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        """Add an event of choice `index`. Return the stream events that it becomes."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the complete response."""

    def end(self) -> Sequence[dict[str, Any]]:
        """Return the stream events after those of all choices."""
        return ()

    def fail(self, error: ApiError) -> Sequence[dict[str, Any]]:
        """Return the stream events for an error in a stream."""
        return (error.body(""),)

    def frame(self, value: dict[str, Any]) -> str:
        """Return a stream event as text."""
        return data(value)

    def take_warnings(self) -> dict[str, Any]:
        """Return the field of the warnings, once, or no field if there are none."""
        warnings, self.warnings = self.warnings, ()
        return {"warnings": list(warnings)} if warnings else {}


class NamedEventsResponse(ApiResponse):
    """A response whose stream events are named by their `type`."""

    def frame(self, value: dict[str, Any]) -> str:
        return f"event: {value['type']}\n{data(value)}"


def json_line(value: Any) -> str:
    """Return JSON in one line, without the characters at which some clients end a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for end in UNICODE_LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text


def data(value: Any) -> str:
    """Return a server-sent event."""
    return f"data: {json_line(value)}\n\n"


async def respond(
    http: Request,
    service: Service,
    requests: Sequence[GenerationRequest],
    response: ApiResponse,
    stream: bool | None,
    num_skipped: int = 0,
) -> Response:
    """Generate and send a response. Errors before the first event are raised.

    Args:
        num_skipped: Parts of the request that only other servers know and this one skipped, for a header.

    Raises:
        ClientDisconnected: The client disconnected before the first event or, without streaming, before the end.
    """
    headers = {SKIPPED: str(num_skipped)} if num_skipped else {}
    source = f"{http.client.host if http.client else 'a client'} {http.url.path}"
    requests = [replace(request, source=source) for request in requests]
    if service.settings.lookup_outputs:
        scope = _scope(http)
        requests = [replace(request, params=replace(request.params, lookup_scope=scope)) for request in requests]
    if not stream:
        return JSONResponse(await until_disconnect(http, _complete(service, requests, response)), headers=headers)
    frames = _frames(service, requests, response)
    first = await until_disconnect(http, anext(frames))
    sent = EventStream(first, frames, response, service.settings.stall_seconds)
    sent.headers.update(headers)
    return sent


def _scope(http: Request) -> str:
    """Return the name of a client, whose earlier outputs `lookup` may draft from: a digest of its address and key."""
    host = http.client.host if http.client else ""
    keys = [http.headers.get(name, "") for name in ("authorization", "x-api-key")]
    return sha256(json.dumps([host, *keys]).encode()).hexdigest()  # headers may be long, and thousands are kept


async def _complete(service: Service, requests: Sequence[GenerationRequest], response: ApiResponse) -> dict[str, Any]:
    async with aclosing(service.generate(requests)) as events:
        async for index, event in events:
            if not isinstance(event, PrefillProgress | ToolCallDelta):
                await _add(service, response, index, event)
    return response.body() | response.take_warnings()


async def _frames(
    service: Service, requests: Sequence[GenerationRequest], response: ApiResponse
) -> AsyncGenerator[str, None]:
    """Yield the text of the stream. An empty text shows that the generation goes on."""
    started, progress = False, PrefillProgress(0, 0)
    try:
        async with aclosing(service.generate(requests)) as events:
            async for index, event in events:
                if isinstance(event, PrefillProgress):
                    text = f": prefill {event.num_prefilled}/{event.num_tokens}\n\n"
                    text = text if response.has_comments and event != progress else ""
                    progress = event
                else:
                    values = list(await _add(service, response, index, event))
                    if values:
                        values[0] = {**values[0], **response.take_warnings()}
                    text = "".join(map(response.frame, values))
                started = True
                yield text
        yield "".join(map(response.frame, response.end())) + response.tail
    except Exception as error:
        if not started:  # the HTTP status can still report it
            raise
        yield "".join(map(response.frame, response.fail(as_api_error(error))))


async def _add(service: Service, response: ApiResponse, index: int, event: Event) -> Sequence[dict[str, Any]]:
    if isinstance(event, Started) and index == 0:
        response.warnings = event.warnings
    if isinstance(event, Started) and event.prompt_logprobs:  # formatting those of a long prompt is slow
        return await service.in_thread(response.add, index, event)
    return response.add(index, event)


async def until_disconnect(http: Request, work: Awaitable[T]) -> T:
    """Return the result of work for a client. Cancel the work when the client disconnects.

    Raises:
        ClientDisconnected: The client disconnected.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnect(http.receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await _cancel(task)
        await _cancel(disconnect)


class EventStream(StreamingResponse):
    """Sends server-sent events. Closes the generator when the client disconnects or stalls.

    Args:
        first: Text of the first event.
        frames: Texts of the other events; an empty text is no event.
        response: Its `keep_alive` replaces an empty text after `QUIET_SECONDS` without an event.
        stall_seconds: Maximum seconds in which the client reads nothing.
    """

    def __init__(
        self, first: str, frames: AsyncGenerator[str, None], response: ApiResponse, stall_seconds: float
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        texts = self._texts(first, frames, response)
        super().__init__(texts, headers=headers, media_type=response.media_type)
        self._frames, self._stall_seconds = frames, stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._frames.aclose()

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(self._stall_seconds):
                await send(message)

        with suppress(OSError):  # the client disconnected or stalls
            await super().stream_response(send_in_time)

    @staticmethod
    async def _texts(first: str, frames: AsyncIterator[str], response: ApiResponse) -> AsyncIterator[str]:
        if first:
            yield first
        last = time.monotonic()
        async for text in frames:
            if text or time.monotonic() > last + QUIET_SECONDS:
                yield text or response.keep_alive
                last = time.monotonic()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # marks it as read, or asyncio would log it
