"""Cache of sequences for compiled decoders with recurrent layers: keys, values, and the states of gated delta nets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import RecurrentFields
from blockdraft.nn.cache import KVCache, bucket
from blockdraft.nn.decoder_config import DeltaNet

MAX_TRAIL = 64  # nodes of the longest chain whose trail is kept; the state after a longer one is kept instead


@dataclass(frozen=True)
class StateShape:
    """Shape of the states of all recurrent layers, as `Recurrent` of calls.h describes it.

    Args:
        net: Shape of a delta net.
        layers: Number of recurrent layers.
        lanes: Columns of a state that are interleaved.
    """

    net: DeltaNet
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


class CompiledRecurrentCache(KVCache):
    """Keys and values, and the states of recurrent layers after each sequence's committed tokens.

    A forward pass changes no state beyond the committed tokens. For few nodes it leaves a trail, from which the next
    one computes the state after the committed path. For a prompt it leaves the state after its tokens.

    Args:
        batch, capacity: As in `KVCache`.
        shape: Shape of the states.
    """

    def __init__(self, batch: int, capacity: int, shape: StateShape) -> None:
        super().__init__(batch, capacity)
        self.shape = shape
        self._rows: dict[int, RowStates] = {}  # by first slot; no entry without forward passes

    def cut(self, value: int, length: int) -> int:
        raise AssertionError("a recurrent state cannot be truncated")

    def close(self, start: int) -> None:
        super().close(start)
        self._rows.pop(start, None)

    def truncate(self, lengths: Sequence[int]) -> None:
        assert all(new in (0, old) for new, old in zip(lengths, self.lengths, strict=True)), (
            "a recurrent state cannot be truncated"
        )
        super().truncate(lengths)
        for start, length in zip(self.starts, lengths, strict=True):
            if length == 0:
                self._rows.pop(start, None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all sequences."""
        return self.shape.nbytes * len(self._rows)

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
            row.path, row.nodes = array("q"), nodes
            if keeps:
                row.again = partial(again, index)
            else:
                row.again, row.past, row.trail = None, row.trail, row.past

    @torch.no_grad()
    def commit(self, path: Sequence[Sequence[int]]) -> None:
        for start, nodes in zip(self.starts, path, strict=True):
            row = self._rows.get(start)
            if len(nodes):
                assert row is not None and nodes[-1] < row.nodes, "such nodes were not in the last forward pass"
                if row.again is not None and len(nodes) != row.count:
                    row.again(len(nodes))
                if row.after is None:
                    row.path = array("q", nodes)
                else:
                    row.state, row.window = row.after
            if row is not None:
                row.after, row.again, row.nodes = None, None, 0
        super().commit(path)

    def _row(self, start: int) -> RowStates:
        row = self._rows.get(start)
        if row is None:
            state, window = torch.zeros(self.shape.state), torch.zeros(self.shape.window)
            row = self._rows[start] = RowStates(state, window, array("q"), torch.empty(0), torch.empty(0))
        return row
