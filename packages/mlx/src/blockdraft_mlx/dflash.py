"""DFlash's draft pass in MLX, also for networks that extend DFlash's."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork, cached_bytes
from blockdraft.nn.attention import visible_slots
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.nn.draft_network import DraftHost, DraftLayer
from blockdraft.nn.layers import rotate
from blockdraft.timing import PASS, mark
from blockdraft_mlx.cache import MLXCache
from blockdraft_mlx.tensor import Array, MLXTensor, computing, in_mlx, mx


class MLXDraftPass:
    """A `DraftRunner` that runs the torch network on MLX arrays, lazily.

    Args:
        network: Network in the target's dtype.
    """

    compile_reason: str | None = None
    bits = None

    def __init__(self, network: DFlashNetwork, host: DraftHost) -> None:
        self.network, self.config, self._embed, self._head = network, network.config, host.embed, host.head

    def new_state(self, batch: int, capacity: int) -> MLXCache:
        return MLXCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return cached_bytes(self.config, batch * capacity, self.network.fc.weight.dtype)

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())  # MLX's copy

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def observe(self, state: MLXCache, hidden_states: Tensor) -> None:
        """Write keys and values of committed tokens, whose hidden states pass through `fc` and `hidden_norm` only."""
        network, size = self.network, self.config.head_dim
        with computing():
            hidden_states = MLXTensor(in_mlx(hidden_states)).to(network.fc.weight.dtype)
            context, angles = network.hidden_norm(network.fc(hidden_states)), self._angles(state, hidden_states.size(1))
            for number, layer in enumerate(network.layers):
                attention = cast(DraftLayer, layer).self_attn
                keys = rotate(attention.k_norm(attention.k_proj(context).unflatten(-1, (-1, size))), *angles)
                values = attention.v_proj(context).unflatten(-1, (-1, size))
                state.extend(number, *(in_mlx(x.transpose(1, 2)) for x in (keys, values)))

    def draft_tokens(
        self, state: MLXCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden = self(state, self._embed(tokens), window)[:, first:]
        mark(PASS)
        return hidden, self._head(hidden)

    def __call__(self, state: MLXCache, block: Tensor, window: int | None = None) -> Tensor:
        config, count = self.config, block.size(1)
        begin = 0 if window is None else max(min(state.lengths) - window, 0)
        masks = {kind: self._mask(state, count, kind, window, begin) for kind in set(config.layers)}

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            joined = [in_mlx(keys), in_mlx(values)]
            if max(state.lengths):
                context = state.read(layer, 0, begin)
                joined = [mx.concatenate(both, axis=2) for both in zip(context, joined, strict=True)]
            mask = masks[config.layers[layer]]
            out = mx.fast.scaled_dot_product_attention(in_mlx(queries), *joined, scale=config.head_dim**-0.5, mask=mask)
            return MLXTensor(out)

        with computing():
            return self.network.through_layers(MLXTensor(in_mlx(block)), *self._angles(state, count), attend)

    def _angles(self, state: MLXCache, count: int) -> tuple[Tensor, Tensor]:
        positions = torch.tensor(state.lengths)[:, None] + torch.arange(count)
        cos, sin = self.network.angles(positions, self.network.fc.weight.dtype)
        return MLXTensor(in_mlx(cos)), MLXTensor(in_mlx(sin))

    def _mask(self, state: MLXCache, count: int, kind: LayerAttention, window: int | None, begin: int) -> Array | None:
        """Return the mask `[B, 1, N, T]` over KV slots from `begin` on and the block; None if it would hide nothing."""
        lengths, longest = state.lengths, max(state.lengths)
        if min(lengths) == longest and not kind.causal and kind.window is None:
            return None
        within = torch.ones(len(lengths), count, count, dtype=torch.bool)
        starts = torch.tensor(lengths)[:, None]
        positions = starts + torch.arange(count)
        visible = visible_slots(lengths, within.tril() if kind.causal else within, positions, kind.window)
        # In `visible` a block follows its own sequence; in the arrays all blocks follow the longest sequence.
        slots = torch.arange(longest).expand(len(lengths), -1)
        committed = visible[:, :, :longest] & (slots < starts)[:, None]
        if window is not None:
            committed = committed & (slots >= starts - window)[:, None]
        block = visible.gather(2, positions[:, None].expand(-1, count, -1))
        with computing():
            return mx.array(torch.cat([committed[:, :, begin:], block], dim=2)[:, None].numpy())
