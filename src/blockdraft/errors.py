"""What blockdraft raises. Our own bugs are `AssertionError`s; what torch or the operating system raises stays theirs.

BlockdraftError
|-- UsageError       what a caller can mend; also a ValueError
|-- NumbersError     a model computed no finite numbers; also a FloatingPointError
|-- RequestError     one request failed, and no other; also a RuntimeError
`-- ClosedError      an engine was used after `close`; also a RuntimeError
"""

from __future__ import annotations


class BlockdraftError(Exception):
    """The base of all."""


class UsageError(BlockdraftError, ValueError):
    """An argument, a file or a setting that cannot be used; the message names the value, the limit and the remedy."""


class NumbersError(BlockdraftError, FloatingPointError):
    """A model computed numbers that are not finite."""


class RequestError(BlockdraftError, RuntimeError):
    """A request ended in an error that is not the caller's, and the message says which."""


class ClosedError(BlockdraftError, RuntimeError):
    """The engine is closed and takes no more requests."""
