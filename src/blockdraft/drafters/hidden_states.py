"""An observer that keeps the target's hidden states of running sequences, from which drafters are trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.drafters.base import Observer
from blockdraft.nn.cache import SequenceState

DTYPE = torch.bfloat16


class HiddenStateLog(SequenceState):
    """Hidden states of the committed tokens of each sequence, on the CPU, as parts `[n, m * H]` in order."""

    values: dict[int, list[Tensor]]

    def new_value(self) -> list[Tensor]:
        return []

    def cut(self, value: list[Tensor], length: int) -> list[Tensor]:
        # A copy, since a view would keep all of them in memory.
        return [torch.cat(value)[:length].clone()] if value else []

    def read(self, start: int) -> Tensor | None:
        """Return the hidden states `[S, m * H]` of a sequence, or None if it has no tokens."""
        parts = self.values[start]
        return torch.cat(parts) if parts else None


class HiddenStateObserver(Observer):
    """Keeps the hidden states of these target layers in bfloat16.

    Args:
        hidden_size: Values per layer and token.
    """

    def __init__(self, target_layers: Sequence[int], hidden_size: int) -> None:
        self.target_layers = tuple(target_layers)
        self._width = len(self.target_layers) * hidden_size

    def new_state(self, batch: int, capacity: int) -> HiddenStateLog:
        return HiddenStateLog(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * self._width * DTYPE.itemsize

    def observe(
        self, state: HiddenStateLog, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]
    ) -> None:
        assert hidden_states is not None
        for start, length, row in zip(state.starts, lengths, hidden_states, strict=True):
            if length:
                # A copy also if it is bfloat16 already, since the rows belong to the target.
                state.values[start].append(row[:length].to("cpu", DTYPE, copy=True))
