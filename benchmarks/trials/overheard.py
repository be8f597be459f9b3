"""What the target said after guesses that it then rejected.

An engine tells a drafter of committed tokens alone, so trials listen at the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from blockdraft.targets import Cache, Target, TargetOutput

MOST = 8  # tokens after a node that are remembered


@dataclass(frozen=True)
class Heard:
    """A forward of the target: rows of its cache, and the nodes with the laws after them."""

    rows: Sequence[int]
    tokens: Tensor
    parents: Tensor
    logits: Tensor

    @cached_property
    def likely(self) -> list[list[list[tuple[int, float]]]]:
        """For each row and node the likeliest tokens after it with their probabilities."""
        top = self.logits.float().softmax(dim=-1).topk(min(MOST, self.logits.size(-1)), dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [[list(zip(*node, strict=True)) for node in zip(*row, strict=True)] for row in pairs]


class Overheard:
    """A target whose last forward over a proposal can be asked for.

    Attributes:
        last: None behind a forward that was about a prompt.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.last: Heard | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: Cache,
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        output = self._target.forward(tokens, parents, cache, taps, logits_at)
        rows: Any = cache
        self.last = Heard(rows.rows, tokens, parents, output.logits) if logits_at is None else None
        return output


@dataclass
class Rejected:
    """What a cycle has left behind in a row.

    Attributes:
        guesses: The rejected ones, g1, g2, ...
        after: The likeliest tokens after each of them, with their probabilities.
    """

    guesses: list[int]
    after: list[list[tuple[int, float]]]


def rejected(heard: Heard, place: int, committed: Sequence[int]) -> Rejected:
    """The likeliest path behind the nodes that were committed.

    Args:
        place: The row's, in the batch.
        committed: Tokens of these nodes, the anchor first.
    """
    tokens, parents = heard.tokens[place].tolist(), heard.parents[place].tolist()
    child = {(parents[node], tokens[node]): node for node in range(len(tokens) - 1, 0, -1)}
    first = {parents[node]: node for node in range(len(tokens) - 1, 0, -1)}  # nodes come the likeliest first
    node: int | None = 0 if tokens[0] == committed[0] else None
    for token in committed[1:]:
        node = None if node is None else child.get((node, token))
    found = Rejected([], [])
    while node is not None and (node := first.get(node)) is not None:
        found.guesses.append(tokens[node])
        found.after.append(heard.likely[place][node])
    return found
