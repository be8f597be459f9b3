"""DFlash's draft pass in MLX, and that of networks that extend DFlash's."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork, cached_bytes
from blockdraft.mlx.cache import MLXCache
from blockdraft.mlx.tensor import Array, MLXTensor, computing, in_mlx, mx
from blockdraft.nn.attention import visible_slots
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.nn.draft_layer import DraftLayer
from blockdraft.nn.layers import rotate
from blockdraft.timing import PASS, mark


class MLXDraftPass:
    """A `DraftRunner` that runs the network itself on MLX's arrays, lazily.

    Args:
        network: Network in the target's dtype.
        embed, head: The target's, or a head of the drafter's own.
    """

    compile_reason: str | None = None
    bits = cycle = None

    def __init__(
        self, network: DFlashNetwork, embed: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor]
    ) -> None:
        self.network, self.config, self._embed, self._head = network, network.config, embed, head

    def new_state(self, batch: int, capacity: int) -> MLXCache:
        return MLXCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return cached_bytes(self.config, batch * capacity, self.network.fc.weight.dtype)

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())  # MLX's copy

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def observe(self, state: MLXCache, hidden_states: Tensor) -> None:
        """Write the keys and values of committed tokens, whose features pass through `fc` and `hidden_norm` only."""
        network, size = self.network, self.config.head_dim
        with computing():
            hidden_states = MLXTensor(in_mlx(hidden_states)).to(network.fc.weight.dtype)
            context, angles = network.hidden_norm(network.fc(hidden_states)), self._angles(state, hidden_states.size(1))
            for number, layer in enumerate(network.layers):
                own = cast(DraftLayer, layer).self_attn
                keys = rotate(own.k_norm(own.k_proj(context).unflatten(-1, (-1, size))), *angles)
                values = own.v_proj(context).unflatten(-1, (-1, size))
                state.extend(number, *(in_mlx(each.transpose(1, 2)) for each in (keys, values)))

    def draft_tokens(
        self, state: MLXCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `DraftRunner.draft_tokens`."""
        hidden = self(state, self._embed(tokens), window)[:, first:]
        mark(PASS)
        return hidden, self._head(hidden)

    def __call__(self, state: MLXCache, block: Tensor, window: int | None = None) -> Tensor:
        """As `DraftRunner.__call__`."""
        config, count = self.config, block.size(1)
        begin = 0 if window is None else max(min(state.lengths) - window, 0)
        masks = {kind: self._mask(state, count, kind, window, begin) for kind in set(config.layers)}

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            joined = [in_mlx(keys), in_mlx(values)]
            if max(state.lengths):
                read = state.read(layer, 0, begin)
                joined = [mx.concatenate(both, axis=2) for both in zip(read, joined, strict=True)]
            mask = masks[config.layers[layer]]
            out = mx.fast.scaled_dot_product_attention(in_mlx(queries), *joined, scale=config.head_dim**-0.5, mask=mask)
            return MLXTensor(out)

        with computing():
            block, (cos, sin) = MLXTensor(in_mlx(block)), self._angles(state, count)
            return self.network.through_layers(block, cos, sin, attend)

    def _angles(self, state: MLXCache, count: int) -> list[Tensor]:
        positions = torch.tensor(state.lengths)[:, None] + torch.arange(count)
        angles = self.network.angles(positions, self.network.fc.weight.dtype)
        return [MLXTensor(in_mlx(each)) for each in angles]

    def _mask(self, state: MLXCache, count: int, kind: LayerAttention, window: int | None, begin: int) -> Array | None:
        """Mask `[B, 1, N, T]` over the rows' slots from `begin` on and the block; None where all are seen."""
        lengths, longest = state.lengths, max(state.lengths)
        if min(lengths) == longest and not kind.causal and kind.window is None:
            return None
        within = torch.ones(len(lengths), count, count, dtype=torch.bool)
        starts = torch.tensor(lengths)[:, None]
        positions = starts + torch.arange(count)
        seen = visible_slots(lengths, within.tril() if kind.causal else within, positions, kind.window)
        # Behind a row's committed tokens lies its block; in the arrays the block stands behind the longest row.
        slots = torch.arange(longest).expand(len(lengths), -1)
        known = seen[:, :, :longest] & (slots < starts)[:, None]
        if window is not None:
            known = known & (slots >= starts - window)[:, None]
        block = seen.gather(2, positions[:, None].expand(-1, count, -1))
        with computing():
            return mx.array(torch.cat([known[:, :, begin:], block], dim=2)[:, None].numpy())


RUNNERS = {DFlashNetwork: MLXDraftPass}
