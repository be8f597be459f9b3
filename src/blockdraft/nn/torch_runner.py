"""Draft networks run by torch's operations, on any device.

A block passes through the network's weights in fewer and larger operations than those of the network: for a few tokens,
the overhead of an operation on a CPU, or of its launch on a GPU, exceeds the arithmetic. Queries, keys and values are
one product, and gate and up another. Queries and keys are normed and rotated in place, and the keys and values of all
layers lie in one tensor of the cache. A test checks that the numbers are the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.machine import send
from blockdraft.nn.attention import attend, attend_grouped, grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, StoreShape, write_nodes
from blockdraft.nn.draft_network import Attend, DraftAttention, DraftHost, DraftLayerKind, DraftNetwork, LayeredNetwork
from blockdraft.nn.draft_runner import DraftRunner
from blockdraft.nn.layers import GatedMLP, rms_factor, rotate_swapped
from blockdraft.nn.packed import PackedLinear
from blockdraft.timing import HEAD, PASS, mark

ANGLES = 1024  # minimum number of positions for which angles are computed at once


@dataclass(frozen=True)
class CachedAttention:
    """An `Attend` in parts, for layers that compute attention themselves.

    Attributes:
        write: Stores a layer's keys and values of new entries, `[B, kv_heads, N, D]`, and returns those of all entries,
            `[B, kv_heads, T, D]`.
        visible: `[B, N, T]` bool for each layer, which entry attends to which.
    """

    write: Callable[[int, Tensor, Tensor], Sequence[Tensor]]
    visible: Sequence[Tensor]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = self.write(layer, keys, values)
        return attend(queries, keys, values, self.visible[layer])


class FusedAttention(nn.Module):
    """`DraftAttention` that passes heads as `[B, N, heads, D]` to `attend`."""

    def __init__(self, plain: DraftAttention, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.qkv = joined([plain.q_proj, plain.k_proj, plain.v_proj])
        self.output = PackedLinear(plain.o_proj.weight, plain.o_proj.bias)
        norms = ((plain.q_norm, self.heads), (plain.k_norm, self.kv_heads))
        self.scales = torch.cat([norm.weight.expand(count, -1) for norm, count in norms])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        both = heads[:, :, : self.heads + self.kv_heads]
        rotate_swapped(both.mul_(rms_factor(both, self.eps) * self.scales), cos, sin)
        queries, keys, values = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        projected: Tensor = self.output(attend(layer, queries, keys, values))
        return projected


class FusedMLP(nn.Module):
    def __init__(self, plain: GatedMLP) -> None:
        super().__init__()
        self.gate_up = joined([plain.gate_proj, plain.up_proj])
        self.down = PackedLinear(plain.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate).mul_(up))
        return out


class TorchDraftRunner(DraftRunner):
    """A `DraftRunner` that uses torch's operations.

    Args:
        network: Network on the host's device and in its dtype. Where it drafts blocks, its projections become views of
            the fused ones, to save memory; do not replace its weights afterwards.
    """

    @torch.no_grad()
    def __init__(self, network: DraftNetwork, host: DraftHost) -> None:
        self.embed, self.head, self.compile_reason = host.embed, host.head, host.compile_reason
        self.network: Any = network
        self.config, self.dtype, self.described = network.config, host.dtype, network.description
        self._last_layer = len(self.described.layers) - 1
        self._fused_bytes = 0
        self.device, dtype = network.like.device, network.like.dtype
        layers, hidden_state = len(self.described.layers), StoreShape(1, 1, self.config.hidden_size, dtype)
        if not layers:
            self.shapes = (hidden_state._replace(dtype=self.dtype),)
        elif self.described.has_pairs:
            kinds = cast(LayeredNetwork, network).cached
            self.shapes = (*(StoreShape(layers, heads, size, dtype) for heads, size in kinds), hidden_state)
        else:
            (heads, size), _ = cast(LayeredNetwork, network).cached
            self.shapes = (StoreShape(layers, 2 * heads, size, dtype),)
        if self.described.layers and not self.described.has_pairs:
            self._fuse_layers(network)

    def weight_bytes(self) -> int:
        return self._fused_bytes

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        if self.described.has_pairs:
            self._observe_pairs(state, tokens, hidden_states)
        elif self.described.layers:
            self._observe_context(state, hidden_states)
        else:
            # Only the last token's hidden state is read, but any token may become the last one of a sequence.
            state.extend(self.hidden_store(state), hidden_states.to(self.dtype).unsqueeze(1))

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.described.layers:
            return self._run_heads(state, tokens.size(1) - first)
        hidden = self.block_pass(state, self.embed(tokens), window)[:, first:]
        mark(PASS)
        return hidden, self.head(hidden)

    # Heads.

    def _run_heads(self, state: KVCache, count: int) -> tuple[Tensor, Tensor]:
        """Return states `[B, count, H]` and logits `[B, count, V]` of the first `count` heads."""
        states = self.network(self.last_hidden_states(state)[:, 0], count)
        mark(PASS)
        logits = self.network.logits(states, self.head)
        mark(HEAD)
        return states, logits

    # Nodes, whose entries are pairs.

    def _observe_pairs(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        network, slots = self.network, state.slots(tokens.size(1), tokens.device)
        fused = network.fuse(hidden_states.to(network.like.dtype))
        before = torch.cat([self.last_hidden_states(state), fused[:, :-1]], dim=1)
        embedded, attention = self.embed(tokens), self._observing(state, slots) if self._last_layer else None
        keys_values = network.keys_values(embedded, before, (slots - 1).clamp(min=0), attention)
        for store, nodes in zip(self.layer_stores(state, self._last_layer), keys_values, strict=True):
            state.extend(store, nodes)
        state.extend(self.hidden_store(state), fused.unsqueeze(1))

    def _observing(self, state: KVCache, slots: Tensor) -> CachedAttention:
        """Return the attention of committed tokens to those before them, except the first of each sequence."""
        count = slots.size(1)
        within = torch.ones(len(slots), count, count, dtype=torch.bool, device=slots.device).tril()
        visible = []
        for kind in self.described.layers:
            visible.append(visible_slots(state.lengths, within, slots, kind.window))
            visible[-1][:, :, 0] &= slots == 0

        def write(layer: int, *nodes: Tensor) -> list[Tensor]:
            stores = self.layer_stores(state, layer)
            for store, new in zip(stores, nodes, strict=True):
                state.extend(store, new)
            return [state.view(store, count)[0] for store in stores]

        return CachedAttention(write, visible)

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> CopiedNodes:
        return CopiedNodes(self, state, block_size, width, window)

    def layer_stores(self, state: KVCache, layer: int) -> list[Tensor]:
        """Return keys and values `[heads, slots, D]` of a layer of pairs, for all KV slots."""
        keys, values, _ = state.stores
        return [keys[layer], values[layer]]

    def stores(self, state: KVCache) -> list[Tensor]:
        """Return keys and values of each layer in turn, as of `layer_stores`."""
        return [store for layer in range(self._last_layer + 1) for store in self.layer_stores(state, layer)]

    def copies(self, state: KVCache, skipped: int, room: int) -> list[Tensor]:
        """Return copies `[B, heads, T + room, D]` of `stores` for the KV slots from `skipped` on."""
        return [F.pad(state.view(store)[0][:, :, skipped:], (0, 0, 0, room)) for store in self.stores(state)]

    def hidden_store(self, state: KVCache) -> Tensor:
        """Return the hidden states of all KV slots, `[1, slots, H]`."""
        return state.stores[-1][0]

    def last_hidden_states(self, state: KVCache) -> Tensor:
        """Return the hidden state of each sequence's last token, `[B, 1, H]`; 0 for sequences without tokens."""
        return state.last(self.hidden_store(state))

    # Blocks, over keys and values that are made of hidden states.

    def _fuse_layers(self, network: Any) -> None:
        config, shared = self.config, {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        self.network = deepcopy(network, shared)
        attentions = []
        for layer in self.network.draft_layers:
            attentions.append(layer.self_attn)
            layer.self_attn, layer.mlp = FusedAttention(layer.self_attn, config), FusedMLP(layer.mlp)
        projections = [projection for attention in attentions for projection in (attention.k_proj, attention.v_proj)]
        self._context = joined(projections, views=False)
        self._key_scales = torch.stack([attention.k_norm.weight for attention in attentions]).unsqueeze(1)
        self._fused_bytes = self._context.nbytes
        self._fc = PackedLinear(network.fc.weight)
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._cos = self._sin = torch.empty(0)  # by position, for as many as caches have needed so far

    def _observe_context(self, state: KVCache, hidden_states: Tensor) -> None:
        config, count = self.config, hidden_states.size(1)
        normed = self.network.normed_hidden_states(hidden_states.to(self._fc.dtype))
        fused, norm = self._fc(normed), self.described.fused_norm
        both = self._context(fused if norm is None else self.network.part(norm)(fused))
        nodes_BNLKD = both.unflatten(-1, (self._last_layer + 1, 2 * config.num_key_value_heads, config.head_dim))
        keys = nodes_BNLKD[:, :, :, : config.num_key_value_heads]
        state.check_room(count)
        slots = self._slots(state, count, hidden_states.device)
        cos, sin = self._rotary(state, slots)
        keys.mul_(rms_factor(keys, config.rms_norm_eps) * self._key_scales)
        rotate_swapped(keys, cos.unsqueeze(-2), sin.unsqueeze(-2))
        [memory] = state.stores
        if len(state.starts) == 1:
            first = state.starts[0] + state.lengths[0]
            memory[:, :, first : first + count] = nodes_BNLKD[0].permute(1, 2, 0, 3)
        else:
            starts = send(torch.tensor(state.starts), slots.device)[:, None]
            # The index puts its own dimension first: [B, N, layers, heads, D].
            memory.permute(2, 0, 1, 3)[starts + slots] = nodes_BNLKD

    def block_pass(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        """Run the layers over blocks of embeddings `[B, N, H]` in the target's dtype.

        Return `[B, N, H]` after the final norm. The state does not change.
        """
        count = block.size(1)
        store, _ = state.view(state.stores[0], count)  # a copy is not written back, because a pass keeps nothing
        first = 0 if window is None else max(min(state.lengths) - window, 0)
        slots = self._slots(state, count, block.device)
        masks = {span: self._mask(state, count, span, window, first, block) for span in self._spans}
        seen = slice(first, store.size(3))
        return self._through(block, slots, self._rotary(state, slots), masks, store, seen)

    @property
    def _spans(self) -> set[tuple[bool, int | None]]:
        return {span_of(kind) for kind in self.described.layers}

    def _through(
        self,
        block: Tensor,
        slots: Tensor,
        rotary: tuple[Tensor, Tensor],
        masks: Mapping[tuple[bool, int | None], Tensor | None],
        stores: Sequence[Tensor] | Tensor,
        seen: slice,
    ) -> Tensor:
        """Run the layers over a block, and write its keys and values to `slots`. Attention reads the slots `seen`."""
        config, scale, kinds = self.config, self.config.head_dim**-0.5, self.described.layers

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            own = stores[layer]
            write_nodes(own, torch.cat([keys, values], dim=2), slots)
            keys, values = own[:, :, seen].split(config.num_key_value_heads, dim=1)
            return attend_grouped(queries, keys, values, masks[span_of(kinds[layer])], scale, causal=False)

        entries, _ = self.network.entries(block, None)
        out: Tensor = self.network.norm(self.network.through_layers(entries, *rotary, attend))
        return out

    def _slots(self, state: KVCache, count: int, device: torch.device) -> Tensor:
        """Return the KV slots of the next nodes, which equal their positions.

        The shape is `[N]` if all sequences have the same positions, else `[B, N]`.
        """
        start = state.lengths[0]
        if all(length == start for length in state.lengths):
            return torch.arange(start, start + count, device=device)
        return state.slots(count, device)

    def _mask(
        self, state: KVCache, count: int, span: tuple[bool, int | None], window: int | None, first: int, like: Tensor
    ) -> Tensor | None:
        """Return the attention mask over the KV slots from `first` on, or None if nothing is masked."""
        lengths, device = state.lengths, like.device
        if min(lengths) == max(lengths) and span == (False, None):
            return None
        visible = self._visible(lengths, state.slots(count, device), span)
        if window is not None:
            starts = send(torch.tensor(lengths), device)[:, None, None]
            visible = visible & (torch.arange(visible.size(2), device=device) >= starts - window)
        return grouped_mask(visible[:, :, first:], self._group, like.dtype)

    def _visible(
        self, lengths: Sequence[int] | Tensor, slots: Tensor, span: tuple[bool, int | None], total: int | None = None
    ) -> Tensor:
        """Return the attention mask `[B, N, total]` of blocks at the KV slots `[B, N]`, as in `visible_slots`."""
        causal, window = span
        within = torch.ones(*slots.shape, slots.size(1), dtype=torch.bool, device=slots.device)
        return visible_slots(lengths, within.tril() if causal else within, slots, window, total)

    def _rotary(self, state: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of the KV slots, each `[N, 1, D]` or `[B, N, 1, D]`."""
        if len(self._cos) < state.capacity:
            self._cos, self._sin = self._angles(torch.arange(max(state.capacity, ANGLES), device=slots.device))
        if slots.ndim == 1:
            part = slice(state.lengths[0], state.lengths[0] + len(slots))
            return self._cos[part], self._sin[part]
        return self._cos[slots], self._sin[slots]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of positions `[..., N]`, each `[..., N, 1, D]`."""
        cos, sin = self.network.angles(positions, self._fc.weight.dtype)
        sin[..., : sin.size(-1) // 2].neg_()
        return cos.unsqueeze(-2), sin.unsqueeze(-2)


class CopiedNodes:
    """`DraftNodes` in a copy of the sequences' keys and values, which lives as long as the draft."""

    def __init__(self, run: TorchDraftRunner, state: KVCache, block_size: int, width: int, window: int | None) -> None:
        self._run, lengths = run, state.lengths
        window = max(lengths) if window is None else window
        skipped, self.room = max(min(lengths) - window, 0), 1 + width * (block_size - 2)
        self._hidden_state, self._copies = run.last_hidden_states(state), run.copies(state, skipped, self.room)
        device = self._hidden_state.device
        self._lengths = send(torch.tensor(lengths), device)[:, None]
        self._slots = torch.arange(skipped, max(lengths), device=device)
        self._known = (self._slots >= (self._lengths - window).clamp(min=1)) & (self._slots < self._lengths)  # [B, T]
        self._depths: list[int] = []  # of all nodes
        # Nodes of the draft that each node of the last call attends to, `[B, N, M]` bool.
        self._within = torch.ones(len(lengths), 0, 0, dtype=torch.bool, device=device)

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        network, kinds, (batch, count) = self._run.network, self._run.described.layers, tokens.shape
        within, hidden_state = self._within, self._hidden_state
        if parents is not None:
            within, hidden_state = picked(within, parents), picked(hidden_state, parents)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        self._within = within = torch.cat([within.expand(-1, count, -1), own], dim=2) if self._depths else own
        visible = torch.cat([self._known.unsqueeze(1).expand(-1, count, -1), within], dim=2)
        begin, depth = len(self._slots) + len(self._depths), self._depths[-1] + 1 if self._depths else 0
        self._depths += [depth] * count
        end, self.room = begin + count, self.room - count

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            of_keys, of_values = self._copies[2 * layer : 2 * layer + 2]
            of_keys[:, :, begin:end], of_values[:, :, begin:end] = keys, values
            return of_keys[:, :, :end], of_values[:, :, :end]

        seen = [visible & self._near(kind.window, depth) if kind.window else visible for kind in kinds]
        positions = (self._lengths - 1 + depth).clamp(min=0).expand(-1, count)
        hidden = network(self._run.embed(tokens), positions, CachedAttention(write, seen), hidden_state)
        self._hidden_state = network.fed_on(hidden)
        mark(PASS)
        logits: Tensor = network.logits(hidden, self._run.head)
        mark(HEAD)
        return logits

    def _near(self, window: int, depth: int) -> Tensor:
        """Return which KV slots and nodes are less than `window` positions before nodes of a depth, `[B, 1, T + M]`."""
        slots = self._slots > self._lengths + depth - window
        nodes = send(torch.tensor([depth - other < window for other in self._depths]), slots.device)
        return torch.cat([slots, nodes.expand(len(slots), -1)], dim=1).unsqueeze(1)


def span_of(kind: DraftLayerKind) -> tuple[bool, int | None]:
    """Return what distinguishes the attention masks of layers: whether they are causal, and their window."""
    return kind.causal, kind.window


def picked(nodes: Tensor, indices: Tensor) -> Tensor:
    """Return the values `[B, K, D]` of the nodes `[B, N, D]` with these indices `[B, K]` int64."""
    return nodes.gather(1, indices.unsqueeze(2).expand(-1, -1, nodes.size(2)))


def joined(projections: Sequence[nn.Linear], views: bool = True) -> PackedLinear:
    """Concatenate several projections along the output dimension.

    Args:
        views: Whether to make the projections' weights views of the concatenated weight.
    """
    weight = torch.cat([projection.weight.detach() for projection in projections])
    bias = torch.cat([p.bias.detach() for p in projections]) if projections[0].bias is not None else None
    if views:
        for projection, part in zip(projections, weight.split([p.out_features for p in projections]), strict=True):
            projection.weight.data = part
    return PackedLinear(weight, bias)
