"""The DFlash draft network (arXiv 2602.06036): a few layers that read a target's hidden states as keys and values.

Training runs `DFlashNetwork`. Decoding runs `DraftPass`, with the same weights in fewer and larger operations: for a
few tokens, the overhead of an operation on a CPU, or of its launch on a GPU, exceeds the arithmetic. `DraftPass`
computes queries, keys and values in one product, and gate and up in another. It norms and rotates queries and keys in
place, and keeps the keys and values of all layers in one tensor of the cache. A test checks that both agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.machine import send
from blockdraft.nn.attention import attend_grouped, grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, write_nodes
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.draft_network import Attend, DraftAttention, DraftHost, DraftLayer, DraftNetwork, NetworkRunner
from blockdraft.nn.layers import GatedMLP, RMSNorm, rms_factor, rotate, rotate_swapped
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.rotary import Rotary
from blockdraft.timing import PASS, mark

ANGLES = 1024  # minimum number of positions for which angles are computed at once


class DFlashNetwork(DraftNetwork):
    """Draft layers, `fc` and norms. Embedding and head are the target's.

    Parameter names equal the tensor names of z-lab's checkpoints, so `state_dict` is the checkpoint.

    Attributes:
        config_class: Class of its configuration, to be set by subclasses.
        layer_class: Class of its layers, likewise.
    """

    architecture: ClassVar[str | None] = "dflash"
    config_class: type[DraftConfig] = DraftConfig
    layer_class: type[DraftLayer] = DraftLayer

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)

    def runner(self, host: DraftHost) -> DraftRunner:
        return DraftPass(self, host)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions `[B, N]`, each `[B, N, D]`."""
        return self._rotary(positions, dtype)

    def context(self, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all layers for committed tokens, in one product.

        Hidden states of context tokens pass through `fc` and `hidden_norm` only: no input norm, no query, no MLP.

        Args:
            hidden_states: `[B, N, m * H]`, hidden states of the m target layers.
            positions: `[B, N]`, absolute.

        Returns:
            Keys and values, each `[layers, B, kv_heads, N, D]`, keys normed and rotated.
        """
        config, attentions = self.config, [cast(DraftLayer, layer).self_attn for layer in self.layers]
        projections = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        weight = torch.cat([p.weight for p in projections])
        scales = torch.stack([a.k_norm.weight for a in attentions])
        bias = torch.cat([p.bias for p in projections]) if config.attention_bias else None
        both = F.linear(self.hidden_norm(self.fc(hidden_states)), weight, bias)
        shape = (2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        keys, values = both.unflatten(-1, shape).unbind(dim=2)  # [B, N, layers, kv_heads, D]
        keys = F.rms_norm(keys, (config.head_dim,), eps=config.rms_norm_eps) * scales[:, None, :]
        cos, sin = self.angles(positions, keys.dtype)
        keys = rotate(keys, cos.unsqueeze(2), sin.unsqueeze(2))
        return keys.permute(2, 0, 3, 1, 4), values.permute(2, 0, 3, 1, 4)

    def forward(self, block: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over blocks, all positions of a block in parallel.

        Args:
            block: `[B, N, H]`, embedded `[anchor, mask, mask, ...]`.
            positions: `[B, N]`, absolute.
            attend: Attention of a layer's block over context and block.

        Returns:
            `[B, N, H]` after the final norm; position j belongs to the token at anchor + j, and position 0 is unused.
        """
        return self.through_layers(block, *self.angles(positions, block.dtype), attend)

    def through_layers(self, block: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run all layers as in `forward`, given the angles in the form of the layers."""
        scale = self.config.input_embedding_scale
        x = block if scale == 1 else block * scale
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, index, attend)
        out: Tensor = self.norm(x)
        return out

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """Apply the checkpoint's scale and soft-cap, if any, to logits of the target's head."""
        factor = self.config.output_multiplier
        logits = logits if factor == 1 else logits * factor
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class DraftRunner(NetworkRunner, Protocol):
    """Runs a draft network that reads the target's hidden states."""

    def observe(self, state: Any, hidden_states: Tensor) -> None:
        """Write the keys and values of hidden states `[B, N, m * H]` behind those of each sequence.

        `state.commit` decides which of them stay.
        """

    def __call__(self, state: Any, block: Tensor, window: int | None = None) -> Tensor:
        """Run one pass over blocks of embeddings `[B, N, H]` in the target's dtype.

        Return `[B, N, H]` after the final norm. The state does not change.
        """

    def draft_tokens(self, state: Any, tokens: Tensor, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Run one pass over blocks of tokens, and the head on its output.

        Args:
            tokens: `[B, N]` int64, `[anchor, mask, mask, ...]`.
            first: First position of a block whose logits are needed.
            window: Number of each sequence's last committed tokens that attention reads; None is all.

        Returns:
            Hidden states `[B, N - first, H]` and logits `[B, N - first, V]`.
        """


class FusedAttention(nn.Module):
    """`DraftAttention` that passes heads as `[B, N, heads, D]` to `attend`."""

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


class DraftPass(DraftRunner):
    """Runs draft passes over a cache, and writes the context that they read.

    Args:
        network: Network of the DFlash family, on the host's device and in its dtype. Its projections become views of
            the fused ones, to save memory; do not replace its weights afterwards.
    """

    @torch.no_grad()
    def __init__(self, network: DFlashNetwork, host: DraftHost) -> None:
        self._embed, self._head, self.compile_reason = host.embed, host.head, host.compile_reason
        self.config = config = network.config
        shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        self.network = deepcopy(network, shared)
        attentions = []
        for layer in cast("list[DraftLayer]", list(self.network.layers)):
            attentions.append(layer.self_attn)
            layer.self_attn = FusedAttention(layer.self_attn, config)  # type: ignore[assignment]
            layer.mlp = FusedMLP(layer.mlp)  # type: ignore[assignment]
        projections = [projection for attention in attentions for projection in (attention.k_proj, attention.v_proj)]
        self._context = joined(projections, views=False)
        self._key_scales = torch.stack([attention.k_norm.weight for attention in attentions]).unsqueeze(1)
        self._fc = PackedLinear(network.fc.weight)
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._cos = self._sin = torch.empty(0)  # by position, for as many as caches have needed so far

    def state_bytes(self, batch: int, capacity: int) -> int:
        return cached_bytes(self.config, batch * capacity, self._fc.dtype)

    def weight_bytes(self) -> int:
        return self._context.nbytes

    def observe(self, state: KVCache, hidden_states: Tensor) -> None:
        """As `DraftRunner.observe`. Hidden states of context tokens pass through `fc` and `hidden_norm` only."""
        config, count = self.config, hidden_states.size(1)
        hidden_states = hidden_states.to(self._fc.dtype)
        both = self._context(self.network.hidden_norm(self._fc(hidden_states)))
        shape = (config.num_hidden_layers, 2 * config.num_key_value_heads, config.head_dim)
        nodes_BNLKD = both.unflatten(-1, shape)
        keys = nodes_BNLKD[:, :, :, : config.num_key_value_heads]
        state.check_room(count)
        slots = self._slots(state, count, hidden_states.device)
        cos, sin = self._rotary(state, slots)
        keys.mul_(rms_factor(keys, config.rms_norm_eps) * self._key_scales)
        rotate_swapped(keys, cos.unsqueeze(-2), sin.unsqueeze(-2))
        memory = self._memory(state)
        if len(state.starts) == 1:
            first = state.starts[0] + state.lengths[0]
            memory[:, :, first : first + count] = nodes_BNLKD[0].permute(1, 2, 0, 3)
        else:
            starts = send(torch.tensor(state.starts), slots.device)[:, None]
            # The index puts its own dimension first: [B, N, layers, heads, D].
            memory.permute(2, 0, 1, 3)[starts + slots] = nodes_BNLKD

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden = self(state, self._embed(tokens), window)[:, first:]
        mark(PASS)
        return hidden, self._head(hidden)

    def __call__(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        count = block.size(1)
        store, _ = state.view(self._memory(state), count)  # a copy is not written back, because a pass keeps nothing
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
        stores: Sequence[Tensor] | Tensor,
        seen: slice,
    ) -> Tensor:
        """Run the layers over a block, and write its keys and values to `slots`. Attention reads the slots `seen`."""
        config, scale = self.config, self.config.head_dim**-0.5

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            own = stores[layer]
            write_nodes(own, torch.cat([keys, values], dim=2), slots)
            keys, values = own[:, :, seen].split(config.num_key_value_heads, dim=1)
            return attend_grouped(queries, keys, values, masks[config.layers[layer]], scale, causal=False)

        return self.network.through_layers(block, *rotary, attend)

    def _memory(self, state: KVCache) -> Tensor:
        config = self.config
        return state.memory(config.num_hidden_layers, 2 * config.num_key_value_heads, config.head_dim, self._fc.weight)

    def _slots(self, state: KVCache, count: int, device: torch.device) -> Tensor:
        """Return the KV slots of the next nodes, which equal their positions.

        The shape is `[N]` if all sequences have the same positions, else `[B, N]`.
        """
        start = state.lengths[0]
        if all(length == start for length in state.lengths):
            return torch.arange(start, start + count, device=device)
        return state.slots(count, device)

    def _mask(
        self, state: KVCache, count: int, kind: LayerAttention, window: int | None, first: int, like: Tensor
    ) -> Tensor | None:
        """Return the attention mask over the KV slots from `first` on, or None if nothing is masked."""
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
        """Return the attention mask `[B, N, total]` of blocks at the KV slots `[B, N]`, as in `visible_slots`."""
        within = torch.ones(*slots.shape, slots.size(1), dtype=torch.bool, device=slots.device)
        return visible_slots(lengths, within.tril() if kind.causal else within, slots, kind.window, total)

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


def cached_bytes(config: DraftConfig, slots: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of all layers of a draft network."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * slots * dtype.itemsize


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
