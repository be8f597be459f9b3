"""The toy as drafter: chains, with a small pass for each draft token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from blockdraft.drafters.toy.network import ToyNetwork  # type: ignore[import-not-found]
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.decode.sampling import best_tokens
from blockdraft.drafters.base import Drafter, DrafterSpec
from blockdraft.formats import read_drafter
from blockdraft.targets import Target


class ToyState:
    """Features `[T, m * H]` of each row's T committed tokens."""

    def __init__(self, starts: Sequence[int], known: dict[int, Tensor], empty: Tensor) -> None:
        self._starts, self._known, self._empty = list(starts), known, empty

    @property
    def rows(self) -> list[Tensor]:
        return [self._known[start] for start in self._starts]

    @rows.setter
    def rows(self, rows: Sequence[Tensor]) -> None:
        self._known.update(zip(self._starts, rows, strict=True))

    def of(self, rows: Sequence[int]) -> ToyState:
        return ToyState(rows, self._known, self._empty)

    def open(self, row: int, capacity: int) -> None:
        self._known[row] = self._empty

    def close(self, row: int) -> None:
        del self._known[row]

    def shrink(self, row: int, capacity: int) -> None:
        self._known[row] = self._known[row][:capacity]

    def copy(self, source: int, row: int, length: int) -> None:
        self._known[row] = self._known[source][:length]

    def zero_slots(self, row: int, whole: bool = False) -> None:
        pass


class ToyDrafter(Drafter):
    def __init__(self, network: ToyNetwork, target: Target, path: Path | None = None) -> None:
        self.network = network.to(target.device, target.dtype).eval()
        self.path, self.target_layers, self.block_size = path, network.config.target_layers, network.config.block_size
        self._target = target

    def new_state(self, batch: int, capacity: int) -> ToyState:
        empty = torch.zeros(0, len(self.target_layers) * self._target.hidden_size, dtype=self._target.dtype)
        starts = range(0, batch * capacity, max(capacity, 1)) if capacity else range(batch)
        return ToyState(starts, dict.fromkeys(starts, empty), empty)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * len(self.target_layers) * self._target.hidden_size * self._target.dtype.itemsize

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())

    def observe(self, state: ToyState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        assert hidden_states is not None
        news = [row[:length] for row, length in zip(hidden_states, lengths, strict=True)]
        state.rows = [torch.cat([row, new]) for row, new in zip(state.rows, news, strict=True)]

    @torch.no_grad()
    def propose(self, state: ToyState, anchor: Tensor, plan: Plan) -> Proposal:
        hidden = self.network.begin(torch.stack([row[-1] for row in state.rows]))
        tokens = [anchor]
        for _ in range(plan.block_size - 1):
            hidden = self.network.step(hidden, self._target.embed(tokens[-1]))
            tokens.append(best_tokens(self._target.head(hidden)[:, None])[:, 0])
        return chain(torch.stack(tokens, dim=1))


def load(path: Path, target: Target) -> ToyDrafter:
    found = read_drafter(path, None, target.num_layers)
    network = ToyNetwork(found.config)
    network.load_state_dict(found.tensors)
    return ToyDrafter(network, target, path)


DRAFTER = DrafterSpec(load, architectures=("ToyModel",), network=ToyNetwork, layouts=("toy",), drafter=ToyDrafter)
