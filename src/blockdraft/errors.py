"""Errors that blockdraft raises. Bugs of its own are `AssertionError`s; errors of torch and the system pass unchanged.

BlockdraftError
|-- UsageError       a fault that the caller can mend; also a ValueError
|-- NumbersError     a model computed numbers that are not finite; also a FloatingPointError
|-- RequestError     one request failed, and no other; also a RuntimeError
`-- ClosedError      an engine was used after `close`; also a RuntimeError
"""

from __future__ import annotations


class BlockdraftError(Exception):
    """Base class of all errors."""


class UsageError(BlockdraftError, ValueError):
    """An argument, a file or a setting that cannot be used; the message names the value, the limit and the remedy."""


class NumbersError(BlockdraftError, FloatingPointError):
    """A model computed numbers that are not finite."""


class RequestError(BlockdraftError, RuntimeError):
    """A request ended in an error that is not the caller's, and the message says which."""


class ClosedError(BlockdraftError, RuntimeError):
    """The engine is closed and takes no more requests."""


def describe(error: BaseException) -> str:
    """Return an error as one line: its kind, unless it is one of ours, and the first line of its message."""
    lines = str(error).strip().splitlines()
    kind = "" if isinstance(error, BlockdraftError) else type(error).__name__
    return ": ".join(filter(None, [kind, lines[0] if lines else ""])) or type(error).__name__


def counted(number: int, noun: str) -> str:
    """Return a count with its noun, in the singular for 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return a time in words, in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
