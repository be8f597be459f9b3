"""Checks on every request: host, origin, key, and size and contents of the body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import math
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockdraft.serving.core.errors import ApiError
from blockdraft.serving.settings import ServeSettings

OPEN_PATHS = {"/", "/radar", "/health"}  # need no key, since they reveal nothing and cost nothing
ANY = "*"
LARGE = 2**16  # bytes from which on a body is checked in another thread
LARGEST = 16  # bodies of the largest size that all requests together may hold
LATER = 5  # seconds that a refused client is told to wait
MOST_DEEP = 100  # levels of lists and objects


class Guard:
    """Middleware that refuses requests which the settings do not allow.

    A web page of another site could make a browser call a server on its user's machine. If it calls the server's own
    address, the browser names the page in the header Origin. If it calls a host name of its own that was redirected to
    127.0.0.1 (DNS rebinding), the browser sends that name in the header Host. So both are checked, with a key or
    without.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings
        self._hosts = {host.lower() for host in (*settings.allow_host, settings.host)}
        self._origins = set(origins_of(settings))
        self._held = 0  # bytes of the bodies of all present requests
        self._key = None if settings.api_key is None else settings.api_key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no web sockets, and nothing to do at start and end
        if scope["method"] == "HEAD":  # sent by health probes; uvicorn leaves out the body of the answer
            scope = {**scope, "method": "GET"}
        headers, body = Headers(scope=scope), bytearray()
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                await self._read(body, headers, receive)
                receive = _again(body, receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        except _Gone:
            pass
        else:
            await self._app(scope, receive, send)
        finally:
            self._held -= len(body)

    def _check_host(self, headers: Headers) -> None:
        host = _host_of(f"//{headers.get('host', '')}")
        if host is None:
            raise ApiError(400, "The header Host is missing or malformed; it must hold the server's address.")
        if not (ANY in self._hosts or host in self._hosts or host == "localhost" or _is_address(host)):
            raise ApiError(403, f"The host {host[:80]} is not allowed; start the server with --allow-host {host[:80]}.")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or ANY in self._origins or origin.lower() in self._origins:
            return
        if urlsplit_or_none(origin) != headers.get("host", "").lower():
            raise ApiError(
                403, f"The origin {origin[:80]} is not allowed; start the server with --allow-origin {origin[:80]}."
            )

    def _check_key(self, headers: Headers) -> None:
        if self._key is None:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("latin-1"), self._key):
            fault = "is wrong" if given else "is missing"
            raise ApiError(
                401,
                f"The key {fault}; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, body: bytearray, headers: Headers, receive: Receive) -> None:
        """Read a body and check it. Its bytes count as held even if it is refused."""
        most = self._settings.max_body
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise _too_large(most)
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), self._settings.stall_seconds)
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    f"No part of the body arrived for {self._settings.stall_seconds:g} s; send it faster, or start the "
                    f"server with a larger --stall-seconds.",
                ) from None
            if message["type"] == "http.disconnect":
                raise _Gone
            piece = message.get("body", b"")
            body += piece
            self._held += len(piece)
            more = message.get("more_body", False)
            if len(body) > most:
                raise _too_large(most)
            if self._held > LARGEST * most:
                raise ApiError(
                    429,
                    f"The bodies of all present requests exceed {LARGEST * most} bytes; ask again in {LATER} s.",
                    headers={"Retry-After": str(LATER)},
                )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"The content type is {kind[:80] or 'missing'}; it must be application/json.")
        await asyncio.to_thread(check_json, bytes(body)) if len(body) > LARGE else check_json(bytes(body))


class _Gone(Exception):
    """The client left before its request was complete."""


def _again(body: bytearray, receive: Receive) -> Receive:
    """A function that receives the body already read, and then what comes after it."""
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": bytes(body), "more_body": False}
        return await receive()

    return again


def origins_of(settings: ServeSettings) -> list[str]:
    """Allowed origins, as browsers write them."""
    return [origin.lower().rstrip("/") for origin in settings.allow_origin]


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"The body exceeds {most} bytes; send a smaller one, or start the server with a larger --max-body."
    )


def _host_of(url: str) -> str | None:
    """The host of a URL, in lower case; None without one."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def urlsplit_or_none(origin: str) -> str | None:
    """Host and port of an origin; None for an origin without a host, such as "null"."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_json(body: bytes) -> None:
    """Refuse a body that is not JSON, or that later code could fail at.

    That is JSON with infinite numbers, halves of surrogate pairs, or too many levels.

    Raises:
        ApiError: The body is refused, with status 400.
    """
    if not body.strip():
        raise ApiError(400, "The body is empty; send a JSON object.")
    try:
        value = json.loads(body, parse_constant=_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"The body is not valid UTF-8 ({error.reason} at byte {error.start}); send JSON in UTF-8."
        ) from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        one, level = todo.pop()
        if level > MOST_DEEP:
            raise _too_deep()
        if isinstance(one, str):
            _check_text(one)
        elif isinstance(one, float):
            if not math.isfinite(one):
                raise ApiError(400, "The body holds a number too large for a 64-bit float; give a smaller one.")
        elif isinstance(one, list):
            todo += [(each, level + 1) for each in one if not isinstance(each, int)]
        elif isinstance(one, dict):
            for name, each in one.items():
                _check_text(name)
                todo.append((each, level + 1))


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise ApiError(400, f"The body holds {half}, half of a surrogate pair; send whole characters.") from None


def _too_deep() -> ApiError:
    return ApiError(400, f"The body nests lists and objects more than {MOST_DEEP} levels deep; send a flatter one.")
