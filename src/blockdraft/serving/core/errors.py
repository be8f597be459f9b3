"""What goes wrong, in the shapes that clients of OpenAI's and Anthropic's APIs know."""

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

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {400: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error"} | KINDS
API_NAMES = {"max_new_tokens": "max_tokens"}  # of the engine's parameters, where clients know them by others
FIELD = re.compile(r"([\w.]+) (?:is|holds|names|for) ")
SHOWN = 60  # characters of a value that is refused


@dataclass
class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: Of HTTP.
        kind: What OpenAI calls the type; None is the usual one of the status.
        code: One of OpenAI's words that programs look at, such as "model_not_found".
        param: The field of the request that is to blame.
        headers: More headers of the answer.
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
        """In the shape of the API that the request's path belongs to."""
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        usual = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        kind = self.kind or usual
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status, dict(self.headers))


def as_api_error(error: BaseException, quiet: bool = False) -> ApiError:
    """How an exception is answered. What is our own fault is logged, unless `quiet`, and not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.", headers=error.headers or {})
    if isinstance(error, ClosedError):
        return ApiError(503, "The server is shutting down; ask again later.", headers={"Retry-After": "5"})
    if isinstance(error, UsageError):
        text = re.sub(r"\w+", lambda word: API_NAMES.get(word[0], word[0]), str(error))
        named = FIELD.match(text)
        return ApiError(400, text, param=named[1] if named and named[1].islower() else None)
    if isinstance(error, NumbersError | RequestError):
        if not quiet:
            log.error("A request failed: %s", error)
        return ApiError(500, str(error))
    if not quiet:
        log.error("A request failed.", exc_info=error)
    return ApiError(500, "The server failed at this request; its log says how.")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The answer to a body whose fields are not what they must be."""
    # Of a field that may have several types, the reading that came furthest was meant.
    worst = max(errors, key=lambda one: len(one["loc"]))
    place = [part for part in worst["loc"] if part not in ("body", "query", "path")]
    names = [str(part) for part in place if not _is_type(part)]
    param = ".".join(names) or None
    if worst["type"] == "missing":
        return ApiError(400, f"{param or 'The body'} is missing; it must be given.", param=param)
    if worst["type"] == "value_error":
        return ApiError(400, str(worst["ctx"]["error"]), param=param)
    value = repr(worst.get("input"))
    value = value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
    return ApiError(400, f"{param or 'The body'} is {value}; it must be {limit_of(worst)}.", param=param)


def _is_type(part: object) -> bool:
    """Whether a part of an error's place is no field but the type that was tried."""
    return isinstance(part, str) and (
        not part.isidentifier() or part in ("str", "int", "float", "bool") or part[0].isupper()
    )
