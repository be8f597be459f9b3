"""Checks of every HTTP request: host, origin, API key, and size and syntax of the body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from codecs import BOM_UTF8
from urllib.parse import urlsplit

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockdraft.plugins import PAGES, entry_points
from blockdraft.serving.content_encoding import decode_body
from blockdraft.serving.errors import OLLAMA_PATH, ApiError
from blockdraft.serving.settings import ServeSettings

ANY = "*"
MAX_BODIES = 16  # bodies of the maximum size that all requests together may hold
RETRY_SECONDS = 5


class Guard:
    """Middleware that refuses requests which the settings do not allow.

    A web page of another site could make a browser call a server on its user's machine. If it calls the address of the
    server, the browser names the page in the header Origin. If it calls a host name of its own that resolves to
    127.0.0.1 (DNS rebinding), the browser sends that name in the header Host. So both headers are checked, with a key
    or without.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings
        self._hosts = {host.lower() for host in (*settings.allow_host, settings.host)}
        self._origins = set(allowed_origins(settings))
        # Pages and health need no key, since they reveal nothing and cost nothing.
        self._open_paths = {"/", "/health", *(f"/{name}" for name in entry_points(PAGES))}
        self._key = None if settings.api_key is None else settings.api_key.strip().encode()
        self._body_bytes = 0  # of all present requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # the app has no web sockets and no lifespan
        if scope["method"] == "HEAD":  # sent by health probes; uvicorn drops the response body
            scope = {**scope, "method": "GET"}
        headers, body = Headers(scope=scope), bytearray()
        if scope["path"].startswith(OLLAMA_PATH) and "origin" not in headers:
            # Ollama reads JSON of any content type, and curl names another one. Web pages name their origin.
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["path"] not in self._open_paths:
                self._check_key(headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                if not await self._read(body, headers, receive):
                    return
                scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"content-encoding"]}
                receive = _replay(bytes(body), receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)
        finally:
            self._body_bytes -= len(body)

    def _check_host(self, headers: Headers) -> None:
        try:
            host = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:
            host = None
        if host is None:
            raise ApiError(400, "The header Host is missing or malformed; it must hold the server's address.")
        if not (ANY in self._hosts or host in self._hosts or host == "localhost" or _is_ip_address(host)):
            raise ApiError(403, f"The host {host[:80]} is not allowed; start the server with --allow-host {host[:80]}.")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or ANY in self._origins or origin.lower() in self._origins:
            return
        try:
            same_host = urlsplit(origin).netloc.lower() == headers["host"].lower()
        except ValueError:
            same_host = False
        if not same_host:
            raise ApiError(
                403, f"The origin {origin[:80]} is not allowed; start the server with --allow-origin {origin[:80]}."
            )

    def _check_key(self, headers: Headers) -> None:
        if self._key is None:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(key.encode("latin-1"), self._key):
            raise ApiError(
                401,
                f"The API key is {'wrong' if key else 'missing'}; send it as `Authorization: Bearer KEY` or "
                f"`x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, body: bytearray, headers: Headers, receive: Receive) -> bool:
        """Read the body and check it. Return False if the client disconnects first."""
        stall = self._settings.stall_seconds
        length = headers.get("content-length", "")
        self._check_size(int(length[:20]) if length.isdecimal() else 0)
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), stall)
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    f"No part of the body arrived for {stall:g} s; send it faster, or start the server with a larger "
                    f"--stall-seconds.",
                ) from None
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            body += part
            self._body_bytes += len(part)
            self._check_size(len(body))
            more = message.get("more_body", False)
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, f"The content type must be application/json, got {content_type[:80] or 'nothing'}.")
        if encodings := ", ".join(headers.getlist("content-encoding")):
            decoded = decode_body(bytes(body), encodings, self._settings.max_body)
            self._body_bytes += len(decoded) - len(body)
            body[:] = decoded
            self._check_size(len(body))
        if body.startswith(BOM_UTF8):  # as editors of Windows write
            self._body_bytes -= len(BOM_UTF8)
            del body[: len(BOM_UTF8)]
        check_json(bytes(body))
        return True

    def _check_size(self, size: int) -> None:
        limit = self._settings.max_body
        if size > limit:
            raise ApiError(
                413,
                f"The body exceeds {limit} bytes; send a smaller one, or use a larger --max-body.",
            )
        if self._body_bytes > MAX_BODIES * limit:
            raise ApiError(
                429,
                f"The bodies of all present requests exceed {MAX_BODIES * limit} bytes; retry in {RETRY_SECONDS} s.",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )


def check_json(body: bytes) -> None:
    """Refuse a body that is not JSON in UTF-8, nests too deeply, or holds a lone surrogate or an infinite number.

    Raises:
        ApiError: The body is refused (400).
    """
    if not body.strip():
        raise ApiError(400, "The body is empty; send a JSON object.")
    try:
        json.dumps(from_json(body, allow_inf_nan=False), allow_nan=False)  # from_json reads 1e999 as infinity
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives a body that was read, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def allowed_origins(settings: ServeSettings) -> list[str]:
    """Return the allowed origins as browsers write them."""
    return [origin.lower().rstrip("/") for origin in settings.allow_origin]


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
