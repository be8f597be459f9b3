"""The toy as drafter: chains, with a small pass for each draft token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.distributions import best_tokens
from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import Drafter, DrafterSpec
from blockdraft.formats import read_drafter
from blockdraft.nn.cache import SequenceState
from blockdraft.targets import Target
from toy.network import ToyNetwork  # type: ignore[import-not-found]


class ToyState(SequenceState):
    """Hidden states `[T, m * H]` of each sequence's T committed tokens."""

    def __init__(self, batch: int, capacity: int, empty: Tensor) -> None:
        self._empty = empty
        super().__init__(batch, capacity)

    def new_value(self) -> Tensor:
        return self._empty

    def cut(self, value: Tensor, length: int) -> Tensor:
        return value[:length]


class ToyDrafter(Drafter):
    def __init__(self, network: ToyNetwork, target: Target, path: Path | None = None) -> None:
        self.network = network.to(target.device, target.dtype).eval()
        self.path, self.target_layers, self.block_size = path, network.config.target_layers, network.config.block_size
        self.target = target

    def new_state(self, batch: int, capacity: int) -> ToyState:
        empty = torch.zeros(0, len(self.target_layers) * self.target.hidden_size, dtype=self.target.dtype)
        return ToyState(batch, capacity, empty)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * len(self.target_layers) * self.target.hidden_size * self.target.dtype.itemsize

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())

    def observe(self, state: ToyState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        assert hidden_states is not None
        for start, new, length in zip(state.starts, hidden_states, lengths, strict=True):
            state.values[start] = torch.cat([state.values[start], new[:length]])

    @torch.no_grad()
    def propose(self, state: ToyState, anchor: Tensor, plan: Plan) -> Proposal:
        hidden = self.network.begin(torch.stack([state.values[start][-1] for start in state.starts]))
        tokens = [anchor]
        for _ in range(plan.block_size - 1):
            hidden = self.network.step(hidden, self.target.embed(tokens[-1]))
            tokens.append(best_tokens(self.target.head(hidden)[:, None])[:, 0])
        return chain(torch.stack(tokens, dim=1))


def load(path: Path, target: Target) -> ToyDrafter:
    actual = read_drafter(path, None, target.num_layers)
    network = ToyNetwork(actual.config)
    network.load_state_dict(actual.tensors)
    return ToyDrafter(network, target, path)


DRAFTER = DrafterSpec(load, architectures=("ToyModel",), network=ToyNetwork, layouts=("toy",), drafter=ToyDrafter)
