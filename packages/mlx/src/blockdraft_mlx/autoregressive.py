"""Draft networks that predict one token at a time, run lazily in MLX."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.nn.autoregressive import AutoregressivePass, CopiedNodes
from blockdraft.nn.cache import KVCache
from blockdraft_mlx.cache import MLXCache
from blockdraft_mlx.tensor import MLXTensor, computing, in_mlx, mx

KEYS_VALUES, HIDDEN = 0, 1  # layers of the state: keys and values of entries, and fused hidden states


class MLXAutoregressive(AutoregressivePass):
    """An `AutoregressiveRunner` whose state is an `MLXCache`."""

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return MLXCache(batch, capacity)

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())  # MLX's copy

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        assert isinstance(state, MLXCache)
        with computing():
            fused = self.network.fuse(MLXTensor(in_mlx(hidden_states)).to(self.network.like.dtype))
            before = torch.cat([last_hidden(state, fused), fused[:, :-1]], dim=1)
            positions = (state.slots(tokens.size(1), tokens.device) - 1).clamp(min=0)
            keys, values = self.network.keys_values(self.embed(tokens), before, positions)
            state.extend(KEYS_VALUES, in_mlx(keys), in_mlx(values))
            state.extend(HIDDEN, in_mlx(fused.unsqueeze(1)))

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> MLXNodes:
        return MLXNodes(self, state, block_size, width, window)


class MLXNodes(CopiedNodes):
    """`CopiedNodes` in MLX arrays."""

    def __init__(self, run: MLXAutoregressive, state: KVCache, block_size: int, width: int, window: int | None) -> None:
        assert isinstance(state, MLXCache)
        self._run, self._depth, longest = run, 0, max(state.lengths)
        window = longest if window is None else window
        skipped, self.room = max(min(state.lengths) - window, 0), 1 + width * (block_size - 2)
        with computing():
            self._hidden_state = last_hidden(state)
            room = [(0, 0), (0, 0), (0, self.room), (0, 0)]
            copies = [mx.pad(array, room) for array in state.read(KEYS_VALUES, 0, skipped)]
            self._keys, self._values = map(MLXTensor, copies)
        lengths, slots = torch.tensor(state.lengths)[:, None], torch.arange(skipped, longest)
        self._known = (slots >= (lengths - window).clamp(min=1)) & (slots < lengths)
        self._positions, self._end = lengths - 1, len(slots)
        self._within = torch.ones(len(state.starts), 0, 0, dtype=torch.bool)


def last_hidden(state: MLXCache, like: Tensor | None = None) -> Tensor:
    """Return the fused hidden state of each sequence's last token, `[B, 1, H]`; 0 for empty sequences.

    Args:
        like: Hidden states `[B, N, H]` whose dtype and width are taken while the state is empty.
    """
    if not any(state.lengths):
        assert like is not None
        return MLXTensor(mx.zeros_like(in_mlx(like)[:, :1]))
    [store] = state.layer(HIDDEN)
    last = [start + max(length - 1, 0) for start, length in zip(state.starts, state.lengths, strict=True)]
    hidden = in_mlx(store)[0, mx.array(last)][:, None]
    has_tokens = mx.array([length > 0 for length in state.lengths])[:, None, None]
    return MLXTensor(mx.where(has_tokens, hidden, mx.zeros_like(hidden)))
