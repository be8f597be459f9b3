"""The key/value cache: rows as ranges of slots in memory that is allocated once, and `commit` instead of cropping."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor
from typing_extensions import Self

from blockdraft.machine import send

LEAST_SLOTS = 256  # of a row whose size is rounded up
# Bytes. Large pages spare small models most of the time of a first use; a page for each head of large ones is too much.
HUGE_PAGE, MOST_ROUNDING = 2 << 20, 256 << 20


class KVCache:
    """Keys and values of all layers for some rows of tokens.

    The memory is a line of slots, one a token. A row is a range of them and goes by its first slot; it never moves, so
    rows come (`open`) and go (`close`) without a copy of any other. A forward writes its N nodes behind the committed
    tokens of each row; `commit` keeps some of them, moved together, and forgets the others. Slots are zero at first and
    whenever a row is opened on them after one that held numbers which are not finite (`wipe`): attention hides what is
    not a row's own by weights of zero, and zero times NaN is NaN.

    Layers are allocated at their first write, because only then is their shape known; a network that knows it
    beforehand has them all in one tensor (`memory`).

    Args:
        batch: Rows that are open from the start.
        capacity: Slots of each of them.

    Attributes:
        rows: First slots of the rows that this object is about, in the order of a batch.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        self._slots = batch * capacity
        self._lengths: dict[int, int] = {}  # committed tokens by row
        self._capacities: dict[int, int] = {}
        # Of each layer, or of all in one, tensors `[..., heads, slots, D]`.
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self.rows = [place * capacity for place in range(batch)]
        for row in self.rows:
            self.open(row, capacity)

    def of(self, rows: Sequence[int]) -> Self:
        """These rows alone, in this order, over the same memory."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.rows = list(rows)
        return part

    def open(self, row: int, capacity: int) -> None:
        """Begin an empty row on the slots from `row` on, which no open row may hold."""
        assert row >= 0 and row + capacity <= self._slots, f"{row} + {capacity} slots of {self._slots}"
        self._lengths[row], self._capacities[row] = 0, capacity

    def close(self, row: int) -> None:
        """Forget a row."""
        del self._lengths[row], self._capacities[row]

    def shrink(self, row: int, capacity: int) -> None:
        """Give up a row's slots beyond these, with the tokens on them."""
        assert capacity <= self._capacities[row]
        self._capacities[row], self._lengths[row] = capacity, min(self._lengths[row], capacity)

    def copy(self, source: int, row: int, length: int) -> None:
        """Make the first `length` tokens of one row the first of another, which is empty."""
        assert length <= self._lengths[source] and length <= self._capacities[row] and self._lengths[row] == 0
        for store in self._stores():
            store[..., row : row + length, :] = store[..., source : source + length, :]
        self._lengths[row] = length

    def wipe(self, row: int, whole: bool = False) -> None:
        """Set a row's slots behind its committed tokens to zero, with `whole` all of its slots."""
        first, end = row + (0 if whole else self._lengths[row]), row + self._capacities[row]
        for store in self._stores():
            store[..., first:end, :] = 0

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [self._lengths[row] for row in self.rows]

    @property
    def capacity(self) -> int:
        """Slots of the longest row."""
        return max((self._capacities[row] for row in self.rows), default=0)

    @property
    def nbytes(self) -> int:
        """Memory of the slots of all layers that have been written to."""
        return sum(store.nbytes for store in self._stores())

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        """Keep the nodes of each row's path, in order, as the row's next tokens.

        Args:
            path: For each row, indices of nodes of the last forward, increasing; an empty path commits nothing.
        """
        for row, nodes in zip(self.rows, path, strict=True):
            start, count = row + self._lengths[row], len(nodes)
            if list(nodes) != list(range(count)):
                for store in self._stores():
                    kept = send(start + torch.tensor(nodes), store.device)
                    store[..., start : start + count, :] = store.index_select(-2, kept)
            self._lengths[row] += count

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` committed tokens of row i, at most as many as it has."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self._lengths.update(zip(self.rows, lengths, strict=True))

    def slots(self, count: int, device: torch.device) -> Tensor:
        """The slots of the next `count` nodes, counted from the first of their row, `[B, count]`."""
        return send(torch.tensor(self.lengths), device)[:, None] + torch.arange(count, device=device)

    # Memory, for those who compute.

    def memory(self, layers: int, heads: int, head_dim: int, like: Tensor) -> Tensor:
        """All slots, `[layers, heads, slots, D]`, for a network that writes and reads all layers itself.

        Each layer's keys and values lie side by side, as so many heads, so that one operation writes both and `commit`
        moves the nodes of all layers at once. `like` gives dtype and device.
        """
        if 0 not in self._layers:
            self._layers[0] = (_zeros((layers, heads, self._slots, head_dim), like),)
        return self._layers[0][0]

    def check_room(self, count: int) -> int:
        """Assert that each row has slots for `count` nodes; returns how many the longest row needs with them."""
        longest = 0
        for row in self.rows:
            end, held = self._lengths[row] + count, self._capacities[row]
            assert end <= held, f"{end} slots needed, {held} allocated"
            longest = max(longest, end)
        return longest

    @property
    def spare(self) -> int:
        """Nodes for which every row has slots."""
        return min((self._capacities[row] - self._lengths[row] for row in self.rows), default=0)

    def view(self, memory: Tensor, count: int, end: int | None = None) -> tuple[Tensor, bool]:
        """The slots of the rows side by side: committed tokens and the next `count` nodes.

        Args:
            memory: From `memory`, or one layer's `[heads, slots, D]`.
            end: Slots of each row; None is what the longest row needs for its nodes.

        Returns:
            `[..., B, heads, end, D]`, and whether it is the memory itself. Rows that lie at equal distances need no
            copy; of others a copy is returned, and nodes that are written to it have to be `put`.
        """
        rows, needed = self.rows, self.check_room(count)
        end = needed if end is None else end
        least = min(self._capacities[row] for row in rows)
        if len(rows) == 1 and end <= least:
            return memory[..., rows[0] : rows[0] + end, :].unsqueeze(-4), True
        step = rows[1] - rows[0] if len(rows) > 1 else 0
        if end <= least and step > 0 and all(b - a == step for a, b in zip(rows, rows[1:], strict=False)):
            *outer, stride, inner = memory.stride()
            shape = (*memory.shape[:-3], len(rows), memory.size(-3), end, memory.size(-1))
            strides = (*outer[:-1], step * stride, outer[-1], stride, inner)
            return memory.as_strided(shape, strides, memory.storage_offset() + rows[0] * stride), True
        # Slots beyond a row's own nodes are those of the row's beginning, which are finite and which masks hide.
        at = torch.arange(end).repeat(len(rows), 1)
        own = torch.tensor(self.lengths)[:, None] + count
        slots = torch.where(at < own, at, 0) + torch.tensor(rows)[:, None]
        taken = memory.index_select(-2, send(slots.flatten(), memory.device)).unflatten(-2, slots.shape)
        return taken.movedim(-4, -3), False

    def put(self, memory: Tensor, copied: Tensor, count: int) -> None:
        """Write the `count` nodes behind each row's committed tokens in a copy, as `view` made it, to the memory."""
        for place, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            nodes = copied.select(-4, place)[..., length : length + count, :]
            memory[..., row + length : row + length + count, :] = nodes

    def layer(self, layer: int, *nodes: Tensor) -> tuple[Tensor, ...]:
        """All slots of a layer, `[heads, slots, D]` of keys, values or what else is like these, `[B, heads, N, D]`."""
        if layer not in self._layers:
            self._layers[layer] = tuple(_zeros((t.size(1), self._slots, t.size(3)), t) for t in nodes)
        return self._layers[layer]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values of N nodes, `[B, heads, N, D]`, behind each row's committed tokens.

        Returns:
            `[B, heads, T, D]` each, with T = max(lengths) + N. Slots past a row's own nodes hold other numbers, so a
            mask must hide them; `self.slots` gives the slots of the nodes.
        """
        count, (of_keys, of_values) = keys.size(2), self.layer(layer, keys, values)
        self.check_room(count)
        for place, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            first = row + length
            of_keys[:, first : first + count] = keys[place]
            of_values[:, first : first + count] = values[place]
        return self.view(of_keys, count)[0], self.view(of_values, count)[0]

    def _stores(self) -> Iterator[Tensor]:
        for stores in self._layers.values():
            yield from stores


def bucket(count: int) -> int:
    """The least of 1, 2, ..., 8, 10, 12, 14, 16, 20, 24, ... that is no less: four to a doubling."""
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step


def slot_bucket(slots: int) -> int:
    """Slots of a row, rounded up, so that rows of similar lengths have as many."""
    return max(bucket(slots), LEAST_SLOTS)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on a CPU in memory that the system hands out page by page as it is used."""
    size = prod(shape) * like.dtype.itemsize
    if like.device.type != "cpu" or size == 0:
        return like.new_zeros(shape)
    kinds = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE")  # nothing is set aside for what is never used
    flags = sum(getattr(mmap, kind, 0) for kind in kinds)
    memory = mmap.mmap(-1, size, flags) if flags else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE") and prod(shape[:-2]) * HUGE_PAGE <= MOST_ROUNDING:
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).resize_(shape)  # a view would belong to the mode it was made in


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
