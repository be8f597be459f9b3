"""Faults of clients and of the engine while others are being answered, whose answers must not change.

As a program this is `blockdraft serve` with a target that fails where a token of `MARKER` is read or generated, so that
only that request fails.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.command import tell
from benchmarks.server import chats
from benchmarks.server.client import CHAT, Answer, exchange, parse, post, request_bytes
from benchmarks.server.servers import HOST, Server, ours
from tests.server_targets import BUNDLED, pair_with_tools

MARKER = "\x07"
MODEL = "pair"
ROWS, QUEUE, STREAMS = 4, 6, 3  # of a server; and streams that go on beside a fault
PATIENCE = 120.0
MANY = 400  # tokens of an answer that goes on for a while
PATHS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize")
HEAD = b'{"model": "pair", "messages": [{"role": "user", "content": '
GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "bytes": bytes(range(256)),
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "deep": b'{"messages":' + b"[" * 100_000,
    "a deep whole": b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "NaN": HEAD + b'"x"}], "temperature": NaN}',
    "half a character": HEAD + b'"\\ud800"}], "max_tokens": 4}',
    "no messages": b'{"model": "pair", "messages": []}',
    "a huge number": HEAD + b'"x"}], "max_tokens": ' + b"9" * 400 + b"}",
    "a huge text": HEAD + b'"' + b"x" * 3_000_000 + b'"}]}',
}
MAYBE = ("half a character", "a huge number")  # for routes that ignore the body
NO_HTTP = (
    b"\x16\x03\x01" + bytes(200),
    b"GET\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"A" * 100_000,
)


class Load:
    """Streams whose answers are known, that go on while something else happens.

    Args:
        known: For each of some requests, its answer.
    """

    def __init__(self, server: Server, known: Sequence[tuple[bytes, str]]) -> None:
        self.port, self.known, self.problems, self.answered = server.port, known, list[str](), 0

    @asynccontextmanager
    async def running(self, streams: int = STREAMS) -> Any:
        ended = asyncio.Event()

        async def stream(number: int) -> None:
            while not ended.is_set():
                body, text = self.known[(number := number + 1) % len(self.known)]
                answer = await ask(self.port, body)
                said = text_of(answer)
                self.answered += answer.status == 200
                if answer.status not in (200, 429) or (answer.status == 200 and said != text):
                    self.problems.append(f"a bystander got {answer.status}, {(said or answer.body)[:100]!r}")
                if answer.status == 429:
                    await asyncio.sleep(0.1)

        tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
        try:
            yield self
        finally:
            ended.set()
            await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)


async def ask(port: int, body: bytes, path: str = CHAT) -> Answer:
    return parse(await asyncio.wait_for(exchange(HOST, port, path, body), PATIENCE))


def chat(text: str, tokens: int = 32, stream: bool = True, **more: Any) -> bytes:
    given = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    return json.dumps(chats.body(given, MODEL, None, stream) | more).encode()


def long_chat(tokens: int = MANY, **more: Any) -> bytes:
    return chat("Count to a hundred.", tokens, ignore_eos=True, **more)


def text_of(answer: Answer) -> str:
    if answer.events:
        deltas = [choice["delta"] for _, event in answer.events for choice in event.get("choices", ())]
        return "".join(delta.get("content") or "" for delta in deltas)
    return str(answer.json["choices"][0]["message"]["content"]) if answer.status == 200 else ""


async def idle(server: Server, seconds: float = 10.0) -> list[str]:
    """Return a failure if requests still run or wait after some seconds."""
    until = time.monotonic() + seconds
    while (left := await asyncio.to_thread(server.busy)) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return [f"requests are left: {left}"] if left else []


async def vanishing(server: Server) -> list[str]:
    """Disconnect after a few bytes of a response, before any, and in the middle of the request."""
    whole, unstreamed = (
        request_bytes(post(HOST, server.port, CHAT, body), body) for body in (long_chat(), long_chat(stream=False))
    )
    for sent, read in [(whole, 200), (whole, 0), (whole[: len(whole) // 2], 0), (unstreamed, 0), (whole[:20], 0)] * 4:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        with suppress(OSError):
            writer.write(sent)
            await writer.drain()
            if read:
                await asyncio.wait_for(reader.read(read), PATIENCE)
            # closed at once, with what is unread, as by a program that is killed
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await asyncio.sleep(0.02)
    return []


async def slow_readers(server: Server) -> list[str]:
    """Read responses a few bytes at a time, with the smallest window that the system allows."""
    body, loop = long_chat(), asyncio.get_running_loop()

    async def slowly() -> list[str]:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.setblocking(False)
            await loop.sock_connect(raw, (HOST, server.port))
            await loop.sock_sendall(raw, request_bytes(post(HOST, server.port, CHAT, body), body))
            first = b""
            for _ in range(40):
                first += await asyncio.wait_for(loop.sock_recv(raw, 64), PATIENCE)
                await asyncio.sleep(0.05)
        return [] if b" 200 " in first[:20] else [f"a slow reader got {first[:100]!r}"]

    return sum(await asyncio.gather(*(slowly() for _ in range(ROWS))), [])


async def garbage(server: Server) -> list[str]:
    """Send invalid bodies, and bytes that are not HTTP."""
    problems = []
    for name, body in GARBAGE.items():
        for path in PATHS:
            answer = await ask(server.port, body, path)
            if not (400 <= answer.status < 500 or (name in MAYBE and answer.status == 200)):
                problems.append(f"{name} at {path} was answered with {answer.status}: {answer.body[:100]!r}")
            elif answer.status != 200 and "error" not in answer.json:
                problems.append(f"{name} at {path}: {answer.body[:100]!r} is not in the shape of an error")
    for raw in NO_HTTP:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        with suppress(OSError):
            writer.write(raw)
            writer.write_eof()
            said = await asyncio.wait_for(reader.read(), PATIENCE)
            if said and b" 400 " not in said[:20] and b" 43" not in said[:20]:
                problems.append(f"bytes that are no HTTP were answered with {said[:60]!r}")
        writer.close()
    return problems


async def limits(server: Server) -> list[str]:
    """Send prompts that just fit or are a token too long, and lengths beyond the context, which end with it."""
    card = json.loads(await asyncio.to_thread(server.get, "/v1/models"))["data"][0]["blockdraft"]
    context, problems = int(card["max_context"]), list[str]()
    fit = [(context - 1, 1), (context - 40, 40), (context - 40, 41), (context - 40, 10**9)]
    not_fit = [(context, 1), (context + 1, 1), (10 * context, 1), (0, 1)]
    for prompt, tokens in [*fit, *not_fit]:
        given = {"model": MODEL, "prompt": [20 + i % 50 for i in range(prompt)], "max_tokens": tokens, "temperature": 0}
        answer = await ask(server.port, json.dumps(given | {"ignore_eos": True}).encode(), "/v1/completions")
        expected = 200 if (prompt, tokens) in fit else 400
        if answer.status != expected:
            said = f"{prompt} tokens that ask for {tokens} of {context} were answered with {answer.status}"
            problems.append(f"{said}, not {expected}: {answer.body[:150]!r}")
        elif expected == 200 and answer.json["usage"]["completion_tokens"] != min(tokens, context - prompt):
            problems.append(f"{prompt} tokens that asked for {tokens} got {answer.json['usage']}")
    return problems


async def full_queue(server: Server) -> list[str]:
    """Send more requests at once than the queue holds."""
    body = long_chat(64)
    answers = await asyncio.gather(*(ask(server.port, body) for _ in range(4 * (ROWS + QUEUE))))
    statuses = [answer.status for answer in answers]
    problems = [f"a full queue answered with {status}" for status in {*statuses} - {200, 429}]
    if not {200, 429} <= {*statuses}:
        problems.append(f"all of {len(statuses)} requests at once were answered with {statuses[0]}")
    if any(answer.status == 429 and not answer.headers.get("retry-after", "").isdigit() for answer in answers):
        problems.append("a 429 has no Retry-After in seconds")
    if len({text_of(answer) for answer in answers if answer.status == 200}) > 1:
        problems.append("the same request got several answers")
    return problems


async def engine_fails(server: Server) -> list[str]:
    """Let the target raise for one request, before its first token and in the middle of its response."""
    marker = json.dumps({"prompt": MARKER, "add_special_tokens": False}).encode()
    ids = (await ask(server.port, marker, "/tokenize")).json
    problems = []
    for stream in (False, True):
        read = await ask(server.port, chat(f"Say {MARKER} now", stream=stream))
        said = await ask(server.port, chat("Say it", stream=stream, logit_bias={str(ids["tokens"][-1]): 100}))
        for what, answer in (("reads", read), ("says", said)):
            in_events = any("error" in event for _, event in answer.events)
            failed = in_events if answer.events else answer.status == 500 and "error" in answer.json
            if not failed or "Traceback" in answer.body or "/" in answer.body.partition('"error"')[2]:
                problems.append(f"who {what} the marker (stream: {stream}) got {answer.status}: {answer.body[-200:]!r}")
    return problems


async def terminated(server: Server) -> list[str]:
    """Send SIGTERM during streams: each must finish or end with an error event, and the server exit with 0."""
    running = [asyncio.create_task(ask(server.port, long_chat())) for _ in range(ROWS + 2)]
    await asyncio.sleep(0.3)
    server.process.terminate()
    answers = await asyncio.gather(*running)
    status = await asyncio.to_thread(server.process.wait, PATIENCE)
    problems = [f"it ended with {status}"] if status else []
    for answer in answers:
        told = answer.done or any("error" in event for _, event in answer.events) or 400 <= answer.status <= 503
        if not (answer.whole and told):
            problems.append(f"an answer broke off: {answer.status}, {answer.body[-100:]!r}")
    return problems


Fault = Callable[[Server], Awaitable[list[str]]]
FAULTS: tuple[Fault, ...] = (vanishing, slow_readers, garbage, limits, full_queue, engine_fails)


async def beside_others(fault: Fault, server: Server, known: Sequence[tuple[bytes, str]]) -> list[str]:
    """Run a fault beside others' requests; returns failures."""
    load = Load(server, known)
    async with load.running():
        found = await asyncio.wait_for(fault(server), 5 * PATIENCE)
    if not load.answered:
        found.append("no bystander was answered")
    return found + load.problems + await idle(server)


async def all_of_them(server: Server) -> list[str]:
    known, failures = list[tuple[bytes, str]](), list[str]()
    for request in chats.make(8):
        plain, drafted = (
            json.dumps(chats.body(request | {"max_tokens": 32}, MODEL, drafts)).encode() for drafts in (False, True)
        )
        known.append((drafted, text_of(await ask(server.port, plain))))
    for fault in (*FAULTS, terminated):
        began = time.monotonic()
        found = await (terminated(server) if fault is terminated else beside_others(fault, server, known))
        failures += [f"{fault.__name__}: {problem}" for problem in found]
        tell(f"{fault.__name__}: {found or 'ok'} ({time.monotonic() - began:.0f} s)")
    return failures


def run(out: Path) -> list[str]:
    """Run all faults, one after the other; returns failures."""
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = pair_with_tools(Path(folder) / MODEL), BUNDLED.parent / "drafter"
        more = ["--max-batch-size", str(ROWS), "--max-queue", str(QUEUE), "--max-body", str(2 * 2**20)]
        server = ours(target, drafter, out / "faults.log", 1, more, module="tests.soak.server_faults")
        try:
            return asyncio.run(all_of_them(server))
        finally:
            server.close()


def serve_failing() -> None:
    """Run `blockdraft serve` with a target that fails at the marker."""
    import torch
    from tests.soak.soak_faults import Faults, InjectedFault, Wrapped

    from blockdraft import targets
    from blockdraft.cli import main

    class Failing(Wrapped):
        def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            marked = torch.tensor(self.tokenizer(MARKER, add_special_tokens=False)["input_ids"])
            if torch.isin(tokens, marked.to(tokens.device)).any():
                raise InjectedFault("the marker was read")
            return self._inner.forward(tokens, *args, **kwargs)

    load: Any = targets.load_target
    targets.load_target = lambda *args, **kwargs: Failing(load(*args, **kwargs), Faults(0.0))
    main()


if __name__ == "__main__":
    serve_failing()
