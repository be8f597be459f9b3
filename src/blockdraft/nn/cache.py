"""Key/value cache whose rows are ranges of slots in memory allocated once, and whose rollback is `commit`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor
from typing_extensions import Self

from blockdraft.machine import send

LEAST_SLOTS = 256  # smallest size of a row that is rounded up
# Bytes. Huge pages spare small models most of the time of a first use; large models would waste up to one a head.
HUGE_PAGE, MOST_ROUNDING = 2 << 20, 256 << 20


class KVCache:
    """Keys and values of all layers for the rows of a batch.

    The memory is a line of slots, one a token. A row is a range of slots, named by its first one. It never moves, so
    rows come (`open`) and go (`close`) without a copy of other rows. A forward writes its N nodes behind the committed
    tokens of each row; `commit` keeps some of them, moved together, and forgets the others.

    All slots are zero at first. Whoever closes a row with numbers that are not finite sets its slots to zero before
    (`zero_slots`): attention gives slots outside of a row weights of zero, and zero times NaN is NaN.

    Layers are allocated at their first write, when their shape is known. A network that knows the shape beforehand has
    all layers in one tensor (`memory`).

    Args:
        batch: Number of rows that are open from the start.
        capacity: Slots of each of them.

    Attributes:
        rows: First slots of this object's rows, in the order of a batch.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        self._slots = batch * capacity
        self._lengths: dict[int, int] = {}  # committed tokens by row
        self._capacities: dict[int, int] = {}
        # Tensors `[..., heads, slots, D]` of each layer, or at 0 one of all layers.
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self.rows = [number * capacity for number in range(batch)]
        for row in self.rows:
            self.open(row, capacity)

    def of(self, rows: Sequence[int]) -> Self:
        """View of these rows alone, in this order, over the same memory."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.rows = list(rows)
        return part

    def open(self, row: int, capacity: int) -> None:
        """Begin an empty row on `capacity` slots from slot `row` on, which may belong to no open row."""
        assert row >= 0 and row + capacity <= self._slots, f"{row} + {capacity} slots of {self._slots}"
        self._lengths[row], self._capacities[row] = 0, capacity

    def close(self, row: int) -> None:
        """Forget a row."""
        del self._lengths[row], self._capacities[row]

    def shrink(self, row: int, capacity: int) -> None:
        """Free a row's slots from the `capacity`th on, and the tokens on them."""
        assert capacity <= self._capacities[row]
        self._capacities[row], self._lengths[row] = capacity, min(self._lengths[row], capacity)

    def copy(self, source: int, row: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to the empty row `row`."""
        assert length <= self._lengths[source] and length <= self._capacities[row] and self._lengths[row] == 0
        for store in self._stores():
            store[..., row : row + length, :] = store[..., source : source + length, :]
        self._lengths[row] = length

    def zero_slots(self, row: int, whole: bool = False) -> None:
        """Set a row's slots behind its committed tokens to zero; all of its slots if `whole`."""
        first, end = row + (0 if whole else self._lengths[row]), row + self._capacities[row]
        for store in self._stores():
            store[..., first:end, :] = 0

    @property
    def lengths(self) -> list[int]:
        """Number of committed tokens of each row."""
        return [self._lengths[row] for row in self.rows]

    @property
    def capacity(self) -> int:
        """Slots of the longest row."""
        return max((self._capacities[row] for row in self.rows), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that have been written to."""
        return sum(store.nbytes for store in self._stores())

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        """Keep nodes of the last forward as each row's next tokens, in order.

        Args:
            path: Increasing indices of nodes for each row; an empty path commits nothing.
        """
        for row, nodes in zip(self.rows, path, strict=True):
            start, count = row + self._lengths[row], len(nodes)
            if list(nodes) != list(range(count)):
                for store in self._stores():
                    accepted = send(start + torch.tensor(nodes), store.device)
                    store[..., start : start + count, :] = store.index_select(-2, accepted)
            self._lengths[row] += count

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` committed tokens of row i, at most as many as it has."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self._lengths.update(zip(self.rows, lengths, strict=True))

    def slots(self, count: int, device: torch.device) -> Tensor:
        """Slots of the next `count` nodes, counted from the first slot of their row, `[B, count]` int64."""
        return send(torch.tensor(self.lengths), device)[:, None] + torch.arange(count, device=device)

    # Memory, for forwards.

    def memory(self, layers: int, heads: int, head_dim: int, like: Tensor) -> Tensor:
        """All slots of all layers, `[layers, heads, slots, D]`, for a network that writes and reads them itself.

        Keys and values are heads side by side, so that one operation writes both, and `commit` moves the nodes of all
        layers at once.

        Args:
            heads: Heads of keys and values together.
            like: A tensor of the memory's dtype and device.
        """
        if 0 not in self._layers:
            self._layers[0] = (_zeros((layers, heads, self._slots, head_dim), like),)
        return self._layers[0][0]

    def check_room(self, count: int) -> int:
        """Assert that each row has slots for `count` more nodes. Returns the slots of the longest row with them."""
        longest = 0
        for row in self.rows:
            end, held = self._lengths[row] + count, self._capacities[row]
            assert end <= held, f"{end} slots needed, {held} allocated"
            longest = max(longest, end)
        return longest

    @property
    def spare(self) -> int:
        """Number of further nodes for which every row has slots."""
        return min((self._capacities[row] - self._lengths[row] for row in self.rows), default=0)

    def view(self, memory: Tensor, count: int, end: int | None = None) -> tuple[Tensor, bool]:
        """Slots of the rows side by side, for committed tokens and the next `count` nodes.

        Args:
            memory: Result of `memory`, or one layer's `[heads, slots, D]`.
            end: Slots of each row; None is the number that the longest row needs with its nodes.

        Returns:
            Slots `[..., B, heads, end, D]`, and whether they are the memory itself. Rows at unequal distances are
            copied; nodes that are written to the copy have to be `put`.
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
        # Slots beyond a row's own nodes repeat its first slot, which is finite and hidden by masks.
        at = torch.arange(end).repeat(len(rows), 1)
        own = torch.tensor(self.lengths)[:, None] + count
        slots = torch.where(at < own, at, 0) + torch.tensor(rows)[:, None]
        taken = memory.index_select(-2, send(slots.flatten(), memory.device)).unflatten(-2, slots.shape)
        return taken.movedim(-4, -3), False

    def put(self, memory: Tensor, copied: Tensor, count: int) -> None:
        """Write the `count` nodes behind each row's committed tokens from a copy, made by `view`, to the memory."""
        for number, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            nodes = copied.select(-4, number)[..., length : length + count, :]
            memory[..., row + length : row + length + count, :] = nodes

    def layer(self, layer: int, *nodes: Tensor) -> tuple[Tensor, ...]:
        """All slots of a layer, `[heads, slots, D]` for each tensor of nodes `[B, heads, N, D]`, such as keys and
        values."""
        if layer not in self._layers:
            self._layers[layer] = tuple(_zeros((t.size(1), self._slots, t.size(3)), t) for t in nodes)
        return self._layers[layer]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of N nodes, `[B, heads, N, D]`, behind each row's committed tokens.

        Returns:
            Keys and values `[B, heads, T, D]`, T = max(lengths) + N. Slots past a row's own nodes hold other numbers,
            so a mask must hide them; `slots` returns the slots of the nodes.
        """
        count, (of_keys, of_values) = keys.size(2), self.layer(layer, keys, values)
        self.check_room(count)
        for number, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            first = row + length
            of_keys[:, first : first + count] = keys[number]
            of_values[:, first : first + count] = values[number]
        return self.view(of_keys, count)[0], self.view(of_values, count)[0]

    def _stores(self) -> Iterator[Tensor]:
        for stores in self._layers.values():
            yield from stores


def bucket(count: int) -> int:
    """A count rounded up to 1, 2, ..., 8, 10, 12, 14, 16, 20, 24, ...: four numbers to a doubling."""
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step


def slot_bucket(slots: int) -> int:
    """Slots of a row rounded up, so that rows of similar lengths have the same number."""
    return max(bucket(slots), LEAST_SLOTS)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on a CPU in memory that the system provides page by page when it is used."""
    size = prod(shape) * like.dtype.itemsize
    if like.device.type != "cpu" or size == 0:
        return like.new_zeros(shape)
    kinds = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE")  # no memory is reserved for slots that are never used
    flags = sum(getattr(mmap, kind, 0) for kind in kinds)
    memory = mmap.mmap(-1, size, flags) if flags else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE") and prod(shape[:-2]) * HUGE_PAGE <= MOST_ROUNDING:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).resize_(shape)  # a view would be tied to the grad mode of now


def write_nodes(store: Tensor, nodes: Tensor, slots: Tensor) -> None:
    """Write nodes to slots of a store.

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
