"""Recurrent layers of transformers' models (Mamba-2, gated delta nets): their states beside keys and values.

A state knows all tokens that it has seen and cannot be cut. So each row keeps the state after its committed tokens, and
a forward changes none of them: it runs the layers from there, over a line at once or over each path of a tree, and
leaves behind what entered them. `commit` runs these layers alone once more, over the nodes that are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blockdraft.nn.cache import KVCache
from blockdraft.proposal import is_chain

# Families whose recurrent layers are tested to keep nothing but what `State` holds.
RECURRENT_FAMILIES = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)


class State(NamedTuple):
    """What a recurrent layer knows of the tokens before: the last inputs of its convolution `[B, channels, kernel]`,
    and the state of its recurrence `[B, ...]`."""

    convolution: Tensor
    recurrence: Tensor


@dataclass(frozen=True)
class Passed:
    """What a forward has left of one row.

    Attributes:
        inputs: Of each recurrent layer, `[1, N, H]`.
        after: The states after all nodes, where these are a line.
    """

    inputs: list[Tensor]
    after: list[State] | None


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that keep a state, in the order in which they run."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and "cache_params" in inspect.signature(module.forward).parameters
    ]


class StatesCache(KVCache):
    """Keys and values, and the states of recurrent layers after each row's committed tokens.

    Rows are neither copied nor cut, but for `truncate` to nothing.

    Args:
        layers: From `recurrent_layers`.
    """

    def __init__(self, batch: int, capacity: int, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self._states: dict[int, list[State]] = {}  # by row; none where nothing is committed
        self._passed: dict[int, Passed] = {}
        super().__init__(batch, capacity)

    def close(self, row: int) -> None:
        super().close(row)
        self._forget(row)

    def shrink(self, row: int, capacity: int) -> None:
        raise AssertionError("a state cannot be cut")

    def copy(self, source: int, row: int, length: int) -> None:
        raise AssertionError("a state cannot be cut")

    def wipe(self, row: int, whole: bool = False) -> None:
        super().wipe(row, whole)
        self._passed.pop(row, None)
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
        states = {row: self._after(row, list(nodes)) for row, nodes in zip(self.rows, path, strict=True) if len(nodes)}
        super().commit(path)
        self._states.update(states)
        for row in self.rows:
            self._passed.pop(row, None)

    def states(self, number: int) -> list[State | None]:
        """Of one layer, by its place in `layers`: that of each row, None where nothing is committed."""
        return [self._states[row][number] if row in self._states else None for row in self.rows]

    def leave(self, inputs: Sequence[Tensor], after: Sequence[State] | None) -> None:
        """Take what a forward over all rows leaves of each layer."""
        for place, row in enumerate(self.rows):
            own = slice(place, place + 1)
            ends = None if after is None else [State(*(part[own] for part in state)) for state in after]
            self._passed[row] = Passed([given[own] for given in inputs], ends)

    @property
    def state_bytes(self) -> int:
        """Memory of all states."""
        return sum(part.nbytes for states in self._states.values() for state in states for part in state)

    def _after(self, row: int, nodes: list[int]) -> list[State]:
        passed = self._passed[row]
        if passed.after is not None and len(nodes) == passed.inputs[0].size(1):
            return passed.after
        found, alone = [], self.of([row])
        for number, (layer, given) in enumerate(zip(self.layers, passed.inputs, strict=True)):
            past = OnePast(_joined(alone.states(number)))
            layer.forward(given[:, nodes], cache_params=past)
            found.append(past.state)
        return found

    def _forget(self, row: int) -> None:
        self._states.pop(row, None)
        self._passed.pop(row, None)


class OnePast:
    """The state of one layer, in the shape in which transformers' recurrent layers ask a cache for it. They change some
    of it in place, so it is given a copy."""

    def __init__(self, state: State | None) -> None:
        self._convolution = None if state is None else state.convolution
        self._recurrence = None if state is None else state.recurrence

    @property
    def state(self) -> State:
        assert self._convolution is not None and self._recurrence is not None
        return State(self._convolution, self._recurrence)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._convolution

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._recurrence

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int) -> Tensor:
        if self._convolution is None:
            self._convolution = new.new_zeros(*new.shape[:-1], conv_kernel_size)
        whole = torch.cat([self._convolution, new], dim=-1)
        self._convolution = whole[..., -conv_kernel_size:].clone()
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._recurrence = new
        return new


def _joined(states: Sequence[State | None]) -> State | None:
    """A copy of the states of these rows as one; zeros stand for no tokens."""
    known = next((state for state in states if state is not None), None)
    if known is None:
        return None
    empty = State(*(torch.zeros_like(part) for part in known))
    convolution, recurrence = zip(*(empty if state is None else state for state in states), strict=True)
    return State(torch.cat(convolution), torch.cat(recurrence))


class _Paths:
    """The paths of some trees from root to leaf, side by side.

    Attributes:
        rows: `[P]`, to which row each belongs.
        nodes: `[P, depth]`, shorter ones filled up with node 0.
        of_node: `[B, N]`, a path that each node is on.
        depth: `[B, N]`, its place there.
    """

    def __init__(self, parents: Tensor) -> None:
        rows, paths, of_node, depth = list[int](), list[list[int]](), list[list[int]](), list[list[int]]()
        for row, above in enumerate(parents.tolist()):
            own: list[list[int]] = []
            for node, parent in enumerate(above):
                own.append([*(own[parent] if parent >= 0 else ()), node])
            first, leaves = len(paths), [node for node in range(len(above)) if node not in above]
            place = {node: first + at for at, leaf in enumerate(leaves) for node in own[leaf]}
            paths += [own[leaf] for leaf in leaves]
            rows += [row] * len(leaves)
            of_node.append([place[node] for node in range(len(above))])
            depth.append([len(path) - 1 for path in own])
        self.rows = rows
        self.nodes = torch.tensor([*zip(*zip_longest(*paths, fillvalue=0), strict=True)])
        self.of_node, self.depth = torch.tensor(of_node), torch.tensor(depth)


@contextmanager
def over_trees(cache: StatesCache, past: object, parents: Tensor) -> Iterator[None]:
    """Let recurrent layers run over these trees while a model is given `past` for its cache.

    Args:
        parents: `[B, N]`, as in `Target.forward`.
    """
    paths = None if is_chain(parents) else _Paths(parents)
    inputs, after = dict[int, Tensor](), dict[int, State]()

    def run(number: int, forward: Any, hidden_states: Tensor, cache_params: object = None, **others: Any) -> Tensor:
        if cache_params is not past:  # the model is used elsewhere, too
            found: Tensor = forward(hidden_states, cache_params=cache_params, **others)
            return found
        states, given = cache.states(number), hidden_states
        if paths is not None:
            states = [states[row] for row in paths.rows]
            given = given[torch.tensor(paths.rows)[:, None], paths.nodes]
        own = OnePast(_joined(states))
        found = forward(given, cache_params=own, **others)
        inputs[number] = hidden_states
        if paths is not None:
            return found[paths.of_node, paths.depth]
        after[number] = own.state
        return found

    before = [layer.__dict__.get("forward") for layer in cache.layers]
    for number, layer in enumerate(cache.layers):
        layer.forward = partial(run, number, layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(cache.layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
    numbers = range(len(cache.layers))
    cache.leave([inputs[number] for number in numbers], [after[number] for number in numbers] if after else None)
