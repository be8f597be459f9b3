"""Recurrent layers: gated delta nets (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060).

They run over all nodes of trees at once, or node by node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.attention import EXACT_NODES
from blockdraft.nn.cache import RecurrentState
from blockdraft.nn.decoder_config import DeltaNet, Mamba2

CHUNK = 64  # nodes of a chain to compute at once; the work grows with their square
MIN_NORM = 1e-6  # added to the squared lengths of queries and keys to avoid division by zero


class Entering(NamedTuple):
    """Inputs of the recurrence at some nodes for each value head, in float32 or wider.

    Shapes are `[..., heads, D]` or `[..., heads]`.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor  # logarithms of the factors by which the state decays
    shares: Tensor  # shares of the corrections to apply, or step sizes of Mamba-2


class DeltaRecurrence(Protocol):
    """Recurrence of one layer in one forward pass."""

    def run(self, net: RecurrentMixer[Any], mixed: Tensor, shares: Tensor, decays: Tensor) -> Tensor:
        """Return the outputs at R nodes, `[R, value heads, value_dim]` in float32 or wider.

        Args:
            mixed: Inputs of the convolution, `[R, channels]`.
            shares, decays: Projections before their non-linearities, `[R, value heads]`; equal in Mamba-2.
        """

    def after(self, row: int, nodes: list[int]) -> RecurrentState:
        """Return the state of a sequence after a path; see `nn.cache.After`."""


Config = TypeVar("Config", DeltaNet, Mamba2)


class RecurrentMixer(nn.Module, Generic[Config]):
    """What replaces attention in a recurrent layer, between its two projections.

    Args:
        config: Sizes of the net.
        tensors: Tensors of `config.tensors` by name.
        eps: Epsilon of the norm of the output.

    Attributes:
        given: The tensors, as given.
        corrects: Whether a token replaces what the state holds for its key, and does not only add its value.
        bias: Bias of the convolution, `[channels]`, or None.
        skip: Factor on the values that are added to the output, `[value heads, 1]`, or None.
    """

    corrects: bool

    def __init__(self, config: Config, tensors: dict[str, Tensor], eps: float) -> None:
        super().__init__()
        self.config: Config = config
        self.given, self.eps = tensors, eps
        self.wide = torch.promote_types(tensors["norm.weight"].dtype, torch.float32)
        self.kernel: Tensor  # `[kernel, channels]`
        self.register_buffer("kernel", tensors["conv1d.weight"].squeeze(1).T.to(self.wide).contiguous())
        self.fading: Tensor
        self.register_buffer("fading", -tensors["A_log"].to(self.wide).exp())
        self.fading_bias: Tensor
        self.register_buffer("fading_bias", tensors["dt_bias"].to(self.wide))
        self.weight: Tensor
        self.register_buffer("weight", tensors["norm.weight"].to(self.wide))
        self.bias: Tensor | None
        self.register_buffer("bias", None)
        self.skip: Tensor | None
        self.register_buffer("skip", None)

    def empty(self, batch: int) -> RecurrentState:
        """Return the state before any token, for `batch` sequences."""
        config, like = self.config, self.given["conv1d.weight"]
        inputs = like.new_zeros(batch, config.kernel - 1, config.channels)
        return RecurrentState(
            inputs, self.weight.new_zeros(batch, config.value_heads, config.key_dim, config.value_dim)
        )

    def forward(self, x: Tensor, recurrence: DeltaRecurrence) -> Tensor:
        """Map projected inputs of R nodes to `[R, values]`.

        Args:
            x: `[R, n]`, the projections of `config.inputs` and of `config.gates` side by side.
        """
        raise NotImplementedError

    def entering(self, convolved: Tensor, shares: Tensor, decays: Tensor) -> Entering:
        """Return the inputs of the recurrence.

        Args:
            convolved: Output of the convolution with its bias, `[..., channels]`.
            shares, decays: As in `DeltaRecurrence.run`.
        """
        raise NotImplementedError

    def output(self, read: Tensor, values: Tensor) -> Tensor:
        """Return the output for what is read from states, `[..., heads, value_dim]`, and the values of this shape."""
        return read if self.skip is None else read + self.skip * values


class GatedDeltaNet(RecurrentMixer[DeltaNet]):
    corrects = True

    def forward(self, x: Tensor, recurrence: DeltaRecurrence) -> Tensor:
        heads = self.config.value_heads
        sizes = [*self.config.inputs.values(), heads, heads]
        mixed, gate, shares, decays = x.split(sizes, dim=-1)
        out = recurrence.run(self, mixed, shares, decays)
        out = F.rms_norm(out, (out.size(-1),), self.weight, self.eps)
        return (out.flatten(-2) * F.silu(gate.to(self.wide))).to(x.dtype)

    def entering(self, convolved: Tensor, shares: Tensor, decays: Tensor) -> Entering:
        config = self.config
        keys = config.key_heads * config.key_dim
        heads = F.silu(convolved).split([keys, keys, config.values], dim=-1)
        queries, keys_of, values = (
            part.unflatten(-1, (-1, size)) for part, size in zip(heads, self._sizes, strict=True)
        )
        group = config.value_heads // config.key_heads
        queries, keys_of = normed(queries), normed(keys_of)
        if config.tiled:
            queries, keys_of = (torch.cat([part] * group, dim=-2) for part in (queries, keys_of))
        else:
            queries, keys_of = (part.repeat_interleave(group, dim=-2) for part in (queries, keys_of))
        fading = self.fading * F.softplus(decays.to(self.wide) + self.fading_bias)
        return Entering(queries * config.key_dim**-0.5, keys_of, values, fading, shares.to(self.wide).sigmoid())

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.config.key_dim, self.config.key_dim, self.config.value_dim


class Mamba2Mixer(RecurrentMixer[Mamba2]):
    """Mamba-2. Step sizes have no limits, as in the published models."""

    corrects = False

    def __init__(self, config: Mamba2, tensors: dict[str, Tensor], eps: float) -> None:
        super().__init__(config, tensors, eps)
        self.register_buffer("bias", tensors["conv1d.bias"].to(self.wide))
        self.register_buffer("skip", tensors["D"].to(self.wide).unsqueeze(-1))

    def forward(self, x: Tensor, recurrence: DeltaRecurrence) -> Tensor:
        config = self.config
        gate, mixed, steps = x.split([config.values, config.channels, config.value_heads], dim=-1)
        out = recurrence.run(self, mixed, steps, steps).flatten(-2) * F.silu(gate.to(self.wide))
        groups = out.unflatten(-1, (config.key_heads, -1))
        normed_groups = F.rms_norm(groups, (groups.size(-1),), None, self.eps)
        return (normed_groups.flatten(-2) * self.weight).to(x.dtype)

    def entering(self, convolved: Tensor, shares: Tensor, decays: Tensor) -> Entering:
        config = self.config
        keys, group = config.key_heads * config.key_dim, config.value_heads // config.key_heads
        values, keys_of, queries = F.silu(convolved).split([config.values, keys, keys], dim=-1)
        keys_of, queries = (
            part.unflatten(-1, (config.key_heads, -1)).repeat_interleave(group, dim=-2) for part in (keys_of, queries)
        )
        steps = F.softplus(shares.to(self.wide) + self.fading_bias)
        return Entering(queries, keys_of, values.unflatten(-1, (config.value_heads, -1)), self.fading * steps, steps)


def normed(x: Tensor) -> Tensor:
    """Normalize vectors `[..., D]` to length one."""
    return x * (x.square().sum(-1, keepdim=True) + MIN_NORM).rsqrt()


def delta_rule(state: Tensor, nodes: Entering, within: Tensor, corrects: bool = True) -> tuple[Tensor, Tensor]:
    """Compute the output of the state at each node of trees, after the corrections of its ancestors and its own.

    The correction at a node is share * (value - output of the decayed state for the node's key). That state is the one
    before the roots, decayed along the path, plus the corrections of the node's ancestors, decayed since. So all
    corrections are the solution of one triangular system. Without `corrects`, they are share * value.

    Args:
        state: State before the roots, `[B, heads, key_dim, value_dim]`.
        nodes: Inputs of the nodes, `[B, heads, N, ...]`, parents before children.
        within: `[B or 1, 1, N, N]` bool, whether node j is node i or its ancestor.

    Returns:
        Outputs and corrections, `[B, heads, N, value_dim]` each.
    """
    queries, keys, values, decays, shares = nodes
    count = keys.size(2)
    faded = (within.to(decays.dtype) @ decays.unsqueeze(-1)).squeeze(-1)  # decay since the state before the roots
    between = (faded.unsqueeze(-1) - faded.unsqueeze(-2)).masked_fill(~within, -torch.inf).exp()
    if not corrects:
        corrections = values * shares.unsqueeze(-1)
        by_queries = (queries @ state) * faded.exp().unsqueeze(-1)
        return by_queries + (queries @ keys.mT * between) @ corrections, corrections
    asked = torch.cat([keys, queries], dim=2)
    to_keys, to_queries = (asked @ keys.mT).split(count, dim=2)
    by_keys, by_queries = ((asked @ state) * faded.exp().repeat(1, 1, 2).unsqueeze(-1)).split(count, dim=2)
    shares = shares.unsqueeze(-1)
    system = to_keys * between * shares  # the solver takes its diagonal for one
    corrections = torch.linalg.solve_triangular(system, (values - by_keys) * shares, upper=False, unitriangular=True)
    return by_queries + (to_queries * between) @ corrections, corrections


def corrected(state: Tensor, keys: Tensor, corrections: Tensor, decays: Tensor) -> Tensor:
    """Return the state after a chain of nodes, `[B, heads, n, ...]`."""
    for own in torch.arange(keys.size(2)).split(CHUNK):
        part = slice(int(own[0]), int(own[-1]) + 1)
        faded = decays[:, :, part].cumsum(-1)
        since = (faded[..., -1:] - faded).exp().unsqueeze(-1)
        state = state * faded[..., -1:].exp().unsqueeze(-1) + (keys[:, :, part] * since).mT @ corrections[:, :, part]
    return state


@dataclass(frozen=True)
class Ancestry:
    """Ancestors of the nodes of a forward pass.

    Attributes:
        within: `[B, 1, N, N]` bool, as in `delta_rule`. If all sequences are chains, `[1, 1, n, n]` of the first n
            nodes, and n nodes are computed at once.
        history: `[kernel, B, N]` int64, for each node the indices of itself and of the nodes before it on its path,
            nearest first. Index 0 is the first of the `kernel - 1` tokens before the nodes.
    """

    within: Tensor
    history: Tensor

    @classmethod
    def of_chains(cls, batch: int, count: int, kernel: int) -> Ancestry:
        """Return that of `batch` chains of `count` nodes."""
        size = min(count, CHUNK)
        within = torch.ones(size, size).tril().bool()
        own = torch.arange(kernel - 1, kernel - 1 + count) - torch.arange(kernel)[:, None]
        return cls(within[None, None], own[:, None].expand(-1, batch, -1))


class TreeRecurrence:
    """Recurrence over all nodes of a forward pass at once.

    Args:
        state: State of the sequences before the nodes.
        ancestry: Ancestors of the nodes.
    """

    def __init__(self, state: RecurrentState, ancestry: Ancestry) -> None:
        self.state, self.ancestry = state, ancestry
        self.mixed: Tensor
        self.nodes: Entering
        self.corrections: Tensor

    def run(self, net: RecurrentMixer[Any], mixed: Tensor, shares: Tensor, decays: Tensor) -> Tensor:
        batch, within = len(self.state.recurrence), self.ancestry.within
        self.mixed, shares, decays = (part.view(batch, -1, part.size(-1)) for part in (mixed, shares, decays))
        whole = torch.cat([self.state.convolution, self.mixed], dim=1).to(net.wide)
        rows = torch.arange(batch, device=whole.device)[:, None]
        taps = zip(self.ancestry.history, net.kernel.flip(0), strict=True)
        convolved = sum(whole[rows, indices] * weight for indices, weight in taps)
        assert isinstance(convolved, Tensor)
        entering = net.entering(convolved if net.bias is None else convolved + net.bias, shares, decays)
        self.nodes = nodes = Entering(*(part.transpose(1, 2) for part in entering))
        state, outputs, corrections = self.state.recurrence, list[Tensor](), list[Tensor]()
        count = self.mixed.size(1)
        for first, end in pairwise([*range(0, count, within.size(-1)), count]):
            chunk, size = Entering(*(part[:, :, first:end] for part in nodes)), end - first
            output, correction = delta_rule(state, chunk, within[..., :size, :size], net.corrects)
            outputs.append(output)
            corrections.append(correction)
            if end < count:
                state = corrected(state, chunk.keys, correction, chunk.decays)
        self.corrections = torch.cat(corrections, dim=2)
        return net.output(torch.cat(outputs, dim=2).transpose(1, 2), entering.values).flatten(0, 1)

    def after(self, row: int, nodes: list[int]) -> RecurrentState:
        own = slice(row, row + 1)
        path = slice(len(nodes)) if nodes == [*range(len(nodes))] else nodes  # a slice needs no copy
        keys, corrections, decays = (
            part[own, :, path] for part in (self.nodes.keys, self.corrections, self.nodes.decays)
        )
        inputs = torch.cat([self.state.convolution[own], self.mixed[own, path]], dim=1)[:, len(nodes) :]
        return RecurrentState(inputs.clone(), corrected(self.state.recurrence[own], keys, corrections, decays))


class ExactRecurrence:
    """Recurrence node by node, each from the state after its parent.

    All operations have one shape, so the bits of a node do not depend on what else is computed. The nodes come in
    pieces, as in `forward_in_pieces`.

    Args:
        state: State of the sequences before the nodes.
        parents: Parents of the nodes of each sequence, as in `Target.forward`.
    """

    def __init__(self, state: RecurrentState, parents: Sequence[Sequence[int]]) -> None:
        self.before = [RecurrentState(*parts) for parts in zip(*state, strict=True)]
        self.parents = parents
        self.last_child = [{parent: node for node, parent in enumerate(above)} for above in parents]
        self.behind: dict[tuple[int, int], RecurrentState] = {}  # states after nodes with later children
        self.newest: dict[int, RecurrentState] = {}  # state after the last node of each sequence so far
        self.inputs: list[tuple[Tensor, Tensor, Tensor]] = []  # inputs of the nodes so far

    def run(self, net: RecurrentMixer[Any], mixed: Tensor, shares: Tensor, decays: Tensor) -> Tensor:
        count = len(self.parents[0])
        out = net.weight.new_zeros(len(mixed), net.config.value_heads, net.config.value_dim)
        self.net = net
        first = len(self.inputs)
        for piece_node in range(min(EXACT_NODES, len(self.parents) * count - first)):
            row, node = divmod(first + piece_node, count)
            parent, last_child = self.parents[row][node], self.last_child[row]
            state = self.before[row] if parent < 0 else self.behind[row, parent]
            inputs = mixed[piece_node].clone(), shares[piece_node].clone(), decays[piece_node].clone()
            out[piece_node], after = step(net, state, *inputs)
            self.newest[row] = after
            self.inputs.append(inputs)
            if node in last_child:
                self.behind[row, node] = after
            if last_child[parent] == node:
                self.behind.pop((row, parent), None)
        return out

    def after(self, row: int, nodes: list[int]) -> RecurrentState:
        through_all = len(nodes) == len(self.parents[row])
        state = self.newest[row] if through_all else self.before[row]
        for node in () if through_all else nodes:
            _, state = step(self.net, state, *self.inputs[row * len(self.parents[0]) + node])
        return RecurrentState(*(part.unsqueeze(0) for part in state))


def step(
    net: RecurrentMixer[Any], state: RecurrentState, mixed: Tensor, shares: Tensor, decays: Tensor
) -> tuple[Tensor, RecurrentState]:
    """Return the output `[heads, value_dim]` and the state after one token, without a batch dimension."""
    window = torch.cat([state.convolution, mixed[None]])
    convolved = (window.to(net.wide) * net.kernel).sum(0)
    convolved = convolved if net.bias is None else convolved + net.bias
    queries, keys, values, fading, share = net.entering(convolved, shares, decays)
    faded = state.recurrence * fading.exp()[:, None, None]
    stored = (faded * keys[:, :, None]).sum(1) if net.corrects else 0
    correction = (values - stored) * share[:, None]
    behind = faded + keys[:, :, None] * correction[:, None, :]
    return net.output((behind * queries[:, :, None]).sum(1), values), RecurrentState(window[1:], behind)
