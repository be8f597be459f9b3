"""Draft networks that predict one token at a time (EAGLE-3, MTP heads), and their decoding by torch's operations.

The network's input for a token x[s] is an entry: the token's embedding, and the hidden state of the position before it.
This is fused from the target's layers at s - 1 or, where the target has not been yet, the network's own output for the
entry before. The entry has position s - 1 and predicts x[s + 1]. The first token of a sequence has no entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.machine import send
from blockdraft.nn.attention import attend
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_network import DraftHost, DraftNetwork, NetworkRunner
from blockdraft.nn.layers import RMSNorm
from blockdraft.nn.rotary import Rotary
from blockdraft.timing import HEAD, PASS, mark

# Takes queries [B, heads, N, D], and keys and values of the same entries [B, kv_heads, N, D]; returns [B, heads, N, D].
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

WIDTH = 10  # nodes per level that a tree is continued from, and children of each


@dataclass(frozen=True)
class CachedAttention:
    """An `Attend` in parts, for layers that compute attention themselves.

    Attributes:
        write: Stores keys and values of new entries, `[B, kv_heads, N, D]`, and returns those of all entries,
            `[B, kv_heads, T, D]`.
        visible: `[B, N, T]` bool, which entry attends to which.
    """

    write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    visible: Tensor

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, *self.write(keys, values), self.visible)


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """Weights of a network by their role, and how it joins embedding and hidden state.

    Attributes:
        layer: The only layer.
        token_norm, hidden_state_norm: Norms of an entry's embedding and hidden state.
        norm: Norm behind the layer.
        rotary: Rotary embedding of the layer's attention.
        normed_target_layers: Function from the target layers' outputs `[..., m * H]` to the input of `fc`, for networks
            whose `fc` fuses them and that have a head of their own, `lm_head`. None where `fc` joins embedding and
            hidden state, and the head is the target's.
        normed_stream: Whether the layer's output is added to the normed hidden state.
        normed_feedback: Whether the next node reads the hidden state behind the last norm.
        tied_head: Whether the rows of `lm_head` are those of the target's head.
    """

    layer: nn.Module
    token_norm: RMSNorm
    hidden_state_norm: RMSNorm
    norm: RMSNorm
    rotary: Rotary
    normed_target_layers: Callable[[Tensor], Tensor] | None
    normed_stream: bool
    normed_feedback: bool
    tied_head: bool = False


class AutoregressiveNetwork(ABC, DraftNetwork):
    """Base of networks that predict one token at a time; see the top of this file.

    Attributes:
        config: Configuration with at least `target_layers`, `block_size` and `hidden_size`.
        fc: Linear layer that fuses hidden states, or joins embedding and hidden state.
    """

    config: Any
    fc: nn.Module

    @property
    def like(self) -> Tensor:
        """A weight with the device and dtype of the network."""
        return next(self.parameters())

    @property
    def layer_parts(self) -> LayerParts:
        """Weights of the network by their role, for compiled runners."""
        raise NotImplementedError

    @property
    @abstractmethod
    def kept(self) -> Tensor:
        """Ids of the tokens that the network can predict, `[Vd]` int64."""

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number and size of the heads of keys, and of values, from `keys_values`."""
        heads: tuple[int, int] = self.config.num_key_value_heads, self.config.head_dim
        return heads, heads

    @abstractmethod
    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Fuse the hidden states of the target layers, `[..., m * H]`, to `[..., H]`."""

    @abstractmethod
    def keys_values(self, embedded: Tensor, hidden_state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of entries, `[B, heads, N, D]` each. Arguments as in `forward`."""

    @abstractmethod
    def forward(self, embedded: Tensor, hidden_state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return outputs `[B, N, H]` for entries, before the last norm, for `logits` and `fed_on`.

        Args:
            embedded: `[B, N, H]`, embeddings of the entries' tokens.
            hidden_state: `[B, N, H]`, hidden states of the positions before.
            positions: `[B, N]`, positions of these hidden states.
            attend: Attention of these entries to the visible ones, themselves included.
        """

    @abstractmethod
    def fed_on(self, hidden: Tensor) -> Tensor:
        """Return the hidden states `[..., H]` of the next entries, from outputs `[..., H]`."""

    @abstractmethod
    def logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits `[..., Vd]` of the tokens that the network can predict, from outputs `[..., H]`.

        Args:
            target_head: The target's output projection, for networks without one of their own.
        """

    def runner(self, host: DraftHost) -> AutoregressiveRunner:
        return AutoregressivePass(self, host)


class DraftNodes(Protocol):
    """Nodes of one draft: the entries of its tokens, added level by level. The first call adds the anchors.

    Attributes:
        room: Number of further nodes per sequence that can be added.
    """

    @property
    def room(self) -> int: ...

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Add a node for each token, and return the logits `[B, N, Vd]` of the tokens that follow.

        Args:
            tokens: `[B, N]` int64.
            parents: `[B, N]` int64, indices of the nodes' parents among those of the previous call. A node attends to
                its ancestors. None is the only node of that call, or no parent in the first call.
        """


class AutoregressiveRunner(NetworkRunner, Protocol):
    """Runner of a network that predicts one token at a time.

    Its state has a KV slot for each token of a sequence. Slot s holds the keys and values of the entry of token s,
    which has the target's hidden state at s - 1, and the hidden state at s, which the entry of the next token will
    have. Slot 0 has no hidden state before it, and no node attends to it.
    """

    @property
    def grown_vocabulary(self) -> Tensor | None:
        """Ids of the tokens that logits are about, `[Vd]` int64; None for the network's own, `kept`.

        Calls of `observe` may change them.
        """
        return None

    def slots_beside(self, block_size: int, width: int) -> int:
        """Return the KV slots behind a sequence that a draft of at most `width` nodes per level takes."""
        return 0  # the nodes of a draft are in a copy

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        """Write the KV slots of tokens `[B, N]` behind each sequence's committed ones, for `state.commit` to keep.

        Args:
            hidden_states: Hidden states of the target layers at these tokens, `[B, N, m * H]`.
        """

    def chain(
        self,
        state: KVCache,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Draft a chain of the most probable tokens in one call. Return None if this runner goes from node to node.

        Args:
            anchor: `[B]` int64.
            draft_tokens: Draft tokens per sequence.
            window: As in `nodes`.
            seconds, calibration: `step_seconds` and `calibration` of a `Plan`: a chain ends when `next_pays` is false.

        Returns:
            Tokens `[B, n]`, anchors first, and with `seconds` each sequence's expected number of accepted draft tokens,
            `[B]`.
        """
        return None

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> DraftNodes:
        """Begin the nodes of a draft.

        Args:
            block_size: Maximum number of tokens on a path, anchor included.
            width: Maximum number of nodes per level behind the anchor.
            window: Number of last committed tokens that are visible; None is all.
        """


class AutoregressivePass(AutoregressiveRunner):
    """An `AutoregressiveRunner` that uses torch's operations.

    Args:
        network: Network on the host's device and in its dtype.
    """

    def __init__(self, network: AutoregressiveNetwork, host: DraftHost) -> None:
        self.network, self.embed, self.head, self.compile_reason = network, host.embed, host.head, host.compile_reason

    def state_bytes(self, batch: int, capacity: int) -> int:
        slot: int = sum(heads * size for heads, size in self.network.cached) + self.network.config.hidden_size
        return batch * capacity * slot * self.network.like.dtype.itemsize

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        count = tokens.size(1)
        state.check_room(count)
        fused = self.network.fuse(hidden_states.to(self.network.like.dtype))
        *stores, known = self.stores(state)
        before = torch.cat([last_hidden_states(state, known), fused[:, :-1]], dim=1)
        positions = (state.slots(count, tokens.device) - 1).clamp(min=0)
        new = *self.network.keys_values(self.embed(tokens), before, positions), fused.unsqueeze(1)
        for store, nodes in zip((*stores, known.unsqueeze(0)), new, strict=True):
            for i, (start, length) in enumerate(zip(state.starts, state.lengths, strict=True)):
                store[:, start + length : start + length + count] = nodes[i]

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> CopiedNodes:
        return CopiedNodes(self, state, block_size, width, window)

    def stores(self, state: KVCache) -> tuple[Tensor, ...]:
        """Return keys and values `[heads, slots, D]` and hidden states `[slots, H]` of all KV slots."""
        like = self.network.like
        cached = (like.new_empty(1, heads, 0, size) for heads, size in self.network.cached)
        return *state.layer(0, *cached), hidden_state_store(state, 1, self.network.config.hidden_size, like)


class CopiedNodes:
    """`DraftNodes` in a copy of the sequences' keys and values, which lives as long as the draft."""

    def __init__(
        self, run: AutoregressivePass, state: KVCache, block_size: int, width: int, window: int | None
    ) -> None:
        self._run, self._depth = run, 0
        *stores, known = run.stores(state)
        self._hidden_state, device = last_hidden_states(state, known), known.device
        window = max(state.lengths) if window is None else window
        skipped, self.room = max(min(state.lengths) - window, 0), 1 + width * (block_size - 2)
        texts = [state.view(store, 0)[0][:, :, skipped:] for store in stores]
        self._keys, self._values = (F.pad(text, (0, 0, 0, self.room)) for text in texts)
        lengths = send(torch.tensor(state.lengths), device)[:, None]
        slots = torch.arange(skipped, max(state.lengths), device=device)
        self._known = (slots >= (lengths - window).clamp(min=1)) & (slots < lengths)  # [B, T]
        self._positions, self._end = lengths - 1, len(slots)
        # Nodes of the draft that each node of the last call attends to, `[B, N, M]` bool.
        self._within = torch.ones(len(state.starts), 0, 0, dtype=torch.bool, device=device)

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        network, (batch, count) = self._run.network, tokens.shape
        within, hidden_state = self._within, self._hidden_state
        if parents is not None:
            within, hidden_state = picked(within, parents), picked(hidden_state, parents)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        self._within = within = torch.cat([within.expand(-1, count, -1), own], dim=2) if self._depth else own
        visible = torch.cat([self._known.unsqueeze(1).expand(-1, count, -1), within], dim=2)
        begin, self._end, self.room = self._end, self._end + count, self.room - count

        def write(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._keys[:, :, begin : self._end], self._values[:, :, begin : self._end] = keys, values
            return self._keys[:, :, : self._end], self._values[:, :, : self._end]

        positions = (self._positions + self._depth).clamp(min=0).expand(-1, count)
        self._depth += 1
        hidden = network(self._run.embed(tokens), hidden_state, positions, CachedAttention(write, visible))
        self._hidden_state = network.fed_on(hidden)
        mark(PASS)
        logits = network.logits(hidden, self._run.head)
        mark(HEAD)
        return logits


def picked(nodes: Tensor, indices: Tensor) -> Tensor:
    """Return the values `[B, K, D]` of the nodes `[B, N, D]` with these indices `[B, K]` int64."""
    return nodes.gather(1, indices.unsqueeze(2).expand(-1, -1, nodes.size(2)))


def hidden_state_store(state: KVCache, layer: int, size: int, like: Tensor) -> Tensor:
    """Return the hidden states of all KV slots, `[slots, H]`, stored as a layer of the state."""
    return state.layer(layer, like.new_empty(1, 1, 0, size))[0][0]


def last_hidden_states(state: KVCache, store: Tensor) -> Tensor:
    """Return the hidden state of each sequence's last token, `[B, 1, H]`; 0 for sequences without tokens."""
    slots = [start + max(length - 1, 0) for start, length in zip(state.starts, state.lengths, strict=True)]
    last = store[send(torch.tensor(slots), store.device)]
    if not all(state.lengths):
        empty = send(torch.tensor([length == 0 for length in state.lengths]), store.device)
        last = last.masked_fill(empty[:, None], 0)
    return last.unsqueeze(1)
