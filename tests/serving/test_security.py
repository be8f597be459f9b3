"""Checks on host, origin, key and body of a request."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from blockdraft.errors import UsageError
from blockdraft.serving.settings import ServeSettings

KEY = "geheim-ß"
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


@pytest.fixture
def keyed(make_client: Callable[..., Any]) -> Any:
    return make_client(api_key=KEY)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/metrics", "/openapi.json", "/v1/nothing"])
def test_requests_without_the_key_are_refused(keyed: Any, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}".encode()},
        {"x-api-key": ""},
    ):
        answer = keyed.get(path, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert KEY not in answer.text


def test_both_headers_take_the_key(keyed: Any) -> None:
    for headers in ({"Authorization": f"Bearer {KEY}".encode()}, {"x-api-key": KEY.encode()}):
        assert keyed.get("/v1/models", headers=headers).status_code == 200
        assert keyed.post("/v1/completions", BODY, headers=headers).status_code == 200
    assert keyed.post("/v1/completions", BODY).status_code == 401


def test_whitespace_around_the_key_is_ignored(make_client: Callable[..., Any]) -> None:
    client = make_client(api_key=" k\n")
    assert client.get("/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def test_page_and_health_need_no_key(keyed: Any) -> None:
    assert keyed.get("/health").status_code == 200
    assert keyed.get("/").status_code == 200


def test_the_key_is_in_no_log(keyed: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        keyed.get("/v1/models", headers={"Authorization": f"Bearer {KEY}".encode()})
        keyed.get("/v1/models", headers={"Authorization": f"Bearer {KEY}x".encode()})
    assert KEY not in caplog.text
    assert KEY not in repr(keyed.service.settings)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "192.168.1.7:8000"])
def test_ip_addresses_are_allowed_hosts(client: Any, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "evil@localhost.x"]
)
def test_unknown_host_names_are_refused(client: Any, make_client: Callable[..., Any], host: str) -> None:
    for path in ("/v1/models", "/", "/health"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert "--allow-host" in answer.json()["error"]["message"]
    assert make_client(allow_host=("*",)).get("/v1/models", headers={"Host": host}).status_code == 200


def test_allow_host(make_client: Callable[..., Any]) -> None:
    client = make_client(allow_host=("Box.example",))
    assert client.get("/v1/models", headers={"Host": "box.example:8000"}).status_code == 200
    assert client.get("/v1/models", headers={"Host": "tux.example:8000"}).status_code == 403


@pytest.mark.parametrize("host", ["", "[::1", "[nonsense]"])
def test_malformed_hosts(client: Any, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code in (400, 403)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8000", "x", "http://["]
)
def test_other_origins_are_refused(client: Any, origin: str) -> None:
    for method, path in (("GET", "/v1/models"), ("OPTIONS", "/v1/completions"), ("POST", "/v1/completions")):
        answer = client.send(method, path, headers={"Origin": origin}, json=BODY if method == "POST" else None)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_the_own_origin_is_allowed(client: Any) -> None:
    answer = client.get("/v1/models", headers={"Origin": "http://127.0.0.1:8000"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_allow_origin(make_client: Callable[..., Any]) -> None:
    client, origin = make_client(allow_origin=("https://ui.example",), api_key="k"), "https://ui.example"
    ask = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = client.send("OPTIONS", "/v1/completions", headers=ask)  # browsers send no key with it
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    answer = client.post("/v1/completions", BODY, headers={"Origin": origin, "x-api-key": "k"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
    assert client.get("/v1/models", headers={"Origin": "https://evil.example", "x-api-key": "k"}).status_code == 403


def test_origins_are_normalized(make_client: Callable[..., Any]) -> None:
    client, origin = make_client(allow_origin=("https://UI.example/",)), "https://ui.example"
    answer = client.get("/v1/models", headers={"Origin": origin})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin


def test_the_size_of_all_bodies_is_limited(make_client: Callable[..., Any]) -> None:
    client = make_client(max_body=1000)
    sent = json.dumps({**BODY, "user": "x" * 900}).encode()

    async def work(http: Any) -> Any:
        go_on, held = asyncio.Event(), asyncio.Semaphore(0)

        async def slowly() -> Any:
            yield sent[:-1]
            held.release()
            await go_on.wait()
            yield sent[-1:]

        async def post(content: Any) -> Any:
            kind = {"content-type": "application/json"}
            return await http.post("/v1/completions", content=content, headers=kind)

        others = [asyncio.ensure_future(post(slowly())) for _ in range(16)]
        for _ in others:
            await held.acquire()
        refused = await post(sent)
        go_on.set()
        return refused, await asyncio.gather(*others), await post(sent)

    refused, others, later = client.run(work)
    assert refused.status_code == 429 and refused.headers["retry-after"]
    assert {one.status_code for one in [*others, later]} == {200}


def test_large_bodies_are_refused(make_client: Callable[..., Any]) -> None:
    client = make_client(max_body=1000)
    assert client.post("/v1/completions", {**BODY, "user": "x" * 800}).status_code == 200
    assert client.post("/v1/completions", {**BODY, "user": "x" * 1000}).status_code == 413

    async def pieces() -> Any:  # whose length is not told beforehand
        for _ in range(20):
            yield b" " * 100

    answer = client.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"})
    assert answer.status_code == 413 and "--max-body" in answer.json()["error"]["message"]


def test_public_addresses_need_a_key_or_allow_open() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "box.example"):
        with pytest.raises(UsageError, match="--allow-open"):
            ServeSettings(host=host)
        ServeSettings(host=host, api_key="k")
        ServeSettings(host=host, allow_open=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        ServeSettings(host=host)
    with pytest.raises(UsageError, match="api_key is empty"):
        ServeSettings(host="0.0.0.0", api_key=" ")
    with pytest.raises(UsageError, match="stall_seconds must be greater than 0, got 0"):
        ServeSettings(stall_seconds=0.0)
    with pytest.raises(UsageError, match="65535"):
        ServeSettings(port=70000)
