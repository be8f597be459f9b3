"""Tells the drafter what was committed: at once, or later where a cycle did not draft."""

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

MOST_KEPT = 512  # cycles whose tokens and features are kept before the drafter is told of them
AT_ONCE = 256  # tokens of all rows that one call of `observe` then takes: its memory grows with them


class DraftContext:
    """Keeps the drafter's context up to date with what was committed.

    Tokens of cycles that did not draft are kept, and the drafter observes all of them before its next draft: a call in
    each cycle would slow plain decoding down.

    Args:
        state: The drafter's, with all rows.
    """

    def __init__(self, drafter: Drafter, state: Any, device: torch.device) -> None:
        self._drafter, self._state, self._device = drafter, state, device
        self._kept: list[tuple[Tensor, Tensor | None]] = []  # tokens [B, 1] and features [B, 1, m * H], in order
        self._rows: list[Row] = []  # that these are of

    def keep(self, rows: Sequence[Row], tokens: Tensor, hidden_states: Tensor | None) -> None:
        """Keep what a cycle of one token a row has committed."""
        self._kept.append((tokens, hidden_states))
        self._rows = list(rows)

    def due(self, rows: Sequence[Row], plan: Plan) -> bool:
        """Whether `catch_up` must precede a cycle of these rows."""
        if not self._kept:
            return False
        return plan.block_size > 1 or list(rows) != self._rows or len(self._kept) == MOST_KEPT

    def catch_up(self) -> None:
        """Let the drafter observe what is kept. Must precede any change of rows."""
        if not self._kept:
            return
        tokens, hidden_states = zip(*self._kept, strict=True)
        rows = self._rows
        self._kept, self._rows = [], []
        step = max(1, AT_ONCE // len(rows))
        for first in range(0, len(tokens), step):
            alive = [i for i, row in enumerate(rows) if row.request.failure is None]
            piece = slice(first, first + step)
            piece_tokens = torch.cat(tokens[piece], dim=1)[alive]
            self.observe(
                [rows[i] for i in alive],
                tokens=piece_tokens,
                hidden_states=None if hidden_states[0] is None else torch.cat(hidden_states[piece], dim=1)[alive],
                paths=[range(piece_tokens.size(1))] * len(alive),
            )

    def forget(self, row: int) -> None:
        """Drop what is kept if it is of this row alone, which is about to go: the drafter will not be asked about it.

        Args:
            row: Its first slot.
        """
        if [each.start for each in self._rows] == [row]:
            self._kept, self._rows = [], []

    def observe(
        self, rows: Sequence[Row], tokens: Tensor, hidden_states: Tensor | None, paths: Sequence[Sequence[int]]
    ) -> None:
        """Let the drafter observe the nodes that were committed. A row for which it fails is ended.

        Args:
            tokens: `[B, N]` int64, of all nodes.
            hidden_states: `[B, N, m * H]`; None for a drafter without taps.
            paths: The committed nodes of each row.
        """
        lengths = [len(path) for path in paths]
        most = max(lengths, default=0)
        if most == 0:
            return
        if all(not path or path[-1] == len(path) - 1 for path in paths):  # the first nodes, as in every chain
            tokens, hidden_states = (
                tokens[:, :most],
                hidden_states if hidden_states is None else hidden_states[:, :most],
            )
        else:
            index = send(torch.tensor([[*path, *[0] * (most - len(path))] for path in paths]), self._device)
            tokens = tokens.gather(1, index)
            if hidden_states is not None:
                hidden_states = hidden_states.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden_states.size(-1)))
        state = self._state.of([row.start for row in rows])
        try:
            self._drafter.observe(state, tokens, hidden_states, lengths)
        except Exception as error:
            if len(rows) == 1:
                rows[0].request.fail(RequestError(f"The drafter failed: {describe(error)}"), error)
                return
            for i, row in enumerate(rows):
                self.observe(
                    [row],
                    tokens=tokens[i : i + 1],
                    hidden_states=hidden_states if hidden_states is None else hidden_states[i : i + 1],
                    paths=[range(lengths[i])],
                )
