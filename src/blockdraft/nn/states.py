"""Cache of keys and values with the states of recurrent layers.

A state sums up all tokens before and cannot be cut. So each row has the states after its committed tokens, and a
forward changes none of them. It leaves a function that computes the states after any path of its nodes, which `commit`
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache


class State(NamedTuple):
    """State of a recurrent layer after some tokens: the last inputs of its convolution `[B, ...]`, and the state of its
    recurrence `[B, ...]`."""

    convolution: Tensor
    recurrence: Tensor


# States of all recurrent layers, of a batch of one, after a path. It takes the row's number in the forward, and one or
# more nodes of the path, from the root on.
After: TypeAlias = Callable[[int, list[int]], list[State]]


class StatesCache(KVCache):
    """Keys and values, and the states of recurrent layers after each row's committed tokens.

    Rows cannot be copied or cut, but `truncate` may empty them.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        self._states: dict[int, list[State]] = {}  # by row; no entry where nothing is committed
        self._after: dict[int, Callable[[list[int]], list[State]]] = {}
        super().__init__(batch, capacity)

    def close(self, row: int) -> None:
        super().close(row)
        self._forget(row)

    def shrink(self, row: int, capacity: int) -> None:
        raise AssertionError("a state cannot be cut")

    def copy(self, source: int, row: int, length: int) -> None:
        raise AssertionError("a state cannot be cut")

    def zero_slots(self, row: int, whole: bool = False) -> None:
        super().zero_slots(row, whole)
        self._after.pop(row, None)
        if whole:
            self._forget(row)

    def truncate(self, lengths: Sequence[int]) -> None:
        assert all(new in (0, old) for new, old in zip(lengths, self.lengths, strict=True)), "a state cannot be cut"
        super().truncate(lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            if length == 0:
                self._forget(row)

    @torch.no_grad()
    def commit(self, path: Sequence[Sequence[int]]) -> None:
        kept = {row: list(nodes) for row, nodes in zip(self.rows, path, strict=True) if len(nodes)}
        states = {row: self._after[row](nodes) for row, nodes in kept.items()}
        super().commit(path)
        self._states.update(states)
        for row in self.rows:
            self._after.pop(row, None)

    def states(self, number: int) -> list[State | None]:
        """State of each row in the `number`th recurrent layer; None where nothing is committed."""
        return [self._states[row][number] if row in self._states else None for row in self.rows]

    def leave(self, after: After) -> None:
        """Take the function that a forward over all rows leaves for `commit`."""
        for number, row in enumerate(self.rows):
            self._after[row] = partial(after, number)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(part.nbytes for states in self._states.values() for state in states for part in state)

    def _forget(self, row: int) -> None:
        self._states.pop(row, None)
        self._after.pop(row, None)


def joined(states: Sequence[State | None]) -> State | None:
    """Copy of several rows' states as one batch, with zeros for rows without tokens; None if no row has any."""
    known = next((state for state in states if state is not None), None)
    if known is None:
        return None
    empty = State(*(torch.zeros_like(part) for part in known))
    convolution, recurrence = zip(*(empty if state is None else state for state in states), strict=True)
    return State(torch.cat(convolution), torch.cat(recurrence))
