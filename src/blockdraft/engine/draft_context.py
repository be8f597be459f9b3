"""The drafter is told what was committed: at once, or later, where a cycle did not draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan
from blockdraft.drafters import Drafter
from blockdraft.engine.request import Row
from blockdraft.errors import RequestError, describe
from blockdraft.machine import send

MOST_KEPT = 512  # cycles whose features are kept before the drafter is told of them
AT_ONCE = 256  # tokens, of all rows together, that it is then told of in a call: what a call takes grows with them


class DraftContext:
    """Tells a drafter of committed tokens.

    What cycles that did not draft have committed is kept, and the drafter is told of all of it at once before it
    drafts again: a call each would make plain decoding slower.

    Args:
        state: Of the drafter, with all its rows.
    """

    def __init__(self, drafter: Drafter, state: Any, device: torch.device) -> None:
        self._drafter, self._state, self._device = drafter, state, device
        self._kept: list[tuple[Tensor, Tensor | None]] = []  # tokens [B, 1] and features [B, 1, m * H], in order
        self._rows: list[Row] = []  # theirs

    def keep(self, rows: Sequence[Row], tokens: Tensor, features: Tensor | None) -> None:
        """Put aside what a cycle of one token a row has committed."""
        self._kept.append((tokens, features))
        self._rows = list(rows)

    def due(self, rows: Sequence[Row], plan: Plan) -> bool:
        """Whether the drafter must be told what is kept before a cycle of these rows."""
        if not self._kept:
            return False
        return plan.block_size > 1 or list(rows) != self._rows or len(self._kept) == MOST_KEPT

    def catch_up(self) -> None:
        """Tell the drafter what is kept. Due before rows come or go."""
        if not self._kept:
            return
        tokens, features = zip(*self._kept, strict=True)
        rows = self._rows
        self._kept, self._rows = [], []
        step = max(1, AT_ONCE // len(rows))
        for first in range(0, len(tokens), step):
            alive = [place for place, row in enumerate(rows) if row.request.failure is None]
            piece = slice(first, first + step)
            told = torch.cat(tokens[piece], dim=1)[alive]
            together = None if features[0] is None else torch.cat(features[piece], dim=1)[alive]
            self.observe([rows[place] for place in alive], told, together, [range(told.size(1))] * len(alive))

    def forget(self, row: int) -> None:
        """Drop what is kept of a row that goes, where it is that row's alone: no one will ask the drafter about it."""
        if [each.start for each in self._rows] == [row]:
            self._kept, self._rows = [], []

    def observe(
        self, rows: Sequence[Row], tokens: Tensor, features: Tensor | None, path: Sequence[Sequence[int]]
    ) -> None:
        """Tell the drafter which nodes were committed, rows padded to one length. A row for which it fails ends.

        Args:
            tokens: `[B, N]`.
            features: `[B, N, m * H]`; None for a drafter without taps.
            path: The nodes of each row.
        """
        lengths = [len(nodes) for nodes in path]
        most = max(lengths, default=0)
        if most == 0:
            return
        if all(not nodes or nodes[-1] == len(nodes) - 1 for nodes in path):  # the first nodes, as always in chains
            tokens, features = tokens[:, :most], features if features is None else features[:, :most]
        else:
            index = send(torch.tensor([[*nodes, *[0] * (most - len(nodes))] for nodes in path]), self._device)
            tokens = tokens.gather(1, index)
            if features is not None:
                features = features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.size(-1)))
        state = self._state.of([row.start for row in rows])
        try:
            self._drafter.observe(state, tokens, features, lengths)
        except Exception as error:
            if len(rows) == 1:
                rows[0].request.fail(RequestError(f"The drafter failed: {describe(error)}"), error)
                return
            for place, row in enumerate(rows):
                own = slice(place, place + 1)
                nodes = [range(lengths[place])]
                self.observe([row], tokens[own], features if features is None else features[own], nodes)
