"""One HTTP request and when which bytes came back. Answers are taken apart afterwards, so that this costs a measurement
next to nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import h11

PIECE = 1 << 16  # most bytes that are read at a time


@dataclass
class Exchange:
    """A request and what came back.

    Attributes:
        sent: When the request was written; all times are those of `time.monotonic`.
        pieces: Bytes with the time at which they came.
        error: What broke it off, if anything did.
    """

    request: h11.Request
    sent: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


@dataclass
class Answer:
    """An answer, taken apart.

    Attributes:
        status: HTTP status; 0 where none came.
        whole: Whether it came to its end.
        body: All of it, as text.
        events: Where it was streamed, its events with their times, without the last one, "[DONE]".
        done: Whether that one came.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = False
    body: str = ""
    events: list[tuple[float, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(request: h11.Request, body: bytes) -> bytes:
    connection = h11.Connection(h11.CLIENT)
    parts = [connection.send(request), connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage())]
    return b"".join(part for part in parts if part)


def post(host: str, port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> h11.Request:
    given = {"Host": f"{host}:{port}", "Content-Type": "application/json", "Connection": "close"} | dict(headers or {})
    given["Content-Length"] = str(len(body))
    return h11.Request(method="POST", target=path, headers=list(given.items()))


async def exchange(host: str, port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Exchange:
    """Send a request on a connection of its own and read until that is closed."""
    found = Exchange(post(host, port, path, body, headers))
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        found.sent = time.monotonic()
        writer.write(request_bytes(found.request, body))
        while piece := await reader.read(PIECE):
            found.pieces.append((time.monotonic(), piece))
    except OSError as error:
        found.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return found


def parse(found: Exchange) -> Answer:
    """Take an answer apart. One that was broken off is not `whole`."""
    answer, parts = Answer(), list[tuple[float, bytes]]()
    connection = h11.Connection(h11.CLIENT)
    connection.send(found.request)
    try:
        for moment, piece in [*found.pieces, (0.0, b"")]:
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    answer.status = event.status_code
                    answer.headers = {name.decode().lower(): value.decode() for name, value in event.headers}
                elif isinstance(event, h11.Data):
                    parts.append((moment, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    answer.whole = True
                elif isinstance(event, h11.ConnectionClosed):
                    break
    except h11.RemoteProtocolError:
        answer.whole = False
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        answer.events, answer.done = _events(parts)
    answer.body = b"".join(part for _, part in parts).decode(errors="replace")
    return answer


def _events(parts: list[tuple[float, bytes]]) -> tuple[list[tuple[float, Any]], bool]:
    """Server-sent events, each with the time at which it was complete, and whether "[DONE]" came."""
    events, done, rest = list[tuple[float, Any]](), False, b""
    for moment, part in parts:
        *complete, rest = (rest + part.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in complete:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data == b"[DONE]":
                done = True
            elif data:
                events.append((moment, json.loads(data)))
    return events, done
