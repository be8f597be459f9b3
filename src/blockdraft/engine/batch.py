"""Requests that are decoded together: their rows in the caches, and how they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.drafters import State
from blockdraft.engine.request import Request
from blockdraft.machine import send
from blockdraft.targets import Cache


@dataclass
class Batch:
    """Attributes:
    requests: One a row.
    cache: The target's cache; it holds a row's prompt and answer except for the anchor.
    state: The drafter's memory of the same tokens, those in `unobserved` left out.
    unobserved: Tokens `[B, 1]` and features `[B, 1, m * H]` of cycles that did not draft, in order. The drafter is told
        of them before it drafts again, all at once: a call for each would make plain decoding slower.
    """

    requests: list[Request]
    cache: Cache
    state: State
    unobserved: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def join(self, other: Batch, capacity: int) -> None:
        """Take over the requests of another batch; `capacity` is what each row needs from now on, in slots."""
        self.cache.join(other.cache, capacity)
        self.state.join(other.state, capacity)
        self.requests += other.requests

    def drop_finished(self) -> None:
        """Free the rows of finished requests. Rows from the end move into the gaps, so that few are copied."""
        going = [row for row, request in enumerate(self.requests) if not request.finished]
        kept: list[int] = []
        while going:
            kept.append(going.pop(0) if going[0] == len(kept) else going.pop())
        if kept != list(range(len(self.requests))):
            self.cache.select(kept)
            self.state.select(kept)
            self.requests = [self.requests[row] for row in kept]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of numbers as one tensor `[B, longest]` int64, filled up with zeros at their ends."""
    longest = max(map(len, rows))
    return send(torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64), device)
