"""Gated delta nets (arXiv 2412.06464), over the nodes of trees at once or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.decoder_config import DeltaNet
from blockdraft.nn.exact import EXACT_NODES
from blockdraft.nn.states import State

CHUNK = 64  # nodes of a line that are computed at once: the work on them grows with the square of their number
LEAST_NORM = 1e-6  # added to the squares of queries and keys, so that none is divided by zero


class Entering(NamedTuple):
    """What enters the recurrence at some nodes, `[..., heads, D]` of each value head or `[..., heads]`; in float32 at
    least."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor  # logarithms of the factors by which the state fades
    shares: Tensor  # of a correction that are made


class DeltaRecurrence(Protocol):
    """The recurrence of one layer in one forward."""

    def run(self, net: GatedDeltaNet, mixed: Tensor, shares: Tensor, decays: Tensor) -> Tensor:
        """What the states say at the nodes.

        Args:
            mixed: What enters the convolution, `[R, channels]`.
            shares, decays: Before their non-linearities, `[R, value heads]`.

        Returns:
            `[R, value heads, value_dim]`, in float32 at least.
        """

    def after(self, place: int, nodes: list[int]) -> State:
        """The state of a row behind these nodes; see `nn.states.After`."""


class GatedDeltaNet(nn.Module):
    """The part of a layer between its two projections.

    Args:
        tensors: Those of `DeltaNet.tensors`, by these names.
        eps: Of the norm of what the state says.

    Attributes:
        given: The tensors.
    """

    def __init__(self, config: DeltaNet, tensors: dict[str, Tensor], eps: float) -> None:
        super().__init__()
        self.config, self.given, self.eps = config, tensors, eps
        self.wide = torch.promote_types(tensors["norm.weight"].dtype, torch.float32)
        self.kernel: Tensor  # `[kernel, channels]`
        self.register_buffer("kernel", tensors["conv1d.weight"].squeeze(1).T.to(self.wide).contiguous())
        self.fading: Tensor
        self.register_buffer("fading", -tensors["A_log"].to(self.wide).exp())
        self.fading_bias: Tensor
        self.register_buffer("fading_bias", tensors["dt_bias"].to(self.wide))
        self.weight: Tensor
        self.register_buffer("weight", tensors["norm.weight"].to(self.wide))

    @property
    def nbytes(self) -> int:
        """Memory that its weights take."""
        return sum(each.nbytes for each in (*self.given.values(), *self.buffers()))

    def empty(self, batch: int) -> State:
        """The state before any token."""
        config, like = self.config, self.given["conv1d.weight"]
        inputs = like.new_zeros(batch, config.kernel - 1, config.channels)
        return State(inputs, self.weight.new_zeros(batch, config.value_heads, config.key_dim, config.value_dim))

    def forward(self, rows: Tensor, recurrence: DeltaRecurrence) -> Tensor:
        """Rows `[R, sum of DeltaNet.inputs]` to `[R, DeltaNet.values]`."""
        mixed, gate, shares, decays = rows.split([*self.config.inputs.values()], dim=-1)
        said = recurrence.run(self, mixed, shares, decays)
        said = F.rms_norm(said, (said.size(-1),), self.weight, self.eps)
        return (said.flatten(-2) * F.silu(gate.to(self.wide))).to(rows.dtype)

    def entering(self, convolved: Tensor, shares: Tensor, decays: Tensor) -> Entering:
        """What enters the recurrence, given the convolution's sums `[..., channels]`; the others as in
        `DeltaRecurrence.run`."""
        config = self.config
        keys = config.key_heads * config.key_dim
        heads = F.silu(convolved).split([keys, keys, config.values], dim=-1)
        queries, keys_of, values = (
            each.unflatten(-1, (-1, size)) for each, size in zip(heads, self._sizes, strict=True)
        )
        group = config.value_heads // config.key_heads
        queries, keys_of = (normed(each).repeat_interleave(group, dim=-2) for each in (queries, keys_of))
        fading = self.fading * F.softplus(decays.to(self.wide) + self.fading_bias)
        return Entering(queries * config.key_dim**-0.5, keys_of, values, fading, shares.to(self.wide).sigmoid())

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.config.key_dim, self.config.key_dim, self.config.value_dim


def normed(x: Tensor) -> Tensor:
    """To length one."""
    return x * (x.square().sum(-1, keepdim=True) + LEAST_NORM).rsqrt()


def delta_rule(state: Tensor, nodes: Entering, within: Tensor) -> tuple[Tensor, Tensor]:
    """What the state says at each node of some trees, after the corrections of its ancestors and its own.

    The correction at a node is share * (value - what the faded state says to its key), and the state that it meets is
    the one given, faded along the path, with the corrections of its ancestors, faded since. So all corrections are the
    solution of one triangular system.

    Args:
        state: Before the roots, `[B, heads, key_dim, value_dim]`.
        nodes: `[B, heads, N, ...]`, parents before children.
        within: Which nodes are ancestors of which, or the node itself, `[B or 1, 1, N, N]` bool.

    Returns:
        What is said, and the corrections, each `[B, heads, N, value_dim]`.
    """
    queries, keys, values, decays, shares = nodes
    count = keys.size(2)
    faded = (within.to(decays.dtype) @ decays.unsqueeze(-1)).squeeze(-1)  # since before the roots
    between = (faded.unsqueeze(-1) - faded.unsqueeze(-2)).masked_fill(~within, -torch.inf).exp()
    asked = torch.cat([keys, queries], dim=2)
    to_keys, to_queries = (asked @ keys.mT).split(count, dim=2)
    by_keys, by_queries = ((asked @ state) * faded.exp().repeat(1, 1, 2).unsqueeze(-1)).split(count, dim=2)
    shares = shares.unsqueeze(-1)
    system = to_keys * between * shares  # its diagonal counts as one
    corrections = torch.linalg.solve_triangular(system, (values - by_keys) * shares, upper=False, unitriangular=True)
    return by_queries + (to_queries * between) @ corrections, corrections


def corrected(state: Tensor, keys: Tensor, corrections: Tensor, decays: Tensor) -> Tensor:
    """The state after a line of nodes, `[B, heads, n, ...]`, one behind the other."""
    for own in torch.arange(keys.size(2)).split(CHUNK):
        part = slice(int(own[0]), int(own[-1]) + 1)
        faded = decays[:, :, part].cumsum(-1)
        since = (faded[..., -1:] - faded).exp().unsqueeze(-1)
        state = state * faded[..., -1:].exp().unsqueeze(-1) + (keys[:, :, part] * since).mT @ corrections[:, :, part]
    return state


@dataclass(frozen=True)
class Ancestry:
    """Who descends from whom among the nodes of a forward.

    Attributes:
        within: `[B, 1, N, N]` bool, as in `delta_rule`; where all rows are lines, `[1, 1, n, n]` of the first n nodes,
            and so many are computed at once.
        history: For each node its own place and those before it along its path, nearest first, counted from the first
            of the `kernel - 1` tokens before the nodes, `[kernel, B, N]` int64.
    """

    within: Tensor
    history: Tensor


class TreeRecurrence:
    """All nodes of a forward at once.

    Args:
        state: Of its rows.
    """

    def __init__(self, state: State, ancestry: Ancestry) -> None:
        self.state, self.ancestry = state, ancestry
        self.mixed: Tensor
        self.nodes: Entering
        self.corrections: Tensor

    def run(self, net: GatedDeltaNet, mixed: Tensor, shares: Tensor, decays: Tensor) -> Tensor:
        batch, within = len(self.state.recurrence), self.ancestry.within
        self.mixed, shares, decays = (each.view(batch, -1, each.size(-1)) for each in (mixed, shares, decays))
        whole = torch.cat([self.state.convolution, self.mixed], dim=1).to(net.wide)
        rows = torch.arange(batch, device=whole.device)[:, None]
        taps = zip(self.ancestry.history, net.kernel.flip(0), strict=True)
        convolved = sum(whole[rows, places] * weight for places, weight in taps)
        assert isinstance(convolved, Tensor)
        entering = net.entering(convolved, shares, decays)
        self.nodes = nodes = Entering(*(each.transpose(1, 2) for each in entering))
        state, said, corrections = self.state.recurrence, list[Tensor](), list[Tensor]()
        count = self.mixed.size(1)
        for first, end in pairwise([*range(0, count, within.size(-1)), count]):
            some, size = Entering(*(each[:, :, first:end] for each in nodes)), end - first
            of_some = delta_rule(state, some, within[..., :size, :size])
            said.append(of_some[0])
            corrections.append(of_some[1])
            if end < count:
                state = corrected(state, some.keys, corrections[-1], some.decays)
        self.corrections = torch.cat(corrections, dim=2)
        return torch.cat(said, dim=2).transpose(1, 2).flatten(0, 1)

    def after(self, place: int, nodes: list[int]) -> State:
        own = slice(place, place + 1)
        kept = slice(len(nodes)) if nodes == [*range(len(nodes))] else nodes  # most are, and need no copy
        keys, corrections, decays = (
            each[own, :, kept] for each in (self.nodes.keys, self.corrections, self.nodes.decays)
        )
        inputs = torch.cat([self.state.convolution[own], self.mixed[own, kept]], dim=1)[:, len(nodes) :]
        return State(inputs.clone(), corrected(self.state.recurrence[own], keys, corrections, decays))


class ExactRecurrence:
    """Node after node, each from the state behind its parent, in operations of one shape: so the bits at a node do not
    depend on what else is computed. The nodes come in pieces, as in `forward_in_pieces`.

    Args:
        state: Of the rows of the forward.
        parents: As in `Target.forward`, of each row.
    """

    def __init__(self, state: State, parents: Sequence[Sequence[int]]) -> None:
        self.before = [State(*parts) for parts in zip(*state, strict=True)]
        self.parents = parents
        self.last_child = [{parent: node for node, parent in enumerate(above)} for above in parents]
        self.behind: dict[tuple[int, int], State] = {}  # nodes of which children are still to come
        self.newest: dict[int, State] = {}  # behind the last node of each row so far
        self.inputs: list[tuple[Tensor, Tensor, Tensor]] = []  # of the nodes so far

    def run(self, net: GatedDeltaNet, mixed: Tensor, shares: Tensor, decays: Tensor) -> Tensor:
        count = len(self.parents[0])
        said = net.weight.new_zeros(len(mixed), net.config.value_heads, net.config.value_dim)
        self.net = net
        first = len(self.inputs)
        for piece_node in range(min(EXACT_NODES, len(self.parents) * count - first)):
            row, node = divmod(first + piece_node, count)
            parent, last_child = self.parents[row][node], self.last_child[row]
            state = self.before[row] if parent < 0 else self.behind[row, parent]
            inputs = mixed[piece_node].clone(), shares[piece_node].clone(), decays[piece_node].clone()
            said[piece_node], after = step(net, state, *inputs)
            self.newest[row] = after
            self.inputs.append(inputs)
            if node in last_child:
                self.behind[row, node] = after
            if last_child[parent] == node:
                self.behind.pop((row, parent), None)
        return said

    def after(self, place: int, nodes: list[int]) -> State:
        through_all = len(nodes) == len(self.parents[place])
        state = self.newest[place] if through_all else self.before[place]
        for node in () if through_all else nodes:
            _, state = step(self.net, state, *self.inputs[place * len(self.parents[0]) + node])
        return State(*(part.unsqueeze(0) for part in state))


def step(net: GatedDeltaNet, state: State, mixed: Tensor, shares: Tensor, decays: Tensor) -> tuple[Tensor, State]:
    """One token: what the state, `[...]` without a batch, says `[heads, value_dim]`, and the state behind it."""
    window = torch.cat([state.convolution, mixed[None]])
    convolved = (window.to(net.wide) * net.kernel).sum(0)
    queries, keys, values, fading, share = net.entering(convolved, shares, decays)
    faded = state.recurrence * fading.exp()[:, None, None]
    correction = (values - (faded * keys[:, :, None]).sum(1)) * share[:, None]
    behind = faded + keys[:, :, None] * correction[:, None, :]
    return (behind * queries[:, :, None]).sum(1), State(window[1:], behind)
