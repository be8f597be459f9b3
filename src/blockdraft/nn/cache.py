"""States of sequences, which are ranges of KV slots, and the key/value caches among them."""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from blockdraft.machine import send

MIN_SLOTS = 256  # smallest result of `slot_bucket`
# Bytes. Huge pages save small models most of the time of a first use. Large models would waste up to one per head.
HUGE_PAGE, MAX_ROUNDING = 2 << 20, 256 << 20


class SequenceState:
    """State of the sequences of a batch: the base of KV caches and of drafters' states.

    Memory is a line of KV slots, one per token. A sequence is a range of slots, named by the first of them, its
    `start`. The engine chooses the range, which is the same in all states, and the sequence never moves. So sequences
    are opened and closed without copying others.

    A subclass defines the value that it keeps per sequence by `new_value`, `cut` and `value_of`, which makes it for a
    sequence whose prefix was stored on disk. States inside it are opened, closed, shrunk, copied and zeroed with it.

    Args:
        batch: Number of sequences that are open from the start.
        capacity: KV slots per sequence.
        inner: States inside this one, for the same sequences.

    Attributes:
        starts: First KV slots of this object's sequences, in batch order.
        values: Value of each open sequence, by its first KV slot.
    """

    def __init__(self, batch: int, capacity: int, inner: Sequence[SequenceState] = ()) -> None:
        self.starts = [index * capacity for index in range(batch)]
        self.inner = list(inner)
        self._capacities = dict.fromkeys(self.starts, capacity)
        self.values: dict[int, Any] = {start: self.new_value() for start in self.starts}

    def new_value(self) -> Any:
        """Return the value of a sequence without tokens."""
        return None

    def cut(self, value: Any, length: int) -> Any:
        """Return the value of a sequence that keeps the first `length` tokens of a sequence with this value."""
        return value

    def value_of(self, start: int, tokens: Sequence[int]) -> Any:
        """Return the value of a sequence of these committed tokens, whose inner states are loaded."""
        return self.new_value()

    def of(self, starts: Sequence[int]) -> Self:
        """Return a view of these sequences, in this order, over the same memory."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.starts = list(starts)
        if self.inner:
            view.inner = [state.of(starts) for state in self.inner]
        return view

    def open(self, start: int, capacity: int) -> None:
        """Begin an empty sequence of `capacity` KV slots, which must belong to no open sequence."""
        for state in self.inner:
            state.open(start, capacity)
        self._capacities[start], self.values[start] = capacity, self.new_value()

    def close(self, start: int) -> None:
        """Remove a sequence."""
        for state in self.inner:
            state.close(start)
        del self._capacities[start], self.values[start]

    def shrink(self, start: int, capacity: int) -> None:
        """Free a sequence's KV slots from the `capacity`th on, and the tokens in them."""
        assert capacity <= self._capacities[start]
        for state in self.inner:
            state.shrink(start, capacity)
        self._capacities[start], self.values[start] = capacity, self.cut(self.values[start], capacity)

    def grow(self, start: int, capacity: int) -> None:
        """Give a sequence `capacity` KV slots. Those behind its own must belong to no open sequence."""
        assert capacity >= self._capacities[start]
        for state in self.inner:
            state.grow(start, capacity)
        self._capacities[start] = capacity

    def copy(self, source: int, start: int, length: int) -> None:
        """Copy the first `length` tokens of sequence `source`, or all if it has fewer, to an empty sequence."""
        assert length <= self._capacities[start]
        for state in self.inner:
            state.copy(source, start, length)
        self.values[start] = self.cut(self.values[source], length)

    def reusable(self, start: int, length: int) -> int:
        """Return how many of a sequence's first `length` tokens `copy` and `export` can take at most."""
        for state in self.inner:
            length = state.reusable(start, length)
        return length

    def zero_slots(self, start: int, whole: bool = False) -> None:
        """Zero a sequence's KV slots behind its committed tokens, or all of its KV slots if `whole`."""
        for state in self.inner:
            state.zero_slots(start, whole)

    def export(self, start: int, length: int) -> dict[str, Tensor]:
        """Return copies of what is kept for a sequence's first `length` tokens, as tensors by name."""
        return {
            f"{number}.{name}": tensor
            for number, state in enumerate(self.inner)
            for name, tensor in state.export(start, length).items()
        }

    def load(self, start: int, tokens: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Fill an empty sequence with committed tokens.

        Args:
            tensors: What `export` returned for a sequence that begins with these tokens.
        """
        assert len(tokens) <= self._capacities[start]
        for number, state in enumerate(self.inner):
            state.load(start, tokens, part_of(tensors, f"{number}."))
        self.values[start] = self.value_of(start, tokens)


class StoreShape(NamedTuple):
    """What a cache keeps of each token in some layers: `heads` vectors of `size` numbers per layer."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * self.size * self.dtype.itemsize


class KVCache(SequenceState):
    """Keys and values of all layers for the sequences of a batch.

    A forward pass writes its N nodes behind the committed tokens of each sequence; `commit` keeps some of them, moved
    together, and drops the others. The value of a sequence is the number of its committed tokens.

    All KV slots are zero at first. Before closing a sequence with non-finite numbers, zero its slots (`zero_slots`):
    attention gives slots outside of a sequence a weight of zero, and zero times NaN is NaN.

    A network whose shapes are known has one store for all layers of a shape (`stores`), so that one operation writes
    keys and values, and `commit` moves the nodes of all layers at once. Otherwise each tensor of a layer has one, which
    is allocated at the first write (`layer`). A subclass for other arrays than torch's overrides `allocate`, `extend`
    and `view`, or what moves KV slots: `keep`, `copy_slots`, `zero`, `read_slots` and `write_slots`.

    Args:
        batch, capacity: As in `SequenceState`.
        shapes: Shapes of the stores, if they are known beforehand.
        device: Where it is kept.
    """

    def __init__(
        self, batch: int, capacity: int, shapes: Sequence[StoreShape] = (), device: torch.device | None = None
    ) -> None:
        super().__init__(batch, capacity)
        self.shapes, self._device = tuple(shapes), device
        self._slots = batch * capacity
        self._lengths: dict[int, int] = self.values
        self._stores: dict[str, Tensor] = {}  # by name, `[..., heads, slots, size]`; shared by all views

    def new_value(self) -> int:
        return 0

    def cut(self, value: int, length: int) -> int:
        return min(value, length)

    def open(self, start: int, capacity: int) -> None:
        assert start >= 0 and start + capacity <= self._slots, f"{start} + {capacity} slots of {self._slots}"
        super().open(start, capacity)

    def copy(self, source: int, start: int, length: int) -> None:
        assert self._lengths[start] == 0
        super().copy(source, start, length)
        length = self._lengths[start]
        self.copy_slots(source, start, length)

    def copy_slots(self, source: int, start: int, count: int) -> None:
        """Copy `count` KV slots from one place to another."""
        for store in self._stores.values():
            store[..., start : start + count, :] = store[..., source : source + count, :]

    def zero_slots(self, start: int, whole: bool = False) -> None:
        self.zero(start + (0 if whole else self._lengths[start]), start + self._capacities[start])

    def zero(self, first: int, end: int) -> None:
        """Zero the KV slots from `first` to `end`."""
        for store in self._stores.values():
            store[..., first:end, :] = 0

    def export(self, start: int, length: int) -> dict[str, Tensor]:
        end = start + self.cut(self._lengths[start], length)
        return {name: self.read_slots(store, start, end) for name, store in self._stores.items()}

    def load(self, start: int, tokens: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        assert self._lengths[start] == 0
        length = self.cut(min((tensor.size(-2) for tensor in tensors.values()), default=0), len(tokens))
        _ = self.stores  # of the shapes
        for name, part in tensors.items():
            self._store(name, (*part.shape[:-2], self._slots, part.size(-1)), part)
            self.write_slots(name, start, part[..., :length, :])
        self._lengths[start] = length

    def read_slots(self, store: Any, first: int, end: int) -> Tensor:
        """Return a copy of the KV slots from `first` to `end`, in torch."""
        return cast(Tensor, store[..., first:end, :].clone(memory_format=torch.contiguous_format))

    def write_slots(self, name: str, first: int, part: Tensor) -> None:
        """Write what `read_slots` returned to the KV slots of a store from `first` on."""
        self._stores[name][..., first : first + part.size(-2), :] = part

    @property
    def lengths(self) -> list[int]:
        """Number of committed tokens of each sequence."""
        return [self._lengths[start] for start in self.starts]

    @property
    def capacity(self) -> int:
        """Slots of the longest sequence."""
        return max((self._capacities[start] for start in self.starts), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the stores that have been used."""
        return sum(store.nbytes for store in self._stores.values())

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        """Keep nodes of the last forward pass as each sequence's next tokens, in order.

        Args:
            path: Increasing indices of nodes for each sequence; an empty path commits nothing.
        """
        self.keep(path)
        for start, nodes in zip(self.starts, path, strict=True):
            self._lengths[start] += len(nodes)

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        """Move nodes of the last forward pass together, behind each sequence's committed tokens."""
        for start, nodes in zip(self.starts, path, strict=True):
            first, count = start + self._lengths[start], len(nodes)
            if count and nodes[-1] >= count:  # not the first nodes
                for store in self._stores.values():
                    accepted = send(first + torch.tensor(nodes), store.device)
                    store[..., first : first + count, :] = store.index_select(-2, accepted)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` committed tokens of sequence i, at most as many as it has."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self._lengths.update(zip(self.starts, lengths, strict=True))

    def slots(self, count: int, device: torch.device) -> Tensor:
        """Return the slots of the next `count` nodes, relative to their sequence's first, `[B, count]` int64."""
        return send(torch.tensor(self.lengths), device)[:, None] + torch.arange(count, device=device)

    def memory_slots(self, count: int) -> Tensor:
        """Return the slots of the next `count` nodes in the memory, `[B, count]` int64 on the CPU."""
        return torch.tensor(self.starts)[:, None] + self.slots(count, torch.device("cpu"))

    @property
    def stores(self) -> list[Tensor]:
        """Memory of all KV slots: `[layers, heads, slots, size]` for each of the shapes.

        Without shapes, these are the stores that have been used, `[heads, slots, size]`.
        """
        if len(self._stores) < len(self.shapes):
            for number, (layers, heads, size, dtype) in enumerate(self.shapes):
                like = torch.empty(0, dtype=dtype, device=self._device)
                self._store(str(number), (layers, heads, self._slots, size), like)
        return [*self._stores.values()]

    def layer(self, layer: int, *nodes: Tensor) -> list[Tensor]:
        """Return the stores of a layer, `[heads, slots, D]` for each tensor of nodes `[B, heads, N, D]`.

        The tensors are keys and values, for example.
        """
        shapes = [(new.size(1), self._slots, new.size(3)) for new in nodes]
        return [self._store(f"{layer}.{i}", shapes[i], new) for i, new in enumerate(nodes)]

    def _store(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if name not in self._stores:
            self._stores[name] = self.allocate(shape, like)
        return self._stores[name]

    def allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return zeros of a shape, on the device and in the dtype of a tensor."""
        return _zeros(shape, like)

    def check_room(self, count: int) -> int:
        """Assert that each sequence has slots for `count` more nodes, and return the slots of the longest with them."""
        return max((self._end(start, count) for start in self.starts), default=0)

    def _end(self, start: int, count: int) -> int:
        end, capacity = self._lengths[start] + count, self._capacities[start]
        assert end <= capacity, f"{end} slots needed, {capacity} allocated"
        return end

    @property
    def spare(self) -> int:
        """Number of further nodes for which every sequence has slots."""
        return min((self._capacities[start] - self._lengths[start] for start in self.starts), default=0)

    def view(self, memory: Tensor, count: int = 0, end: int | None = None) -> tuple[Tensor, bool]:
        """Return the slots of the sequences as a batch, for committed tokens and the next `count` nodes.

        Args:
            memory: A store, or one layer of it.
            end: Slots per sequence; None is the number that the longest sequence needs with its nodes.

        Returns:
            Slots `[..., B, heads, end, D]`, and whether they are a view of the memory. Sequences at unequal distances
            are copied; call `put` for nodes that are written to the copy. Slots past a sequence's own nodes hold other
            numbers, so a mask must hide them; `slots` returns the slots of the nodes.
        """
        starts, needed = self.starts, self.check_room(count)
        end = needed if end is None else end
        least = min(self._capacities[start] for start in starts)
        if len(starts) == 1 and end <= least:
            return memory[..., starts[0] : starts[0] + end, :].unsqueeze(-4), True
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        if end <= least and step > 0 and all(b - a == step for a, b in zip(starts, starts[1:], strict=False)):
            *outer, stride, inner = memory.stride()
            shape = (*memory.shape[:-3], len(starts), memory.size(-3), end, memory.size(-1))
            strides = (*outer[:-1], step * stride, outer[-1], stride, inner)
            return memory.as_strided(shape, strides, memory.storage_offset() + starts[0] * stride), True
        return self.gathered(memory, count, end), False

    def gathered(self, memory: Tensor, count: int, end: int) -> Tensor:
        """Return a copy of what `view` returns."""
        # Slots beyond a sequence's own nodes repeat its first slot, which is finite and hidden by masks.
        at = torch.arange(end).repeat(len(self.starts), 1)
        own = torch.tensor(self.lengths)[:, None] + count
        slots = torch.where(at < own, at, 0) + torch.tensor(self.starts)[:, None]
        taken: Tensor = memory.index_select(-2, send(slots.flatten(), memory.device)).unflatten(-2, slots.shape)
        return taken.movedim(-4, -3)

    def put(self, memory: Tensor, copied: Tensor, count: int) -> None:
        """Write the `count` nodes behind each sequence's committed tokens from a copy made by `view` to the memory."""
        rows = zip(copied.unbind(-4), self.lengths, strict=True)
        self.extend(memory, [row[..., length : length + count, :] for row, length in rows])

    def last(self, store: Tensor) -> Tensor:
        """Return what a store `[1, slots, size]` holds of each sequence's last token, `[B, 1, size]`; 0 without one."""
        tokens = [start + max(length - 1, 0) for start, length in zip(self.starts, self.lengths, strict=True)]
        index = torch.tensor(tokens)
        last = store[0, index if store.device.type == "cpu" else send(index, store.device)]
        if not all(self.lengths):
            empty = send(torch.tensor([length == 0 for length in self.lengths]), store.device)
            last = last.masked_fill(empty[:, None], 0)
        return last.unsqueeze(1)

    def extend(self, store: Tensor, nodes: Iterable[Tensor]) -> None:
        """Write the nodes of each sequence, `[..., heads, N, D]`, behind its committed tokens in a store."""
        for start, new in zip(self.starts, nodes, strict=True):
            end = start + self._end(start, new.size(-2))
            store[..., end - new.size(-2) : end, :] = new

    def write(self, layer: int, *nodes: Tensor) -> list[Tensor]:
        """Write N nodes of a layer, `[B, heads, N, D]` for each of its stores, and return views of the stores."""
        stores = self.layer(layer, *nodes)
        for store, new in zip(stores, nodes, strict=True):
            self.extend(store, new)
        return [self.view(store, nodes[0].size(2))[0] for store in stores]


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it in their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def bucket(count: int) -> int:
    """Round a count up to 1, 2, ..., 8, 10, 12, 14, 16, 20, 24, ...: four numbers per doubling."""
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step


def slot_bucket(slots: int) -> int:
    """Round up the slots of a sequence, so that sequences of similar lengths have the same number."""
    return max(bucket(slots), MIN_SLOTS)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros, on a CPU in memory that the system provides page by page on first use."""
    size = prod(shape) * like.dtype.itemsize
    if like.device.type != "cpu" or size == 0:
        return like.new_zeros(shape)
    kinds = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE")  # do not reserve memory for unused slots
    flags = sum(getattr(mmap, kind, 0) for kind in kinds)
    memory = mmap.mmap(-1, size, flags) if flags else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE") and prod(shape[:-2]) * HUGE_PAGE <= MAX_ROUNDING:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).resize_(shape)  # a view would keep the present grad mode


def write_nodes(store: Tensor, nodes: Tensor, slots: Tensor) -> None:
    """Write nodes to slots of a memory.

    Args:
        store: `[B, heads, T, D]`.
        nodes: `[B, N, heads, D]`.
        slots: `[B, N]` int64, or `[N]` if all sequences have the same.
    """
    if slots.ndim == 1:
        store.index_copy_(2, slots, nodes.transpose(1, 2))
    else:
        batch = torch.arange(len(slots), device=slots.device)
        store[batch[:, None], :, slots] = nodes


class RecurrentState(NamedTuple):
    """State of a recurrent layer after some tokens.

    It holds the last inputs of the convolution and the state of the recurrence, both `[B, ...]`. It depends on all
    tokens before and cannot be truncated.
    """

    convolution: Tensor
    recurrence: Tensor


# Returns the states of all recurrent layers, of a batch of one, after a path. It takes the batch index in the forward
# pass, and one or more nodes of the path, from the root on.
After: TypeAlias = Callable[[int, list[int]], list[RecurrentState]]


class StateCache(KVCache):
    """Base of caches that also keep states of recurrent layers. `truncate` can only empty a sequence."""

    def forget(self, start: int) -> None:
        """Drop the states of a sequence."""
        raise NotImplementedError

    def close(self, start: int) -> None:
        super().close(start)
        self.forget(start)

    def truncate(self, lengths: Sequence[int]) -> None:
        assert all(new in (0, old) for new, old in zip(lengths, self.lengths, strict=True)), (
            "a recurrent state cannot be truncated"
        )
        super().truncate(lengths)
        for start, length in zip(self.starts, lengths, strict=True):
            if length == 0:
                self.forget(start)


class RecurrentCache(StateCache):
    """Keys and values, and the states of recurrent layers after each sequence's committed tokens.

    A forward pass changes no state. It leaves a function that computes the states after any path of its nodes, which
    `commit` calls. Sequences cannot be copied.
    """

    def __init__(
        self, batch: int, capacity: int, shapes: Sequence[StoreShape] = (), device: torch.device | None = None
    ) -> None:
        super().__init__(batch, capacity, shapes, device)
        self.stored_states: dict[int, list[RecurrentState]] = {}  # by first slot; no entry without committed tokens
        self._after: dict[int, Callable[[list[int]], list[RecurrentState]]] = {}

    def cut(self, value: int, length: int) -> int:
        raise AssertionError("a recurrent state cannot be truncated")

    @torch.no_grad()
    def commit(self, path: Sequence[Sequence[int]]) -> None:
        paths = zip(self.starts, path, strict=True)
        states = {start: self._after[start](list(nodes)) for start, nodes in paths if len(nodes)}
        super().commit(path)
        self.stored_states.update(states)
        for start in self.starts:
            self._after.pop(start, None)

    def states(self, number: int) -> list[RecurrentState | None]:
        """Return the state of each sequence in the `number`th recurrent layer, None without committed tokens."""
        return [self.stored_states[start][number] if start in self.stored_states else None for start in self.starts]

    def leave(self, after: After) -> None:
        """Set the function that a forward pass over all sequences leaves for `commit`."""
        for index, start in enumerate(self.starts):
            self._after[start] = partial(after, index)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(part.nbytes for states in self.stored_states.values() for state in states for part in state)

    def forget(self, start: int) -> None:
        self.stored_states.pop(start, None)
        self._after.pop(start, None)


def join_states(states: Sequence[RecurrentState | None]) -> RecurrentState | None:
    """Copy the states of several sequences into one batch, with zeros for sequences without tokens.

    Return None if no sequence has any.
    """
    known = next((state for state in states if state is not None), None)
    if known is None:
        return None
    empty = RecurrentState(*(torch.zeros_like(part) for part in known))
    convolution, recurrence = zip(*(empty if state is None else state for state in states), strict=True)
    return RecurrentState(torch.cat(convolution), torch.cat(recurrence))


def cache_argument(module: nn.Module) -> str:
    """Return the name of the argument by which a model or layer of transformers takes its cache. 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
