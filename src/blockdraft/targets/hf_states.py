"""Recurrent layers of transformers' models (Mamba-2, gated delta nets, short convolutions) over a `RecurrentCache`.

A forward pass runs them from the states after the committed tokens, over a whole chain or over each path of a tree, and
stores their inputs. `commit` runs only these layers once more, over the accepted nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.decode.proposal import is_chain
from blockdraft.nn.cache import RecurrentCache, RecurrentState, join_states

# Families whose recurrent layers keep no more than `State` holds, according to our tests.
RECURRENT_FAMILIES = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that keep a state, in execution order."""
    return [
        module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "conv_kernel_size")
    ]


class OnePast:
    """State of one layer, with the interface that transformers' recurrent layers expect of a cache.

    Args:
        state: A copy, since the layers change parts of it in place.
    """

    def __init__(self, state: RecurrentState | None) -> None:
        self._convolution = None if state is None else state.convolution
        self._recurrence = None if state is None else state.recurrence

    @property
    def state(self) -> RecurrentState:
        assert self._convolution is not None
        none = self._convolution[..., :0]  # short convolutions have no other state
        return RecurrentState(self._convolution, none if self._recurrence is None else self._recurrence)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._convolution

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._recurrence

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # Releases before 5.21 use another interface, and access the cache's layers.

    record_past = False

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        return self._convolution is not None

    @property
    def layers(self) -> Mapping[int, OnePast]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> Sequence[Tensor | None]:
        return (self._convolution,)

    @property
    def recurrent_states(self) -> Sequence[Tensor | None]:
        return (self._recurrence,)

    def update_conv_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int) -> Tensor:
        if self._convolution is None:
            self._convolution = new.new_zeros(*new.shape[:-1], conv_kernel_size)
        whole = torch.cat([self._convolution, new], dim=-1)
        self._convolution = whole[..., -conv_kernel_size:].clone()
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._recurrence = new
        return new


class _Paths:
    """Paths of trees from root to leaf.

    Attributes:
        rows: `[P]`, the row of each path.
        nodes: `[P, depth]`, the nodes of each path; shorter paths are padded with node 0.
        of_node: `[B, N]`, a path that contains each node.
        depth: `[B, N]`, the node's index in that path.
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
def over_trees(cache: RecurrentCache, layers: Sequence[Any], past: object, parents: Tensor) -> Iterator[None]:
    """Context in which recurrent layers run over trees, in forwards that use `past` as their cache.

    Args:
        cache: Cache with the initial states; it receives a function for the states after a path.
        layers: Result of `recurrent_layers`.
        past: The cache that is passed to the model.
        parents: `[B, N]`, as in `Target.forward`.
    """
    paths = None if is_chain(parents) else _Paths(parents)
    known = [cache.states(number) for number in range(len(layers))]
    inputs, after = dict[int, tuple[Tensor, str]](), dict[int, RecurrentState]()

    def run(number: int, forward: Any, hidden_states: Tensor, **others: Any) -> Tensor:
        name = next((name for name, value in others.items() if value is past), None)  # differs between releases
        if name is None:  # another user of the model
            output: Tensor = forward(hidden_states, **others)
            return output
        states, given = known[number], hidden_states
        if paths is not None:
            states = [states[row] for row in paths.rows]
            given = given[torch.tensor(paths.rows)[:, None], paths.nodes]
        own = OnePast(join_states(states))
        output = forward(given, **(others | {name: own}))
        inputs[number] = hidden_states, name
        if paths is not None:
            return output[paths.of_node, paths.depth]
        after[number] = own.state
        return output

    def states_after(row: int, nodes: list[int]) -> list[RecurrentState]:
        states = []
        for number, layer in enumerate(layers):
            if number in after and len(nodes) == parents.size(1):
                states.append(RecurrentState(*(part[row : row + 1] for part in after[number])))
                continue
            own = OnePast(join_states([known[number][row]]))
            given, name = inputs[number]
            layer.forward(given[row : row + 1, nodes], **{name: own})
            states.append(own.state)
        return states

    before = [layer.__dict__.get("forward") for layer in layers]
    for number, layer in enumerate(layers):
        layer.forward = partial(run, number, layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
    cache.leave(states_after)
