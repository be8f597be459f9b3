"""Cache of sequences for compiled decoders with recurrent layers: keys, values, and the states of recurrent layers."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import RecurrentFields
from blockdraft.nn.cache import StateCache, StoreShape, bucket, part_of
from blockdraft.nn.decoder_config import RecurrentNet

MAX_TRAIL = 64  # nodes of the longest chain whose trail is kept; the state after a longer one is kept instead
CHECKPOINT_TOKENS = 512  # least tokens between two checkpoints of a sequence, except for its last ones
LAST_CHECKPOINTS = 3  # that are kept at any distance: before and behind the end of a prompt, and behind an answer
CHECKPOINT_BYTES = 1 << 30  # most memory of all checkpoints of a cache
PARTS = "states."  # prefix of the names of exported states


@dataclass(frozen=True)
class StateShape:
    """Shape of the states of all recurrent layers, as `Recurrent` of calls.h describes it.

    Args:
        net: Shape of a layer's net.
        layers: Number of recurrent layers.
        lanes: Columns of a state that are interleaved.
    """

    net: RecurrentNet
    layers: int
    lanes: int

    @property
    def state(self) -> tuple[int, ...]:
        net = self.net
        return self.layers, net.value_heads, net.value_dim // self.lanes, net.key_dim, self.lanes

    @property
    def window(self) -> tuple[int, ...]:
        return self.layers, self.net.kernel - 1, self.net.channels

    @property
    def trail(self) -> int:
        """Numbers that a node leaves in a trail."""
        net = self.net
        return self.layers * (net.channels + net.key_heads * net.key_dim + net.values + net.value_heads)

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's states."""
        return torch.float32.itemsize * (prod(self.state) + prod(self.window))

    def working_bytes(self, nodes: int) -> int:
        """Return the most bytes beyond `nbytes` that a sequence takes for and after a forward pass of some nodes."""
        return max(self.nbytes, 2 * torch.float32.itemsize * self.trail * bucket(min(nodes, MAX_TRAIL)))

    def checkpoint_bytes(self, slots: int) -> int:
        """Return the most bytes of the checkpoints of a cache with so many KV slots."""
        return min(CHECKPOINT_BYTES, (LAST_CHECKPOINTS + 1 + slots // CHECKPOINT_TOKENS) * self.nbytes)


@dataclass(frozen=True)
class StateCheckpoint:
    """States of a sequence after some of its tokens, which nobody changes.

    Attributes:
        state, window: As in `RowStates`.
        past: What the nodes left that are not in the states yet.
        count: Number of these nodes.
    """

    state: Tensor
    window: Tensor
    past: Tensor
    count: int

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.window.nbytes + self.past.nbytes


@dataclass
class RowStates:
    """States of one sequence.

    Attributes:
        state, window: States and last inputs of convolutions after the committed tokens, but for `path`.
        path: Committed nodes of the last forward pass that are not in the states yet. The next forward pass adds them,
            while it reads the states anyway.
        past, trail: What the nodes of the last forward pass left, and memory for that of the next.
        after: States and inputs after the first `count` nodes of the last forward pass, if that kept no trail.
        again: Reads the first nodes of the last forward pass again, by number, if it kept no trail.
        nodes: Nodes of the last forward pass, if it was since the last commit; else 0.
        reads: Whether these were tokens of a prompt.
        shared: Whether a checkpoint has the same state and window.
    """

    state: Tensor
    window: Tensor
    path: array[int]
    past: Tensor
    trail: Tensor
    after: tuple[Tensor, Tensor] | None = None
    count: int = 0
    again: Callable[[int], None] | None = None
    nodes: int = 0
    reads: bool = False
    shared: bool = False


class CompiledRecurrentCache(StateCache):
    """Keys and values, and the states of recurrent layers after each sequence's committed tokens.

    A forward pass changes no state beyond the committed tokens. For few nodes it leaves a trail, from which the next
    one computes the state after the committed path. For a prompt it leaves the state after its tokens.

    A state cannot be shortened. So the cache keeps checkpoints, the states after each part of a prompt that was read.
    At these, sequences can be copied and exported. All checkpoints together take at most `StateShape.checkpoint_bytes`;
    the least recently used are dropped.

    Args:
        batch, capacity, shapes: As in `KVCache`.
        shape: Shape of the states.
    """

    def __init__(self, batch: int, capacity: int, shapes: Sequence[StoreShape], shape: StateShape) -> None:
        super().__init__(batch, capacity, shapes)
        self.shape = shape
        self.rows: dict[int, RowStates] = {}  # by first slot; no entry without forward passes
        # By first slot and number of tokens, the least recently used first. Several sequences may have the same.
        self._checkpoints: OrderedDict[tuple[int, int], StateCheckpoint] = OrderedDict()

    def shrink(self, start: int, capacity: int) -> None:
        """Free a sequence's KV slots from the `capacity`th on, and the tokens in them.

        It holds `capacity` tokens at most, or there is a checkpoint after so many. Without room for more tokens, the
        state becomes a checkpoint. Such a sequence can be copied, and takes part in no forward pass until it grows.
        """
        if self._lengths[start] > capacity:
            self._checkpoint_at(start, capacity)
            self.rows.pop(start, None)
            for count in self.checkpoint_lengths(start):
                if count > capacity:
                    del self._checkpoints[start, count]
        super().shrink(start, capacity)
        if capacity == self._lengths[start] and start in self.rows:
            self._keep(start, self.rows.pop(start))

    def grow(self, start: int, capacity: int) -> None:
        super().grow(start, capacity)
        if start not in self.rows and self._lengths[start]:
            self._adopt(start, self._checkpoint_at(start, self._lengths[start]))

    def reusable(self, start: int, length: int) -> int:
        own = [count for count in self.checkpoint_lengths(start) if count <= length]
        if start in self.rows and self._lengths[start] <= length:
            own.append(self._lengths[start])
        return max(own, default=0)

    def copy(self, source: int, start: int, length: int) -> None:
        length = min(length, self._lengths[source])
        if length == 0:
            return
        checkpoint = self._checkpoint_at(source, length)
        super().copy(source, start, length)
        self._adopt(start, checkpoint)
        for count in self.checkpoint_lengths(source):  # the source may be closed
            if count <= length:
                self._checkpoints[start, count] = self._checkpoints[source, count]
                self._checkpoints.move_to_end((start, count))

    def export(self, start: int, length: int) -> dict[str, Tensor]:
        length = min(length, self._lengths[start])
        checkpoint = self._checkpoint_at(start, length)
        parts = {"state": checkpoint.state, "window": checkpoint.window, "past": checkpoint.past}
        return super().export(start, length) | {f"{PARTS}{name}": t.clone() for name, t in parts.items() if len(t)}

    def load(self, start: int, tokens: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        states = part_of(tensors, PARTS)
        super().load(start, tokens, {name: t for name, t in tensors.items() if not name.startswith(PARTS)})
        assert self._lengths[start] == len(tokens), "a recurrent state cannot be truncated"
        past = states.get("past", torch.empty(0))
        self._adopt(start, StateCheckpoint(states["state"], states["window"], past, len(past) // self.shape.trail))

    def checkpoint_lengths(self, start: int) -> list[int]:
        """Return the numbers of tokens after which there are checkpoints of a sequence, in order."""
        return sorted(count for own, count in self._checkpoints if own == start)

    def _checkpoint_at(self, start: int, length: int) -> StateCheckpoint:
        """Return the checkpoint of a sequence after this many tokens, or one that shares the state of the sequence."""
        checkpoint = self._checkpoints.get((start, length))
        if checkpoint is not None:
            self._checkpoints.move_to_end((start, length))
            return checkpoint
        assert start in self.rows and length == self._lengths[start], f"no state after {length} tokens"
        return self._shared(self.rows[start])

    def _shared(self, row: RowStates) -> StateCheckpoint:
        row.shared = True
        nodes = [row.past[node * self.shape.trail : (node + 1) * self.shape.trail] for node in row.path]
        return StateCheckpoint(row.state, row.window, torch.cat(nodes) if nodes else torch.empty(0), len(nodes))

    def _adopt(self, start: int, checkpoint: StateCheckpoint) -> None:
        """Let an empty sequence go on from a checkpoint."""
        path = array("q", range(checkpoint.count))
        state, window, past = checkpoint.state, checkpoint.window, checkpoint.past.clone()  # later passes write to it
        self.rows[start] = RowStates(state, window, path, past, torch.empty(0), shared=True)

    def _keep(self, start: int, row: RowStates) -> None:
        """Keep a checkpoint of a sequence after its committed tokens."""
        length = self._lengths[start]
        self._checkpoints[start, length] = self._shared(row)
        self._checkpoints.move_to_end((start, length))
        own = [0, *self.checkpoint_lengths(start)]
        if len(own) > LAST_CHECKPOINTS + 1:
            before, middle, behind = own[-LAST_CHECKPOINTS - 2 : -LAST_CHECKPOINTS + 1]
            if behind - before <= CHECKPOINT_TOKENS:
                del self._checkpoints[start, middle]
        limit = self.shape.checkpoint_bytes(self._slots)
        while self.checkpoint_bytes > limit:
            self._checkpoints.popitem(last=False)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum({id(checkpoint): checkpoint.nbytes for checkpoint in self._checkpoints.values()}.values())

    def forget(self, start: int) -> None:
        self.rows.pop(start, None)
        for count in self.checkpoint_lengths(start):
            del self._checkpoints[start, count]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all sequences."""
        return self.shape.nbytes * len(self.rows)

    @contextmanager
    def recurring(
        self, parents: Tensor, counts: Sequence[int], reads: bool, again: Callable[[int, int], None]
    ) -> Iterator[Any]:
        """Return the states of the sequences for a forward pass, an array of `RecurrentFields`.

        Args:
            parents: Parents of the nodes, `[B, N]`.
            counts: How many nodes of each sequence will be committed, if all are one chain and `reads` is set or there
                are more than `MAX_TRAIL`. Committing others is right, and slow.
            reads: Whether the nodes are tokens of prompts.
            again: Reads the first nodes of a sequence again. It takes the batch index and the number of nodes.
        """
        nodes = parents.size(1)
        keeps = (reads or nodes > MAX_TRAIL) and bool((parents == torch.arange(-1, nodes - 1)).all())
        fields = (RecurrentFields * len(counts))()
        rows = [self._row(start) for start in self.starts]
        for row, own, count in zip(rows, fields, counts, strict=True):
            if row.shared and row.path:  # only these change a state
                row.state, row.window, row.shared = row.state.clone(), row.window.clone(), False
            own.state, own.window = row.state.data_ptr(), row.window.data_ptr()
            own.past, own.path, own.pending = row.past.data_ptr(), row.path.buffer_info()[0], len(row.path)
            row.after, row.count = None, count
            if keeps:
                row.after = torch.empty_like(row.state), torch.empty_like(row.window)
                own.state_after, own.window_after, own.count = row.after[0].data_ptr(), row.after[1].data_ptr(), count
            else:
                if len(row.trail) < nodes * self.shape.trail:
                    row.trail = torch.empty(bucket(nodes) * self.shape.trail)
                own.trail = row.trail.data_ptr()
        yield fields
        for index, row in enumerate(rows):
            row.path, row.nodes, row.reads = array("q"), nodes, reads
            if keeps:
                row.again = partial(again, index)
            else:
                row.again, row.past, row.trail = None, row.trail, row.past

    @torch.no_grad()
    def commit(self, path: Sequence[Sequence[int]]) -> None:
        for start, nodes in zip(self.starts, path, strict=True):
            row = self.rows.get(start)
            if len(nodes):
                assert row is not None and nodes[-1] < row.nodes, "such nodes were not in the last forward pass"
                if row.again is not None and len(nodes) != row.count:
                    row.again(len(nodes))
                if row.after is None:
                    row.path = array("q", nodes)
                else:
                    (row.state, row.window), row.shared = row.after, False
            if row is not None:
                row.after, row.again, row.nodes = None, None, 0
        super().commit(path)
        for start, nodes in zip(self.starts, path, strict=True):
            if len(nodes) and self.rows[start].reads:
                self._keep(start, self.rows[start])

    def _row(self, start: int) -> RowStates:
        row = self.rows.get(start)
        if row is None:
            assert self._lengths[start] == 0, "the sequence has ended"
            state, window = torch.zeros(self.shape.state), torch.zeros(self.shape.window)
            row = self.rows[start] = RowStates(state, window, array("q"), torch.empty(0), torch.empty(0))
        return row
