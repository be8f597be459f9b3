"""A request among those that are decoded together."""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.engine.request import Request


@dataclass(eq=False)
class Row:
    """A request that is decoded, and the slots that it has in the stores of target and drafter.

    Attributes:
        start: The first of its slots, by which it goes there.
        capacity: How many they are.
        read: Tokens of the prompt that have been read.
    """

    request: Request
    start: int
    capacity: int
    read: int = 0

    @property
    def reading(self) -> bool:
        return self.read < len(self.request.prompt)
