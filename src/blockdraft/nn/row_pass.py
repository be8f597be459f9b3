"""How networks that guess a token at a time decode by torch's operations: what they keep of texts, and the rows of a
cycle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.machine import send
from blockdraft.nn.cache import KVCache
from blockdraft.nn.rows import CachedAttention, RowNetwork
from blockdraft.timing import HEAD, PASS, mark


class RowPass:
    """A row network beside its target; see `RowRunner` of targets.

    Args:
        network: On its device and in its dtype.
        embed, head: The target's.
        compile_reason: Why it is not compiled, where it might have been.
    """

    def __init__(
        self,
        network: RowNetwork,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        compile_reason: str | None = None,
    ) -> None:
        self.network, self.embed, self.head, self.compile_reason = network, embed, head, compile_reason

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        slot: int = sum(heads * size for heads, size in self.network.cached) + self.network.config.hidden_size
        return batch * capacity * slot * self.network.fc.weight.dtype.itemsize

    def weight_bytes(self) -> int:
        return 0

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def rows_beside(self, block_size: int, width: int) -> int:
        return 0  # the rows of a cycle lie elsewhere

    def observe(self, state: KVCache, tokens: Tensor, features: Tensor) -> None:
        count = tokens.size(1)
        state.check_room(count)
        fused = self.network.fuse(features.to(self.network.fc.weight.dtype))
        *stores, known = self.stores(state)
        before = torch.cat([last_features(state, known), fused[:, :-1]], dim=1)
        positions = (state.slots(count, tokens.device) - 1).clamp(min=0)
        new = *self.network.keys_values(self.embed(tokens), before, positions), fused.unsqueeze(1)
        for store, nodes in zip((*stores, known.unsqueeze(0)), new, strict=True):
            for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
                store[:, row + length : row + length + count] = nodes[place]

    def rows(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> RowsOfCycle:
        return RowsOfCycle(self, state, block_size, width, window)

    def stores(self, state: KVCache) -> tuple[Tensor, ...]:
        """Keys and values of all slots, `[heads, slots, D]` each, and features, `[slots, H]`."""
        like = self.network.fc.weight
        cached = (like.new_empty(1, heads, 0, size) for heads, size in self.network.cached)
        return *state.layer(0, *cached), feature_store(state, 1, self.network.config.hidden_size, like)


class RowsOfCycle:
    """The rows of a cycle, in a copy of the keys and values of their texts, with which they go."""

    def __init__(self, run: RowPass, state: KVCache, block_size: int, width: int, window: int | None) -> None:
        self._run, self._depth = run, 0
        *stores, known = run.stores(state)
        self._feature, device = last_features(state, known), known.device
        window = max(state.lengths) if window is None else window
        skipped, self.room = max(min(state.lengths) - window, 0), 1 + width * (block_size - 2)
        texts = [state.view(store, 0)[0][:, :, skipped:] for store in stores]
        self._keys, self._values = (F.pad(text, (0, 0, 0, self.room)) for text in texts)
        lengths = send(torch.tensor(state.lengths), device)[:, None]
        slots = torch.arange(skipped, max(state.lengths), device=device)
        self._known = (slots >= (lengths - window).clamp(min=1)) & (slots < lengths)  # [B, T]
        self._positions, self._end = lengths - 1, len(slots)
        # Which rows of the cycle each of the last call sees, `[B, N, M]`.
        self._within = torch.ones(len(state.rows), 0, 0, dtype=torch.bool, device=device)

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        network, (batch, count) = self._run.network, tokens.shape
        within, feature = self._within, self._feature
        if parents is not None:
            within, feature = picked(within, parents), picked(feature, parents)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        self._within = within = torch.cat([within.expand(-1, count, -1), own], dim=2) if self._depth else own
        visible = torch.cat([self._known.unsqueeze(1).expand(-1, count, -1), within], dim=2)
        begin, self._end, self.room = self._end, self._end + count, self.room - count

        def write(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._keys[:, :, begin : self._end], self._values[:, :, begin : self._end] = keys, values
            return self._keys[:, :, : self._end], self._values[:, :, : self._end]

        positions = (self._positions + self._depth).clamp(min=0).expand(-1, count)
        self._depth += 1
        hidden = network(self._run.embed(tokens), feature, positions, CachedAttention(write, visible))
        self._feature = network.fed_on(hidden)
        mark(PASS)
        logits = network.logits(hidden, self._run.head)
        mark(HEAD)
        return logits


def picked(rows: Tensor, places: Tensor) -> Tensor:
    """Some of the rows `[B, N, ...]` of each batch row, `[B, K, ...]`, by their places `[B, K]`."""
    return rows.gather(1, places.unsqueeze(2).expand(-1, -1, rows.size(2)))


def feature_store(state: KVCache, layer: int, size: int, like: Tensor) -> Tensor:
    """Of all slots, `[slots, H]`, kept as a layer of the state."""
    return state.layer(layer, like.new_empty(1, 1, 0, size))[0][0]


def last_features(state: KVCache, store: Tensor) -> Tensor:
    """Of the last token of each row, `[B, 1, H]`; 0 where there is none."""
    slots = [row + max(length - 1, 0) for row, length in zip(state.rows, state.lengths, strict=True)]
    found = store[send(torch.tensor(slots), store.device)]
    if not all(state.lengths):
        empty = send(torch.tensor([length == 0 for length in state.lengths]), store.device)
        found = found.masked_fill(empty[:, None], 0)
    return found.unsqueeze(1)
