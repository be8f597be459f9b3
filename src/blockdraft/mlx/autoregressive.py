"""Draft networks that guess a token at a time, run lazily on MLX's arrays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.mlx.cache import MLXCache
from blockdraft.mlx.tensor import MLXTensor, computing, in_mlx, mx
from blockdraft.nn.autoregressive import AutoregressivePass, CopiedNodes
from blockdraft.nn.cache import KVCache

CACHED, HIDDEN_STATES = 0, 1  # layers of the state: keys and values of entries, and features


class MLXAutoregressive(AutoregressivePass):
    """An `AutoregressiveRunner` whose state are MLX's arrays."""

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return MLXCache(batch, capacity)

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())  # MLX's copy

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        assert isinstance(state, MLXCache)
        with computing():
            fused = self.network.fuse(MLXTensor(in_mlx(hidden_states)).to(self.network.fc.weight.dtype))
            before = torch.cat([last_hidden_state(state, fused), fused[:, :-1]], dim=1)
            positions = (state.slots(tokens.size(1), tokens.device) - 1).clamp(min=0)
            keys, values = self.network.keys_values(self.embed(tokens), before, positions)
            state.extend(CACHED, in_mlx(keys), in_mlx(values))
            state.extend(HIDDEN_STATES, in_mlx(fused.unsqueeze(1)))

    def chain(self, *given: object, **options: object) -> None:
        return None

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> MLXNodes:
        return MLXNodes(self, state, block_size, width, window)


class MLXNodes(CopiedNodes):
    """As `CopiedNodes`, in arrays of MLX."""

    def __init__(self, run: MLXAutoregressive, state: KVCache, block_size: int, width: int, window: int | None) -> None:
        assert isinstance(state, MLXCache)
        self._run, self._depth, longest = run, 0, max(state.lengths)
        window = longest if window is None else window
        skipped, self.room = max(min(state.lengths) - window, 0), 1 + width * (block_size - 2)
        with computing():
            self._hidden_state = last_hidden_state(state)
            texts = [MLXTensor(each) for each in state.read(CACHED, 0, skipped)]
            self._keys, self._values = (F.pad(text, (0, 0, 0, self.room)) for text in texts)
        lengths, slots = torch.tensor(state.lengths)[:, None], torch.arange(skipped, longest)
        self._known = (slots >= (lengths - window).clamp(min=1)) & (slots < lengths)
        self._positions, self._end = lengths - 1, len(slots)
        self._within = torch.ones(len(state.rows), 0, 0, dtype=torch.bool)


def last_hidden_state(state: MLXCache, like: Tensor | None = None) -> Tensor:
    """Feature of the last token of each row, `[B, 1, H]`; 0 for rows without tokens.

    Args:
        like: Features `[B, N, H]` of the rows' next tokens, where the state may hold none yet.
    """
    if not any(state.lengths):
        assert like is not None
        return MLXTensor(mx.zeros_like(in_mlx(like)[:, :1]))
    [store] = state.layer(HIDDEN_STATES)
    last = [row + max(length - 1, 0) for row, length in zip(state.rows, state.lengths, strict=True)]
    found = in_mlx(store)[0, mx.array(last)][:, None]
    has_text = mx.array([length > 0 for length in state.lengths])[:, None, None]
    return MLXTensor(mx.where(has_text, found, mx.zeros_like(found)))
