"""Draft networks in MLX: those of torch, run lazily on MLX arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.nn.attention import visible_slots
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_network import DraftNetwork
from blockdraft.nn.layers import rotate
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft_mlx.cache import MLXCache
from blockdraft_mlx.tensor import Array, MLXTensor, computing, in_mlx, mx

# Of `DraftDescription.kinds`.
KNOWN = frozenset(
    (
        "heads",
        "pairs",
        "whole blocks",
        "sliding windows",
        "convolutions",
        "several layers of pairs",
        "contexts without a norm",
    )
)


class MLXDraftRunner(TorchDraftRunner):
    """A `TorchDraftRunner` whose state is an `MLXCache`, and whose operations extend MLX's graph.

    Args:
        network: Network in the target's dtype.
    """

    def _fuse_layers(self, network: DraftNetwork) -> None:
        """Leave the layers as they are: arrays of MLX are not written in place."""

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return MLXCache(batch, capacity)

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())  # MLX's copy

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        with computing():
            super().observe(state, tokens, MLXTensor(in_mlx(hidden_states)))

    def _observe_context(self, state: KVCache, hidden_states: Tensor) -> None:
        network, size = self.network, self.config.head_dim
        context = network.fuse(hidden_states.to(self.dtype))
        angles = self._angles_behind(state, hidden_states.size(1))
        for number, layer in enumerate(network.draft_layers):
            attention = layer.self_attn
            keys = rotate(attention.k_norm(attention.k_proj(context).unflatten(-1, (-1, size))), *angles)
            values = attention.v_proj(context).unflatten(-1, (-1, size))
            for store, nodes in zip(self.layer_stores(state, number), (keys, values), strict=True):
                state.extend(store, nodes.transpose(1, 2))

    def block_pass(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        config, kinds, count = self.config, self.described.layers, block.size(1)
        begin = 0 if window is None else max(min(state.lengths) - window, 0)
        masks = {span: self._block_mask(state, count, span, window, begin) for span in self._spans}

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            joined = [in_mlx(keys), in_mlx(values)]
            if max(state.lengths):
                context = [in_mlx(state.view(store)[0])[:, :, begin:] for store in self.layer_stores(state, layer)]
                joined = [mx.concatenate(both, axis=2) for both in zip(context, joined, strict=True)]
            kind, scale = kinds[layer], config.head_dim**-0.5
            mask = masks[kind.causal, kind.window]
            return MLXTensor(mx.fast.scaled_dot_product_attention(in_mlx(queries), *joined, scale=scale, mask=mask))

        with computing():
            entries, _ = self.network.entries(MLXTensor(in_mlx(block)), None)
            out = self.network.through_layers(entries, *self._angles_behind(state, count), attend)
            normed: Tensor = self.network.norm(out)
            return normed

    def layer_stores(self, state: KVCache, layer: int) -> list[Tensor]:
        return state.layer(layer, *(self._empty(heads, size) for heads, size in self.network.cached))

    def hidden_store(self, state: KVCache) -> Tensor:
        return state.layer(len(self.described.layers), self._empty(1, self.config.hidden_size))[0]

    def _empty(self, heads: int, size: int) -> Tensor:
        return MLXTensor(in_mlx(torch.empty(1, heads, 1, size, dtype=self.dtype)))

    def _angles_behind(self, state: KVCache, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions of the next nodes, `[B, N, D]` each."""
        cos, sin = self.network.angles(state.slots(count, torch.device("cpu")), self.dtype)
        return MLXTensor(in_mlx(cos)), MLXTensor(in_mlx(sin))

    def _block_mask(
        self, state: KVCache, count: int, span: tuple[bool, int | None], window: int | None, begin: int
    ) -> Array | None:
        """Return the mask `[B, 1, N, T]` over KV slots from `begin` on and the block; None if it would hide nothing."""
        lengths, longest = state.lengths, max(state.lengths)
        if min(lengths) == longest and span == (False, None):
            return None
        causal, kind_window = span
        within = torch.ones(len(lengths), count, count, dtype=torch.bool)
        starts = torch.tensor(lengths)[:, None]
        positions = starts + torch.arange(count)
        visible = visible_slots(lengths, within.tril() if causal else within, positions, kind_window)
        # In `visible` a block follows its own sequence; in the arrays all blocks follow the longest sequence.
        slots = torch.arange(longest).expand(len(lengths), -1)
        committed = visible[:, :, :longest] & (slots < starts)[:, None]
        if window is not None:
            committed = committed & (slots >= starts - window)[:, None]
        block = visible.gather(2, positions[:, None].expand(-1, count, -1))
        with computing():
            return mx.array(torch.cat([committed[:, :, begin:], block], dim=2)[:, None].numpy())
