"""JSON that is safe to hand on: nothing in it makes later code fail in ways of its own."""

from __future__ import annotations

import json
import math
from typing import Any

from blockdraft.serving.errors import ApiError

MOST_DEEP = 100  # lists and objects inside of each other


def check_json(body: bytes) -> None:
    """Refuse what is no JSON, or has infinite numbers, halves of characters, or too many levels.

    Raises:
        ApiError: It says what is wrong, status 400.
    """
    if not body.strip():
        raise ApiError(400, "The body is empty; send a JSON object.")
    try:
        value = json.loads(body, parse_constant=_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is no UTF-8 text ({error.reason} at byte {error.start}).") from None
    except ValueError as error:
        raise ApiError(400, f"The body is no JSON: {error}.") from None
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        one, level = todo.pop()
        if level > MOST_DEEP:
            raise _too_deep()
        if isinstance(one, str):
            _check_text(one)
        elif isinstance(one, float):
            if not math.isfinite(one):
                raise ApiError(400, "The body holds a number that is too large; give a smaller one.")
        elif isinstance(one, list):
            todo += [(each, level + 1) for each in one if not isinstance(each, int)]
        elif isinstance(one, dict):
            for name, each in one.items():
                _check_text(name)
                todo.append((each, level + 1))


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise ApiError(400, f"The body holds {half}, half of a character; send whole ones.") from None


def _too_deep() -> ApiError:
    return ApiError(400, f"The body's lists and objects lie more than {MOST_DEEP} deep; send a flatter one.")
