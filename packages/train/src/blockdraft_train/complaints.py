"""Errors in the input, collected and reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from blockdraft.errors import UsageError

T = TypeVar("T")


class Complaints:
    """Collects errors, and raises one that names them all."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note a `UsageError` that is raised inside, and continue after the block."""
        try:
            yield
        except UsageError as error:
            self.messages.append(str(error))

    def noted(self, check: Callable[..., T], *arguments: Any) -> T | None:
        """Call a function and return its result, or None if it raises a `UsageError`, which is noted."""
        with self.noting():
            return check(*arguments)
        return None

    def check(self) -> None:
        """Raise one `UsageError` with everything noted, if there is anything."""
        if self.messages:
            several = "".join(f"\n- {message}" for message in self.messages)
            raise UsageError(
                self.messages[0] if len(self.messages) == 1 else f"{len(self.messages)} things do not fit:{several}"
            )
