"""The drafter without draft tokens: with it, the loop is plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import Drafter, DrafterSpec
from blockdraft.nn.cache import SequenceState


class NoDrafter(Drafter):
    """Drafter that proposes the anchor alone."""

    path: Path | None = None
    target_layers: tuple[int, ...] = ()
    block_size = 1
    chooses_tree_size = chooses_length = runs_network = False

    def new_state(self, batch: int, capacity: int) -> SequenceState:
        return SequenceState(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return 0

    def weight_bytes(self) -> int:
        return 0

    def propose(self, state: SequenceState, anchor: Tensor, plan: Plan) -> Proposal:
        return chain(anchor[:, None])

    def observe(
        self, state: SequenceState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]
    ) -> None:
        pass


DRAFTER = DrafterSpec(lambda folder, target: NoDrafter(), by_name=True)
