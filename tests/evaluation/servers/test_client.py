"""Servers that say odd things, without a network."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from blockdraft.errors import UsageError
from blockdraft.evaluation.servers.client import Client, Heard
from blockdraft.evaluation.servers.metrics import acceptance, parse
from blockdraft.types import SamplingParams

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Lets a function answer all requests."""

    def answering(answer: Callable[[httpx.Request], httpx.Response]) -> None:
        monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))

    return answering


def stream(usage: Any, **choice: Any) -> str:
    said = {"choices": [{"delta": {"content": "four tokens"}, "finish_reason": "stop", **choice}]}
    return f"data: {json.dumps(said)}\n\ndata: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def ask(**given: Any) -> Heard:
    async def asked() -> Heard:
        async with Client("http://there/v1/", "m", **given) as client:
            return await client.ask("hello", SamplingParams(8))

    return asyncio.run(asked())


def test_what_is_heard(serve: Serve) -> None:
    serve(lambda request: httpx.Response(200, text=stream({"completion_tokens": 4})))
    heard = ask()
    assert (heard.problem, heard.text, heard.tokens, heard.cached) == ("", "four tokens", 4, None)
    serve(lambda request: httpx.Response(200, text=stream({"completion_tokens": 4, "prompt_tokens_details": None})))
    assert not ask().problem


@pytest.mark.parametrize("count", ["4", None, -4, 0, 4.5, 1e999])
def test_no_count_of_tokens(serve: Serve, count: Any) -> None:
    """A figure that is none fails the request, and does not get into the others'."""
    serve(lambda request: httpx.Response(200, text=stream({"completion_tokens": count})))
    assert f"completion_tokens is {count!r} for 11 characters" in ask().problem


def test_cached_tokens_in_another_form_are_not_known(serve: Serve) -> None:
    serve(
        lambda request: httpx.Response(
            200, text=stream({"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": "2"}})
        )
    )
    heard = ask()
    assert not heard.problem and heard.cached is None


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        'data: {"choices": [\n\n',
        "data: [1]\n\n",
        'data: {"choices": [null]}\n\n',
        "data: 3\n\n",
        f"data: {'[' * 100_000}\n\n",
        stream({"completion_tokens": 10**400}),
    ],
)
def test_no_answer_of_this_form(serve: Serve, text: str) -> None:
    serve(lambda request: httpx.Response(200, text=text))
    assert ask().problem


def test_comments_are_no_answer(serve: Serve) -> None:
    """Servers send them while they compute, and one that hangs goes on sending them."""

    async def comments() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b": still here\n\n"
            await asyncio.sleep(0.002)

    serve(lambda request: httpx.Response(200, content=comments()))
    with pytest.raises(UsageError, match="has gone 0.05 s without an answer or a line of one"):
        ask(silence=0.05)


async def drips() -> AsyncIterator[bytes]:
    """Something all the time, and no end of a line."""
    for _ in range(1000):
        yield b"data: "
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("status", [200, 500])
def test_bytes_without_line_ends_are_no_answer(serve: Serve, status: int) -> None:
    serve(lambda request: httpx.Response(status, content=drips()))
    with pytest.raises(UsageError, match="has gone 0.05 s without an answer or a line of one"):
        ask(silence=0.05)


def test_metrics_that_never_end(serve: Serve) -> None:
    async def metrics() -> Any:
        async with Client("http://there", silence=0.05) as client:
            return await client.metrics()

    serve(lambda request: httpx.Response(200, content=drips()))
    with pytest.raises(UsageError, match="has gone 0.05 s without an answer or a line of one"):
        asyncio.run(metrics())


def test_lines_that_come_may_take_longer_in_all(serve: Serve) -> None:
    """Patience begins anew with each."""

    async def words() -> AsyncIterator[bytes]:
        for line in stream({"completion_tokens": 4}).splitlines(keepends=True):
            yield line.encode()
            await asyncio.sleep(0.06)

    serve(lambda request: httpx.Response(200, content=words()))
    assert not ask(silence=0.25).problem


def test_metrics_of_a_web_page_are_none(serve: Serve) -> None:
    """Some gateways answer any address with their page."""

    async def metrics() -> Any:
        async with Client("http://there") as client:
            return await client.metrics()

    serve(lambda request: httpx.Response(200, html="<!doctype html><html></html>"))
    assert asyncio.run(metrics()) is None
    serve(lambda request: httpx.Response(200, text="<this is no metric>"))
    with pytest.raises(UsageError, match="not in Prometheus' format"):
        asyncio.run(metrics())


def test_a_server_that_began_anew_meanwhile() -> None:
    """Its counters fall, and what was accepted is not known."""
    text = "vllm:spec_decode_num_drafts_total {}\nvllm:spec_decode_num_accepted_tokens_total {}\n"
    before, after = (parse(text.format(*counts)) for counts in ((100, 200), (10, 30)))
    assert acceptance(before, after).tau is None
    assert acceptance(before, parse(text.format("NaN", "NaN"))).tau is None
    assert acceptance(parse(text.format(0, 0)), after).tau == 4
