"""The draft network as decoding runs it: the same weights in fewer and larger operations.

On a CPU an operation on a few rows costs more than its arithmetic, and so does its launch on a GPU. So queries, keys
and values come from one product, gate and up from another, queries and keys are normed and rotated together where they
lie, and the keys and values of all layers stand in one tensor of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.machine import send
from blockdraft.nn.attention import attend_grouped, grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, write_nodes
from blockdraft.nn.dflash import Attend, DFlashNetwork, DraftAttention, DraftLayer
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.layers import GatedMLP, rms_factor, rotate_swapped
from blockdraft.nn.packed import PackedLinear
from blockdraft.timing import PASS, mark

ANGLES = 1024  # positions whose angles are computed at least


class FusedAttention(nn.Module):
    """A `DraftAttention` whose `attend` gets the block's heads as `[B, N, heads, D]`, keys before values."""

    def __init__(self, plain: DraftAttention, config: DraftConfig) -> None:
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


class DraftPass:
    """Draft passes over a cache, and the context that they read.

    Args:
        network: Of any kind of the family, on its device and in its dtype. Its projections become views of the joined
            ones, so that their memory is not taken twice; its weights must not be replaced afterwards.
        embed: Of tokens `[B, N]`.
        head: Of hidden states.
        compile_reason: Why it is not compiled, where it might have been.
    """

    @torch.no_grad()
    def __init__(
        self,
        network: DFlashNetwork,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        compile_reason: str | None = None,
    ) -> None:
        self._embed, self._head, self.compile_reason = embed, head, compile_reason
        self.config = config = network.config
        shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        self.network = deepcopy(network, shared)
        attentions = []
        for layer in cast("list[DraftLayer]", list(self.network.layers)):
            attentions.append(layer.self_attn)
            layer.self_attn = FusedAttention(layer.self_attn, config)  # type: ignore[assignment]
            layer.mlp = FusedMLP(layer.mlp)  # type: ignore[assignment]
        projections = [projection for each in attentions for projection in (each.k_proj, each.v_proj)]
        self._context = joined(projections, views=False)
        self._key_scales = torch.stack([each.k_norm.weight for each in attentions]).unsqueeze(1)
        self._features = PackedLinear(network.fc.weight)
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._cos = self._sin = torch.empty(0)  # by position, of as many as a cache has needed so far

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return cached_bytes(self.config, batch * capacity, self._features.dtype)

    def weight_bytes(self) -> int:
        return self._context.nbytes

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def observe(self, state: KVCache, features: Tensor) -> None:
        """Write the keys and values of committed tokens, as nodes that are yet to be committed.

        Context rows go through `fc` and `hidden_norm` only: no input norm, no query, no MLP.

        Args:
            features: `[B, N, m * H]` of the tapped target layers.
        """
        config, count = self.config, features.size(1)
        features = features.to(self._features.dtype)
        both = self._context(self.network.hidden_norm(self._features(features)))
        shape = (config.num_hidden_layers, 2 * config.num_key_value_heads, config.head_dim)
        nodes_BNLKD = both.unflatten(-1, shape)
        keys = nodes_BNLKD[:, :, :, : config.num_key_value_heads]
        state.check_room(count)
        slots = self._slots(state, count, features.device)
        cos, sin = self._rotary(state, slots)
        keys.mul_(rms_factor(keys, config.rms_norm_eps) * self._key_scales)
        rotate_swapped(keys, cos.unsqueeze(-2), sin.unsqueeze(-2))
        memory = self._memory(state)
        if len(state.rows) == 1:
            first = state.rows[0] + state.lengths[0]
            memory[:, :, first : first + count] = nodes_BNLKD[0].permute(1, 2, 0, 3)
        else:
            starts = send(torch.tensor(state.rows), slots.device)[:, None]
            # Index first, so that dimension comes first: [B, N, layers, heads, D].
            memory.permute(2, 0, 1, 3)[starts + slots] = nodes_BNLKD

    def guesses(self, state: KVCache, tokens: Tensor, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """As `DraftRunner.guesses` of a target."""
        hidden = self(state, self._embed(tokens), window)[:, first:]
        mark(PASS)
        return hidden, self._head(hidden)

    def __call__(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        """One parallel pass over a block behind each row's context; it leaves no trace.

        Args:
            block: `[B, N, H]`, embedded `[anchor, mask, mask, ...]`.
            window: Committed tokens of each row that are looked at, the last ones; None is all of them.

        Returns:
            `[B, N, H]`, as `DFlashNetwork.forward`.
        """
        count = block.size(1)
        store, _ = state.view(self._memory(state), count)  # of a copy nothing has to be kept: a pass leaves no trace
        first = 0 if window is None else max(min(state.lengths) - window, 0)
        slots = self._slots(state, count, block.device)
        masks = {kind: self._mask(state, count, kind, window, first, block) for kind in set(self.config.layers)}
        seen = slice(first, store.size(3))
        return self._through(block, slots, self._rotary(state, slots), masks, store, seen)

    def _through(
        self,
        block: Tensor,
        slots: Tensor,
        rotary: tuple[Tensor, Tensor],
        masks: Mapping[LayerAttention, Tensor | None],
        store: Tensor,
        seen: slice,
    ) -> Tensor:
        """The layers over a block that is written to these slots; attention reads the slots `seen`."""
        config, scale = self.config, self.config.head_dim**-0.5

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            write_nodes(store[layer], torch.cat([keys, values], dim=2), slots)
            keys, values = store[layer, :, :, seen].split(config.num_key_value_heads, dim=1)
            return attend_grouped(queries, keys, values, masks[config.layers[layer]], scale, causal=False)

        return self.network.through_layers(block, *rotary, attend)

    def _memory(self, state: KVCache) -> Tensor:
        config = self.config
        return state.memory(
            config.num_hidden_layers, 2 * config.num_key_value_heads, config.head_dim, self._features.weight
        )

    def _slots(self, state: KVCache, count: int, device: torch.device) -> Tensor:
        """Slots of the next nodes, which are their positions: `[N]` where the rows share them, else `[B, N]`."""
        start = state.lengths[0]
        if all(length == start for length in state.lengths):
            return torch.arange(start, start + count, device=device)
        return state.slots(count, device)

    def _mask(
        self, state: KVCache, count: int, kind: LayerAttention, window: int | None, first: int, like: Tensor
    ) -> Tensor | None:
        """Who sees whom, from the slot `first` on; None where everyone sees everything from there on."""
        lengths, device = state.lengths, like.device
        if min(lengths) == max(lengths) and not kind.causal and kind.window is None:
            return None
        visible = self._visible(lengths, state.slots(count, device), kind)
        if window is not None:
            starts = send(torch.tensor(lengths), device)[:, None, None]
            visible = visible & (torch.arange(visible.size(2), device=device) >= starts - window)
        return grouped_mask(visible[:, :, first:], self._group, like.dtype)

    def _visible(
        self, lengths: Sequence[int] | Tensor, slots: Tensor, kind: LayerAttention, total: int | None = None
    ) -> Tensor:
        """Who sees whom, `[B, N, total]`, as in `visible_slots`, of blocks at these slots `[B, N]`."""
        within = torch.ones(*slots.shape, slots.size(1), dtype=torch.bool, device=slots.device)
        return visible_slots(lengths, within.tril() if kind.causal else within, slots, kind.window, total)

    def _rotary(self, state: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of the slots, each `[N, 1, D]` or `[B, N, 1, D]`."""
        if len(self._cos) < state.capacity:
            self._cos, self._sin = self._angles(torch.arange(max(state.capacity, ANGLES), device=slots.device))
        if slots.ndim == 1:
            part = slice(state.lengths[0], state.lengths[0] + len(slots))
            return self._cos[part], self._sin[part]
        return self._cos[slots], self._sin[slots]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions `[..., N]`, each `[..., N, 1, D]`."""
        cos, sin = self.network.angles(positions, self._features.weight.dtype)
        sin[..., : sin.size(-1) // 2].neg_()
        return cos.unsqueeze(-2), sin.unsqueeze(-2)


def cached_bytes(config: DraftConfig, slots: int, dtype: torch.dtype) -> int:
    """Memory of keys and values of all layers of a draft network."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * slots * dtype.itemsize


def joined(projections: Sequence[nn.Linear], views: bool = True) -> PackedLinear:
    """One projection to the outputs of several, side by side.

    Args:
        views: Make the weights of the several ones views of the one's.
    """
    weight = torch.cat([projection.weight.detach() for projection in projections])
    bias = torch.cat([p.bias.detach() for p in projections]) if projections[0].bias is not None else None
    if views:
        for projection, part in zip(projections, weight.split([p.out_features for p in projections]), strict=True):
            projection.weight.data = part
    return PackedLinear(weight, bias)
