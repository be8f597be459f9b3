"""Errors as HTTP responses, in the shapes of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from blockdraft.errors import ClosedError, NumbersError, RequestError, UsageError
from blockdraft.settings import limit_of

log = logging.getLogger(__name__)

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
ANTHROPIC_TYPES = {400: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error"} | TYPES
FIELD = re.compile(r"([a-z][\w.]*) (?:is|must|holds|names|for) ")
MAX_SHOWN = 60  # characters of a refused value


@dataclass
class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
        status: HTTP status.
        kind: OpenAI's `type`; None is the usual one for the status.
        code: OpenAI's `code`, which programs read, such as "model_not_found".
        param: Request field that caused the error.
        headers: Additional response headers.
    """

    status: int
    message: str
    kind: str | None = None
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self, path: str) -> dict[str, Any]:
        """Return the body in the shape of the API to which the request path belongs."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else default)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if path.startswith(OLLAMA_PATH):
            return {"error": self.message}
        kind = self.kind or TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status, dict(self.headers))


def as_api_error(error: BaseException, quiet: bool = False) -> ApiError:
    """Convert an exception. Bugs of the server are logged, unless `quiet`, and hidden from clients."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.", headers=error.headers or {})
    if isinstance(error, ClosedError):
        return ApiError(503, "The server is shutting down; try again later.", headers={"Retry-After": "5"})
    if isinstance(error, UsageError):
        message = re.sub(r"\bmax_new_tokens\b", "max_tokens", str(error))
        named = FIELD.match(message)
        return ApiError(400, message, param=named[1] if named else None)
    if isinstance(error, NumbersError | RequestError):
        if not quiet:
            log.error("A request failed: %s", error)
        return ApiError(500, str(error))
    if not quiet:
        log.error("A request failed.", exc_info=error)
    return ApiError(500, "The server failed to process this request; its log has the details.")


def _validation_error(errors: Sequence[Any]) -> ApiError:
    # A field of several types has an error for each type; the one that matched deepest was meant.
    error = max(errors, key=lambda error: len(error["loc"]))
    location = [part for part in error["loc"] if part not in ("body", "query", "path") and not _is_type(part)]
    param = ".".join(map(str, location)) or None
    name = param or "The body"
    if error["type"] == "missing":
        return ApiError(400, f"{name} is missing; give it.", param=param)
    if error["type"] == "value_error":
        return ApiError(400, str(error["ctx"]["error"]), param=param)
    value = repr(error.get("input"))
    value = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."
    limit = limit_of(error).replace("a table", "an object")  # JSON's word
    return ApiError(400, f"{name} must be {limit}, got {value}.", param=param)


def _is_type(part: object) -> bool:
    """Return whether a part of an error's location names a tried type instead of a field."""
    return isinstance(part, str) and (
        not part.isidentifier() or part in ("str", "int", "float", "bool") or part[0].isupper()
    )
