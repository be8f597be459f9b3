"""Streams that each send a request, read its answer, and send the next: a closed loop, in a process of its own.

Bytes are kept with their time and parsed only afterwards, so that parsing does not disturb the measurement. As a
program its argument is JSON, {"host", "port"}, and the protocol that of the peers: `load` takes {"bodies": [JSON
texts], "streams": n, "seconds": s, "first": index} and returns what was heard.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import h11
import numpy as np
from benchmarks.harness.process import REASON_LENGTH
from benchmarks.peers.adapters.serve import serve

CHAT = "/v1/chat/completions"
PIECE = 1 << 16  # most bytes that are read at a time


@dataclass
class Exchange:
    """A request and what came back.

    Attributes:
        sent: When the request was written, by `time.monotonic`.
        pieces: Bytes with the time at which they came.
        error: What cut it off, if anything did.
    """

    request: h11.Request
    sent: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


@dataclass
class Answer:
    """A parsed answer.

    Attributes:
        status: HTTP status; 0 where none came.
        whole: Whether it came to its end.
        events: Events of a stream with their times, without the last one, "[DONE]".
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


@dataclass
class Heard:
    """One request of a load. Times are seconds since the load began.

    Attributes:
        index: Which of the requests.
        times: When something of the answer came, and how much: tokens or characters.
        problem: What was wrong with the answer's form; empty where nothing was.
    """

    index: int
    sent: float
    times: list[tuple[float, float]] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    problem: str = ""


def post(host: str, port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> h11.Request:
    given = {"Host": f"{host}:{port}", "Content-Type": "application/json", "Connection": "close"} | dict(headers or {})
    return h11.Request(method="POST", target=path, headers=[*given.items(), ("Content-Length", str(len(body)))])


def request_bytes(request: h11.Request, body: bytes) -> bytes:
    connection = h11.Connection(h11.CLIENT)
    parts = [connection.send(request), connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage())]
    return b"".join(part for part in parts if part)


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
    """Parse an answer. One that was cut off is not `whole`."""
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
    """Return server-sent events with the time at which each was complete, and whether "[DONE]" came."""
    events, done, rest = list[tuple[float, Any]](), False, b""
    for moment, part in parts:
        *complete, rest = (rest + part.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in complete:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            done = done or data == b"[DONE]"
            if data and data != b"[DONE]":
                events.append((moment, json.loads(data)))
    return events, done


def streamed(index: int, began: float, sent: float, answer: Answer) -> Heard:
    """Return the content of a streamed chat completion."""
    heard = Heard(index, sent - began)
    if answer.status != 200:
        heard.problem = f"status {answer.status}: {answer.body}"[:REASON_LENGTH]
        return heard
    usage: dict[str, Any] = {}
    for moment, event in answer.events:
        if "error" in event:
            heard.problem = f"an error: {event['error']}"[:REASON_LENGTH]
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            heard.text += text
            heard.times += [(moment - began, float(len(text)))] if text else []
            heard.finish = choice.get("finish_reason") or heard.finish
        usage = event.get("usage") or usage
    heard.tokens, heard.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    missing = {"end": answer.whole, "[DONE]": answer.done, "finish_reason": heard.finish, "usage": usage}
    heard.problem = heard.problem or ", ".join(f"no {name}" for name, there in missing.items() if not there)
    return heard


@dataclass(frozen=True)
class Figures:
    """Figures of a load without its warm-up, in seconds.

    Attributes:
        requests: Those whose latencies count.
        first_median, first_p95: To the first piece of an answer; a piece is what comes at once, often several tokens.
        token_median, token_p95: Of a token, the mean of an answer's tokens after its first piece.
        piece_median, piece_p95: Between two pieces.
    """

    tokens_per_second: float
    requests: int
    first_median: float
    first_p95: float
    token_median: float
    token_p95: float
    piece_median: float
    piece_p95: float


def figures(all_heard: Sequence[Heard], begin: float, end: float) -> Figures:
    """Return the figures between two moments: tokens that came, and latencies of requests that were sent."""
    tokens, times = 0.0, {"first": list[float](), "token": list[float](), "piece": list[float]()}
    for heard in all_heard:
        amount = sum(part for _, part in heard.times)
        if not amount or heard.problem:
            continue
        tokens += heard.tokens * sum(part for moment, part in heard.times if begin <= moment < end) / amount
        if begin <= heard.sent < end:
            moments = [moment for moment, _ in heard.times]
            times["first"].append(moments[0] - heard.sent)
            times["piece"] += np.diff(moments).tolist()
            later = heard.tokens * (1 - heard.times[0][1] / amount)  # tokens that came after the first piece
            if later >= 1:
                times["token"].append((moments[-1] - moments[0]) / later)
    spread = {
        f"{name}_{what}": float(np.percentile(values, share)) if values else float("nan")
        for name, values in times.items()
        for what, share in (("median", 50), ("p95", 95))
    }
    return Figures(tokens / (end - begin), len(times["first"]), **spread)


async def closed_loop(
    host: str, port: int, bodies: Sequence[bytes], streams: int, seconds: float, first: int
) -> list[Heard]:
    """Put a server under load; requests under way at the end are read out. What goes wrong is a request's `problem`."""
    began, numbers = time.monotonic(), count(first)
    found = list[tuple[int, Exchange]]()

    async def stream() -> None:
        while time.monotonic() - began < seconds:
            index = next(numbers) % len(bodies)
            found.append((index, await exchange(host, port, CHAT, bodies[index])))

    await asyncio.gather(*(stream() for _ in range(streams)))
    all_heard = [streamed(index, began, each.sent, parse(each)) for index, each in found]
    for heard, (_, each) in zip(all_heard, found, strict=True):
        heard.problem = each.error or heard.problem
    return all_heard


def load(settings: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        how = {name: request[name] for name in ("streams", "seconds", "first")}
        bodies = [body.encode() for body in request["bodies"]]
        return {"heard": [asdict(each) for each in asyncio.run(closed_loop(**settings, bodies=bodies, **how))]}

    return {}, {"load": answer}


if __name__ == "__main__":
    serve(load)
