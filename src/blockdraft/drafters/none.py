"""The drafter without draft tokens: with it, the loop is plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import Drafter, DrafterSpec


class _NoState:
    """State of a drafter that remembers nothing."""

    def of(self, rows: Sequence[int]) -> _NoState:
        return self

    def open(self, row: int, capacity: int) -> None:
        pass

    def close(self, row: int) -> None:
        pass

    def shrink(self, row: int, capacity: int) -> None:
        pass

    def copy(self, source: int, row: int, length: int) -> None:
        pass

    def zero_slots(self, row: int, whole: bool = False) -> None:
        pass


class NoDrafter(Drafter):
    """Drafter that proposes the anchor alone."""

    path: Path | None = None
    target_layers: tuple[int, ...] = ()
    block_size = 1
    chooses_tree_size = chooses_length = runs_network = False

    def new_state(self, batch: int, capacity: int) -> _NoState:
        return _NoState()

    def state_bytes(self, batch: int, capacity: int) -> int:
        return 0

    def weight_bytes(self) -> int:
        return 0

    def propose(self, state: _NoState, anchor: Tensor, plan: Plan) -> Proposal:
        return chain(anchor[:, None])

    def observe(self, state: _NoState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        pass


DRAFTER = DrafterSpec(lambda folder, target: NoDrafter(), by_name=True)
