"""Client of servers with odd answers, without a network, and the counters that it reads."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from blockdraft.errors import UsageError
from blockdraft.types import SamplingParams
from blockdraft_bench.servers.client import Answer, Client
from blockdraft_bench.servers.metrics import ServerAcceptance, acceptance, cached_tokens, drafted, parse

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Function that has all requests answered by a given function."""

    def answering(answer: Callable[[httpx.Request], httpx.Response]) -> None:
        monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))

    return answering


def stream(usage: Any, **choice: Any) -> str:
    event = {"choices": [{"delta": {"content": "four tokens"}, "finish_reason": "stop", **choice}]}
    return f"data: {json.dumps(event)}\n\ndata: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def ask(**given: Any) -> Answer:
    async def asked() -> Answer:
        async with Client("http://there/v1/", "m", **given) as client:
            return await client.ask("hello", SamplingParams(8))

    return asyncio.run(asked())


def test_whole_answer(serve: Serve) -> None:
    serve(lambda request: httpx.Response(200, text=stream({"completion_tokens": 4})))
    answer = ask()
    assert (answer.problem, answer.text, answer.tokens, answer.cached) == ("", "four tokens", 4, None)
    serve(lambda request: httpx.Response(200, text=stream({"completion_tokens": 4, "prompt_tokens_details": None})))
    assert not ask().problem


@pytest.mark.parametrize("count", ["4", None, -4, 0, 4.5, 1e999])
def test_no_count_of_tokens(serve: Serve, count: Any) -> None:
    """A count that is no number fails the request and leaves other requests' figures alone."""
    serve(lambda request: httpx.Response(200, text=stream({"completion_tokens": count})))
    assert f"completion_tokens is {count!r} for 11 characters" in ask().problem


def test_cached_tokens_in_another_form_are_not_known(serve: Serve) -> None:
    serve(
        lambda request: httpx.Response(
            200, text=stream({"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": "2"}})
        )
    )
    answer = ask()
    assert not answer.problem and answer.cached is None


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
    """Comments come from servers that compute, and also from one that hangs."""

    async def comments() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b": still here\n\n"
            await asyncio.sleep(0.002)

    serve(lambda request: httpx.Response(200, content=comments()))
    with pytest.raises(UsageError, match="has gone 0.05 s without an answer or a line of one"):
        ask(silence=0.05)


async def drips() -> AsyncIterator[bytes]:
    """Bytes all the time, and no end of a line."""
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
    """The time limit begins anew with each line."""

    async def words() -> AsyncIterator[bytes]:
        for line in stream({"completion_tokens": 4}).splitlines(keepends=True):
            yield line.encode()
            await asyncio.sleep(0.06)

    serve(lambda request: httpx.Response(200, content=words()))
    assert not ask(silence=0.25).problem


def test_metrics_of_a_web_page_are_none(serve: Serve) -> None:
    """Gateways that answer any address with their page have no metrics."""

    async def metrics() -> Any:
        async with Client("http://there") as client:
            return await client.metrics()

    serve(lambda request: httpx.Response(200, html="<!doctype html><html></html>"))
    assert asyncio.run(metrics()) is None
    serve(lambda request: httpx.Response(200, text="<this is no metric>"))
    with pytest.raises(UsageError, match="not in Prometheus' format"):
        asyncio.run(metrics())


def test_restarted_server() -> None:
    """Counters that have fallen leave the acceptance unknown."""
    text = "vllm:spec_decode_num_drafts_total {}\nvllm:spec_decode_num_accepted_tokens_total {}\n"
    before, after = (parse(text.format(*counts)) for counts in ((100, 200), (10, 30)))
    assert acceptance(before, after).tau is None
    assert acceptance(before, parse(text.format("NaN", "NaN"))).tau is None
    assert acceptance(parse(text.format(0, 0)), after).tau == 4


OURS = """# TYPE blockdraft:num_steps counter
blockdraft:num_steps_total {steps}
# TYPE blockdraft:num_step_tokens counter
blockdraft:num_step_tokens_total {tokens}
# TYPE blockdraft:spec_decode_num_drafts counter
blockdraft:spec_decode_num_drafts_total {drafts}
# TYPE blockdraft:spec_decode_num_accepted_tokens counter
blockdraft:spec_decode_num_accepted_tokens_total {accepted}
# TYPE blockdraft:spec_decode_num_accepted_tokens_per_pos counter
blockdraft:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}
"""


def test_our_steps_count_whether_they_drafted_or_not() -> None:
    before = parse(OURS.format(steps=10, tokens=12, drafts=2, accepted=2))
    after = parse(OURS.format(steps=30, tokens=52, drafts=22, accepted=22))
    assert (after.engine, after.caches) == ("blockdraft", None)
    assert acceptance(before, after) == ServerAcceptance(2.0, (1.0,))
    assert drafted(before, after) and not drafted(after, after)


def test_others_count_steps_that_drafted() -> None:
    text = '# TYPE vllm:{0} counter\nvllm:{0}_total{{engine="0"}} {1}\nvllm:{0}_total{{engine="1"}} {1}\n'
    name = "spec_decode_num_accepted_tokens_per_pos"
    places = f'# TYPE vllm:{name} counter\nvllm:{name}_total{{position="0"}} 6\nvllm:{name}_total{{position="1"}} 2\n'
    drafts, accepted = (f"spec_decode_num_{each}" for each in ("drafts", "accepted_tokens"))
    before, after = parse(text.format(drafts, 0) + text.format(accepted, 0)), None
    after = parse(text.format(drafts, 5) + text.format(accepted, 4) + places)
    assert acceptance(before, after) == ServerAcceptance(1.8, (0.6, 0.2))
    assert acceptance(after, after) == ServerAcceptance(1.0)


def test_sglang_mean_leaves_out_zeros() -> None:
    gauges = 'sglang:spec_accept_length{tp_rank="0"} 3.5\nsglang:spec_accept_length{tp_rank="1"} 0.0\n'
    found = parse(f"# TYPE sglang:spec_accept_length gauge\n{gauges}")
    assert (found.engine, acceptance(found, found)) == ("SGLang", ServerAcceptance(3.5))


def test_unknown_counters() -> None:
    found = parse("# TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total 3\n")
    assert found.engine is None and acceptance(found, found) == acceptance(None, found) == ServerAcceptance()
    assert cached_tokens(found, found) is None and not drafted(found, found)
    with pytest.raises(UsageError, match="not in Prometheus' format"):
        parse("<html>{ not found</html>")


def test_cached_tokens() -> None:
    text = '# TYPE sglang:cached_tokens counter\nsglang:cached_tokens_total{{cache_source="device"}} {}\n'
    assert cached_tokens(parse(text.format(3)), parse(text.format(20))) == ("sglang:cached_tokens_total", 17)


def test_vllm_counts_draft_tokens_behind_the_end_of_an_answer() -> None:
    """10 answers of 521 tokens in 143 drafts, of which the first tokens needed none."""
    text = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total {}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total {}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total {}
# TYPE vllm:request_success counter
vllm:request_success_total{{finished_reason="stop"}} {}
vllm:request_success_total{{finished_reason="length"}} {}
"""
    before, after = parse(text.format(0, 0, 0, 0, 0)), parse(text.format(143, 378, 521, 7, 3))
    assert acceptance(before, after).tau == 511 / 143
    undrafted = parse(text.format(100, 150, 521, 7, 3))  # some tokens were decoded plainly
    assert acceptance(before, undrafted).tau == 2.5


def test_lines_end_only_at_line_feeds(serve: Serve) -> None:
    """Other servers leave U+2028 and the like in their JSON as they are, as the standard allows."""
    event = {"choices": [{"delta": {"content": "a\u2028b\x85c"}, "finish_reason": "stop"}]}
    text = (
        f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\ndata: {json.dumps({'usage': {'completion_tokens': 3}})}"
    )
    serve(lambda request: httpx.Response(200, content=f"{text}\n\ndata: [DONE]\n\n".encode()))
    answer = ask()
    assert (answer.problem, answer.text) == ("", "a\u2028b\x85c")
