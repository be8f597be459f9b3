"""Reading of streamed answers, whole and broken off."""

import asyncio
import json

from benchmarks.server.client import Answer, Exchange, Heard, exchange, figures, parse, post, streamed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(content: str | None = None, finish: str | None = None, **more: object) -> dict[str, object]:
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    return {"choices": [choice]} | more


USAGE = {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 7}}
EVENTS = [event("One "), event("two three", "stop"), USAGE]


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def body(events: list[dict[str, object]], done: bool = True) -> bytes:
    lines = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in events]
    return b"".join([*lines, b"data: [DONE]\n\n" if done else b""])


def came(*pieces: bytes) -> Answer:
    """Answer of which a piece arrived each second."""
    found = Exchange(post("127.0.0.1", 1, "/", b""), 10.0)
    found.pieces = [(11.0 + i, piece) for i, piece in enumerate(pieces)]
    return parse(found)


def test_events_have_the_time_at_which_they_were_complete() -> None:
    text = body(EVENTS)
    place = text.index(b"two")  # in the middle of the second event
    answer = came(HEAD, chunked(text[:place]), chunked(text[place:]) + b"0\r\n\r\n")
    assert answer.whole and answer.done and answer.status == 200
    assert [moment for moment, _ in answer.events] == [12.0, 13.0, 13.0]
    assert [event for _, event in answer.events] == EVENTS
    heard = streamed(4, 9.0, 10.0, answer)
    assert heard == Heard(4, 1.0, [(3.0, 4.0), (4.0, 9.0)], "One two three", "stop", 3, 7)


def test_what_is_wrong_is_said() -> None:
    def problem(*pieces: bytes) -> str:
        return streamed(0, 0.0, 0.0, came(*pieces)).problem

    end = b"0\r\n\r\n"
    assert problem(HEAD, chunked(body(EVENTS)) + end) == ""
    assert problem(HEAD, chunked(body(EVENTS))) == "no end"
    assert problem(HEAD, chunked(body(EVENTS, done=False)) + end) == "no [DONE]"
    assert problem(HEAD, chunked(body(EVENTS[:2])) + end) == "no usage"
    assert problem(HEAD, chunked(body([event("One"), USAGE])) + end) == "no finish_reason"
    assert "no memory" in problem(HEAD, chunked(body([*EVENTS, {"error": {"message": "no memory"}}])) + end)
    assert problem(b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nwait") == "status 429: wait"
    assert problem().startswith("status 0") and problem(b"\xff\xff").startswith("status 0")


def test_an_exchange_over_a_socket() -> None:
    async def run() -> tuple[bytes, Answer, Exchange]:
        seen = b""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal seen
            seen = await reader.readuntil(b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            found = await exchange("127.0.0.1", port, "/v1/x", b"{}", {"Origin": "there"})
        refused = await exchange("127.0.0.1", port, "/", b"")
        return seen, parse(found), refused

    seen, answer, refused = asyncio.run(run())
    assert seen.startswith(b"POST /v1/x HTTP/1.1\r\n") and b"Origin: there" in seen and b"Content-Length: 2" in seen
    assert (answer.status, answer.json, answer.whole) == (200, [], True)
    assert "ConnectionRefusedError" in refused.error and parse(refused).status == 0


def test_figures_are_of_what_came_in_time() -> None:
    # Ten tokens in ten pieces of a character each, one each second from second 2 on.
    slow = Heard(0, 1.0, [(2.0 + i, 1.0) for i in range(10)], "x" * 10, "stop", 10)
    early = Heard(1, 0.0, [(0.5, 5.0)], "y" * 5, "stop", 5)
    broken = Heard(2, 1.0, [(3.0, 50.0)], "z" * 50, "stop", 50, problem="no end")
    found = figures([slow, early, broken], 1.0, 7.0)
    assert found.tokens_per_second == 5 / 6  # those of seconds 2 to 6
    assert (found.requests, found.first_median, found.token_median, found.piece_p95) == (1, 1.0, 1.0, 1.0)
    nobody = figures([], 0.0, 1.0)
    assert nobody.tokens_per_second == 0 and nobody.first_median != nobody.first_median
