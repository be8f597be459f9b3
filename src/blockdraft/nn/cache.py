"""The key/value cache: preallocated, with a length of its own for each row, and `commit` instead of cropping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from blockdraft.machine import send


class KVCache:
    """Keys and values of all layers for B rows of up to `capacity` tokens.

    A forward writes its N nodes behind the committed tokens of each row; `commit` keeps some of them, moved together,
    and forgets the others. Layers are allocated at their first write, because only then is their shape known; a network
    that knows it beforehand has them all in one tensor (`stacked`). Rows may leave (`select`) and come (`join`); the
    memory of rows that left is used again by rows that come.

    Attributes:
        lengths: Committed tokens of each row.
        capacity: Slots of each row; nodes need slots too.

    Args:
        room: How many slots to allocate in `stacked` for a capacity, where not just as many.
    """

    def __init__(self, batch: int, capacity: int, room: Callable[[int], int] = int) -> None:
        self.lengths = [0] * batch
        self.capacity = capacity
        self._room = room
        # Of each layer, or of all in one, tensors `[..., B, heads, capacity, D]`.
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values of N nodes, `[B, heads, N, D]`, behind each row's committed tokens.

        Returns:
            Views `[B, heads, T, D]` with T = max(lengths) + N. Slots past a row's own nodes hold leftovers, so a mask
            must hide them; `self.slots` gives the slots of the nodes.
        """
        if layer not in self._layers:
            shapes = [(t.size(0), t.size(1), self.capacity, t.size(3)) for t in (keys, values)]
            self._layers[layer] = (keys.new_zeros(shapes[0]), values.new_zeros(shapes[1]))
        batch = len(self.lengths)
        stored = tuple(store[:batch] for store in self._layers[layer])
        count = keys.size(2)
        end = max(self.lengths) + count
        assert end <= self.capacity, f"{end} slots needed, {self.capacity} allocated"
        for store, new in zip(stored, (keys, values), strict=True):
            if min(self.lengths) == max(self.lengths):
                store[:, :, end - count : end] = new
            else:
                slots = self.slots(count, new.device)[:, None, :, None].expand_as(new)
                store.scatter_(2, slots, new)
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def stacked(self, layers: int, heads: int, head_dim: int, like: Tensor) -> Tensor:
        """The store of a network that writes and reads all layers itself, `[layers, B, heads, slots, D]`.

        Each layer's keys and values lie in it side by side, as so many heads, so that one operation writes both and
        `commit` moves the nodes of all layers at once. `like` gives its dtype and device.
        """
        if 0 not in self._layers:
            shape = (layers, len(self.lengths), heads, self._room(self.capacity), head_dim)
            self._layers[0] = (like.new_zeros(shape),)
        [store] = self._layers[0]
        return store if store.size(1) == len(self.lengths) else store[:, : len(self.lengths)]

    def slots(self, count: int, device: torch.device) -> Tensor:
        """The slots of the next `count` nodes, `[B, count]`."""
        return send(torch.tensor(self.lengths), device)[:, None] + torch.arange(count, device=device)

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        """Keep the nodes of each row's path, in order, as the row's next tokens.

        Args:
            path: For each row, indices of nodes of the last forward, increasing; an empty path commits nothing.
        """
        for row, nodes in enumerate(path):
            start, count = self.lengths[row], len(nodes)
            if list(nodes) != list(range(count)):
                for store in self._stores():
                    kept = send(start + torch.tensor(nodes), store.device)
                    of_row = store.select(-4, row)
                    of_row[..., start : start + count, :] = of_row.index_select(-2, kept)
            self.lengths[row] += count

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` committed tokens of row i, at most as many as it has."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        if all(row >= place for place, row in enumerate(rows)):  # then no row is overwritten before it is read
            for place, row in enumerate(rows):
                if place != row:
                    for store in self._stores():
                        _copy_row(store, place, store, row, self.lengths[row])
        else:
            for layer, stores in self._layers.items():
                index = torch.tensor(rows, device=stores[0].device)
                self._layers[layer] = tuple(store.index_select(-4, index) for store in stores)
        self.lengths = [self.lengths[row] for row in rows]

    def join(self, other: KVCache, capacity: int) -> None:
        """Take over the rows of another cache, behind this one's own.

        Args:
            capacity: Slots that each row needs from now on.
        """
        first = len(self.lengths)
        self.lengths += other.lengths
        self.capacity = capacity
        for layer in self._layers.keys() | other._layers.keys():
            like = self._layers.get(layer) or other._layers[layer]
            own = self._layers.get(layer, tuple(store.narrow(-4, 0, 0) for store in like))
            grown = tuple(_with_room(store, len(self.lengths), self._room(self.capacity)) for store in own)
            for store, new in zip(grown, other._layers.get(layer, ()), strict=False):
                for row, length in enumerate(other.lengths):
                    _copy_row(store, first + row, new, row, length)
            self._layers[layer] = grown

    def prefix(self, row: int, length: int) -> KVCache:
        """A cache of one row that holds a copy of this row's first `length` tokens, without room for more."""
        assert length <= self.lengths[row]
        copy = KVCache(1, length)
        copy.lengths = [length]
        for layer, stores in self._layers.items():
            copy._layers[layer] = tuple(s.narrow(-4, row, 1)[..., :length, :].clone() for s in stores)
        return copy

    def _stores(self) -> Iterator[Tensor]:
        for stores in self._layers.values():
            yield from stores


def _copy_row(into: Tensor, place: int, store: Tensor, row: int, length: int) -> None:
    into.select(-4, place)[..., :length, :] = store.select(-4, row)[..., :length, :]


def _with_room(store: Tensor, rows: int, capacity: int) -> Tensor:
    """The store itself if it has so many rows and slots, else a new one that has exactly these, with its numbers."""
    *layers, held, heads, room, head_dim = store.shape
    if held >= rows and room >= capacity:
        return store
    new = store.new_zeros(*layers, rows, heads, capacity, head_dim)
    kept, slots = min(held, rows), min(room, capacity)
    new[..., :kept, :, :slots, :] = store[..., :kept, :, :slots, :]
    return new


def write_nodes(store: Tensor, nodes: Tensor, slots: Tensor) -> None:
    """Put nodes into slots of a store.

    Args:
        store: `[B, heads, T, D]`.
        nodes: `[B, N, heads, D]`.
        slots: `[B, N]` int64, or `[N]` where the rows share them.
    """
    if slots.ndim == 1:
        store.index_copy_(2, slots, nodes.transpose(1, 2))
    else:
        rows = torch.arange(len(slots), device=slots.device)
        store[rows[:, None], :, slots] = nodes
