"""A drafter for text that repeats with a fixed period, such as tables and logs: `--drafter period`.

It finds the last earlier place of the two newest tokens, and drafts what followed there. A real drafter of this idea is
`lookup`; this one shows what a plugin needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import Drafter, DrafterSpec
from blockdraft.nn.cache import SequenceState

BLOCK_SIZE = 5  # longest path: the anchor and four draft tokens


class TokenState(SequenceState):
    """Committed tokens of the sequences."""

    values: dict[int, list[int]]

    def new_value(self) -> list[int]:
        return []

    def cut(self, value: list[int], length: int) -> list[int]:
        return value[:length]

    def value_of(self, start: int, tokens: Sequence[int]) -> list[int]:
        return list(tokens)


class PeriodDrafter(Drafter):
    """Drafts what followed the last earlier occurrence of the two newest tokens."""

    path = None
    target_layers = ()
    block_size = BLOCK_SIZE
    runs_network = False

    def new_state(self, batch: int, capacity: int) -> TokenState:
        return TokenState(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return 8 * batch * capacity

    def weight_bytes(self) -> int:
        return 0

    def propose(self, state: TokenState, anchor: Tensor, plan: Plan) -> Proposal:
        """Return a chain for each sequence; anchors are `[B]` int64, the last committed tokens."""
        rows = []
        for tokens, last in zip(map(state.values.__getitem__, state.starts), anchor.tolist(), strict=True):
            rows.append([last, *follower([*tokens, last], plan.block_size - 1)])
        return chain(torch.tensor(rows, device=anchor.device))

    def observe(self, state: TokenState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        """Append committed tokens: the first `lengths[i]` of row i of `tokens`, `[B, N]` int64."""
        for start, row, length in zip(state.starts, tokens.tolist(), lengths, strict=True):
            state.values[start] += row[:length]


def follower(tokens: list[int], count: int) -> list[int]:
    """Return `count` tokens that followed the last earlier occurrence of the newest two, else the newest token."""
    for end in range(len(tokens) - 2, 0, -1):
        if tokens[end - 1 : end + 1] == tokens[-2:]:
            period = tokens[end + 1 :]
            return [period[i % len(period)] for i in range(count)]
    return [tokens[-1]] * count


DRAFTER = DrafterSpec(lambda folder, target: PeriodDrafter(), by_name=True)
