"""Ways to draft: chains and trees of so many guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blockdraft.decode.proposal import Plan
from blockdraft.errors import UsageError
from blockdraft.types import Drafting, SamplingParams


class Way(NamedTuple):
    """Attributes:
    tree: Whether the guesses form a tree, or a chain.
    guesses: How many there are.
    """

    tree: bool
    guesses: int

    @property
    def name(self) -> str:
        return f"{'tree' if self.tree else 'chain'}:{self.guesses}"

    def drafting(self, block_size: int) -> Drafting:
        """For a drafter of these blocks, anchor included."""
        if self.tree:
            return Drafting(block_size, self.guesses)
        return Drafting(min(self.guesses + 1, block_size))

    def plan(self, block_size: int, rows: int) -> Plan:
        params = [SamplingParams()] * rows
        if self.tree:
            return Plan(block_size, params, self.guesses)
        return Plan(min(self.guesses + 1, block_size), params)


def parse(name: str) -> Way:
    """Raises UsageError for what is neither `chain:N` nor `tree:N`."""
    kind, _, number = name.partition(":")
    if kind not in ("chain", "tree") or not number.isdigit() or number == "0":
        raise UsageError(f"Way {name!r} is unknown; a way is chain:N or tree:N with N guesses.")
    return Way(kind == "tree", int(number))


def ways_of(wanted: Sequence[Way], block_size: int, trees: bool) -> list[Way]:
    """Those that a drafter can do: chains are cut to its blocks, anchor included."""
    cut = [way if way.tree else Way(False, min(way.guesses, block_size - 1)) for way in wanted if trees or not way.tree]
    return list(dict.fromkeys(cut))
