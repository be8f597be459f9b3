"""Errors as answers, in the shapes of OpenAI's and Anthropic's APIs."""

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
API_NAMES = {"max_new_tokens": "max_tokens"}  # API names of engine parameters, where they differ
FIELD = re.compile(r"([\w.]+) (?:is|holds|names|for) ")
SHOWN = 60  # most characters shown of a refused value


@dataclass
class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
        status: HTTP status.
        kind: OpenAI's `type`; None is the usual one for the status.
        code: OpenAI's `code`, which programs read, such as "model_not_found".
        param: Field of the request that caused the error.
        headers: Further headers of the answer.
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
        """The body, in the shape of the API to which the path of the request belongs."""
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        usual = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        kind = self.kind or usual
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status, dict(self.headers))


def as_api_error(error: BaseException, quiet: bool = False) -> ApiError:
    """The answer to an exception. Bugs of the server are logged, unless `quiet`, and not shown to clients."""
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
    return ApiError(500, "The server failed at this request; its log has the details.")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The answer to a body with invalid fields."""
    # A field of several types has an error for each; the type that matched deepest was meant.
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
    """Whether a part of an error's location is the name of a type that was tried, and not a field."""
    return isinstance(part, str) and (
        not part.isidentifier() or part in ("str", "int", "float", "bool") or part[0].isupper()
    )
