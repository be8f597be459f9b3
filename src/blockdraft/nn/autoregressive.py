"""Draft networks that guess a token at a time (EAGLE-3, MTP heads), and how they decode by torch's operations.

The network's input for a token x[s] is an entry: the token's embedding, and a feature of the position before it. The
feature is what `fuse` makes of the target's tapped outputs at s - 1 or, where the target has not been there yet, what
the network feeds on from the entry before. The entry stands at position s - 1 and guesses x[s + 1]. The first token of
a text has no entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.machine import send
from blockdraft.nn.attention import attend
from blockdraft.nn.cache import KVCache
from blockdraft.timing import HEAD, PASS, mark

# (queries [B, heads, N, D], keys and values of the same entries [B, kv_heads, N, D]) -> [B, heads, N, D]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CachedAttention:
    """An `Attend` in its parts, for layers that attend by themselves.

    Attributes:
    X
    """

    write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    visible: Tensor

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, *self.write(keys, values), self.visible)


class AutoregressiveNetwork(ABC, nn.Module):
    """Base of the networks; see the top of this file.

    Attributes:
        config: With `taps`, `block_size` and `hidden_size` at least.
        fc: Of the network's device and dtype, like all of its weights.
    """

    config: Any
    fc: nn.Linear

    @property
    @abstractmethod
    def kept(self) -> Tensor:
        """The target's ids of the tokens that it can guess, `[Vd]` int64."""

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads, and the size of each, of the keys and of the values that `keys_values` gives."""
        heads: tuple[int, int] = self.config.num_key_value_heads, self.config.head_dim
        return heads, heads

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Features `[..., H]` of the tapped layers' outputs, `[..., m * H]`."""

    @abstractmethod
    def keys_values(self, embedded: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that later entries see of these, each `[B, heads, N, D]`; arguments as in `forward`."""

    @abstractmethod
    def forward(self, embedded: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The network's own states of some entries.

        Args:
            embedded: `[B, N, H]`, of the entries' tokens.
            feature: `[B, N, H]`, of the positions before.
            positions: `[B, N]`, where the features come from.
            attend: Attention of these entries to those that they see, themselves included.

        Returns:
            `[B, N, H]`, before the last norm: what `logits` takes, and `fed_on`.
        """

    @abstractmethod
    def fed_on(self, hidden: Tensor) -> Tensor:
        """The feature that the next entry gets, of states `[..., H]`."""

    @abstractmethod
    def logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Over the tokens that it can guess, `[..., Vd]`, of states `[..., H]`.

        Args:
            target_head: The target's output projection, for networks that have none of their own.
        """

    def runner(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        compile_reason: str | None = None,
    ) -> AutoregressiveRunner:
        """As `Runnable.runner` of targets: an `AutoregressivePass`."""
        return AutoregressivePass(self, embed, head, compile_reason)


class DraftNodes(Protocol):
    """The nodes of one draft, entries by which a network guesses a token at a time. The first call has the anchors.

    Attributes:
        room: Number of further nodes a row that there may be.
    """

    @property
    def room(self) -> int: ...

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Add one node for each of the tokens; logits `[B, N, Vd]` of what follows it.

        Args:
            tokens: `[B, N]` int64.
            parents: `[B, N]` int64, places in the call before of the nodes that these follow, whose ancestors they see;
                None is the only node of that call, or in the first call the text.
        """


class AutoregressiveRunner(Protocol):
    """Runs a network that guesses a token at a time, in the target's way of computing.

    What it keeps of a text lies in the slots of its tokens: slot s has the keys and values of the entry of token s,
    which takes the target's feature at s - 1, and the feature at s, which the entry of the next token will take. Slot 0
    has no feature before it and is seen by nobody.

    Attributes:
        compile_reason: Why it is not compiled, where it might have been; else None.
    """

    compile_reason: str | None

    def state_bytes(self, batch: int, capacity: int) -> int:
        """As `Drafter.state_bytes`."""

    def weight_bytes(self) -> int:
        """Memory of weights that it keeps beside the network's own."""

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """As `Drafter.workspace_bytes`."""

    def slots_beside(self, block_size: int, width: int) -> int:
        """Slots behind a text that the nodes of a draft take, with so many of them on each level."""

    def observe(self, state: KVCache, tokens: Tensor, features: Tensor) -> None:
        """Write what is kept of tokens `[B, N]`, with the tapped outputs `[B, N, m * H]`, behind each row's own, for
        `state.commit` to keep."""

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> DraftNodes:
        """The nodes of a draft.

        Args:
            block_size: Tokens of a path, anchor included.
            width: Most nodes of a level behind the anchor.
            window: Committed tokens that are seen, the last ones; None is all.
        """


class AutoregressivePass:
    """An `AutoregressiveRunner` of torch's operations.

    Args:
        network: On its device and in its dtype.
        embed, head: The target's.
        compile_reason: Why it is not compiled, where it might have been.
    """

    def __init__(
        self,
        network: AutoregressiveNetwork,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        compile_reason: str | None = None,
    ) -> None:
        self.network, self.embed, self.head, self.compile_reason = network, embed, head, compile_reason

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        slot: int = sum(heads * size for heads, size in self.network.cached) + self.network.config.hidden_size
        return batch * capacity * slot * self.network.fc.weight.dtype.itemsize

    def weight_bytes(self) -> int:
        return 0

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def slots_beside(self, block_size: int, width: int) -> int:
        return 0  # the nodes of a draft lie in a copy

    def observe(self, state: KVCache, tokens: Tensor, features: Tensor) -> None:
        count = tokens.size(1)
        state.check_room(count)
        fused = self.network.fuse(features.to(self.network.fc.weight.dtype))
        *stores, known = self.stores(state)
        before = torch.cat([last_features(state, known), fused[:, :-1]], dim=1)
        positions = (state.slots(count, tokens.device) - 1).clamp(min=0)
        new = *self.network.keys_values(self.embed(tokens), before, positions), fused.unsqueeze(1)
        for store, nodes in zip((*stores, known.unsqueeze(0)), new, strict=True):
            for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
                store[:, row + length : row + length + count] = nodes[place]

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> CopiedNodes:
        return CopiedNodes(self, state, block_size, width, window)

    def stores(self, state: KVCache) -> tuple[Tensor, ...]:
        """Keys and values of all slots, `[heads, slots, D]` each, and features, `[slots, H]`."""
        like = self.network.fc.weight
        cached = (like.new_empty(1, heads, 0, size) for heads, size in self.network.cached)
        return *state.layer(0, *cached), feature_store(state, 1, self.network.config.hidden_size, like)


class CopiedNodes:
    """`DraftNodes` in a copy of the texts' keys and values, which ends with the draft."""

    def __init__(
        self, run: AutoregressivePass, state: KVCache, block_size: int, width: int, window: int | None
    ) -> None:
        self._run, self._depth = run, 0
        *stores, known = run.stores(state)
        self._feature, device = last_features(state, known), known.device
        window = max(state.lengths) if window is None else window
        skipped, self.room = max(min(state.lengths) - window, 0), 1 + width * (block_size - 2)
        texts = [state.view(store, 0)[0][:, :, skipped:] for store in stores]
        self._keys, self._values = (F.pad(text, (0, 0, 0, self.room)) for text in texts)
        lengths = send(torch.tensor(state.lengths), device)[:, None]
        slots = torch.arange(skipped, max(state.lengths), device=device)
        self._known = (slots >= (lengths - window).clamp(min=1)) & (slots < lengths)  # [B, T]
        self._positions, self._end = lengths - 1, len(slots)
        # Which nodes of the draft each of the last call sees, `[B, N, M]`.
        self._within = torch.ones(len(state.rows), 0, 0, dtype=torch.bool, device=device)

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        network, (batch, count) = self._run.network, tokens.shape
        within, feature = self._within, self._feature
        if parents is not None:
            within, feature = picked(within, parents), picked(feature, parents)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        self._within = within = torch.cat([within.expand(-1, count, -1), own], dim=2) if self._depth else own
        visible = torch.cat([self._known.unsqueeze(1).expand(-1, count, -1), within], dim=2)
        begin, self._end, self.room = self._end, self._end + count, self.room - count

        def write(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._keys[:, :, begin : self._end], self._values[:, :, begin : self._end] = keys, values
            return self._keys[:, :, : self._end], self._values[:, :, : self._end]

        positions = (self._positions + self._depth).clamp(min=0).expand(-1, count)
        self._depth += 1
        hidden = network(self._run.embed(tokens), feature, positions, CachedAttention(write, visible))
        self._feature = network.fed_on(hidden)
        mark(PASS)
        logits = network.logits(hidden, self._run.head)
        mark(HEAD)
        return logits


def picked(nodes: Tensor, places: Tensor) -> Tensor:
    """Some of each row's nodes `[B, N, ...]`, `[B, K, ...]`, by their places `[B, K]`."""
    return nodes.gather(1, places.unsqueeze(2).expand(-1, -1, nodes.size(2)))


def feature_store(state: KVCache, layer: int, size: int, like: Tensor) -> Tensor:
    """Of all slots, `[slots, H]`, kept as a layer of the state."""
    return state.layer(layer, like.new_empty(1, 1, 0, size))[0][0]


def last_features(state: KVCache, store: Tensor) -> Tensor:
    """Of the last token of each row, `[B, 1, H]`; 0 where there is none."""
    slots = [row + max(length - 1, 0) for row, length in zip(state.rows, state.lengths, strict=True)]
    found = store[send(torch.tensor(slots), store.device)]
    if not all(state.lengths):
        empty = send(torch.tensor([length == 0 for length in state.lengths]), store.device)
        found = found.masked_fill(empty[:, None], 0)
    return found.unsqueeze(1)
