"""Key/value cache of sequences that grow by whole blocks, each of which attends to the blocks before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.nn.attention import visible_slots
from blockdraft.nn.cache import KVCache
from blockdraft_diffusion.losses import block_causal, shifted
from blockdraft_diffusion.model import DiffusionModel


class BlockCache:
    """Key/value cache of committed blocks: the clean context that a noisy block attends to.

    Args:
        batch_size: Number of sequences.
        capacity: Maximum number of tokens per sequence, including its current block.
        prefill_chunk: Approximate number of prompt tokens per prefill pass.
    """

    def __init__(self, model: DiffusionModel, batch_size: int, capacity: int, prefill_chunk: int = 512) -> None:
        self._model, self._capacity, self._prefill_chunk = model, capacity, prefill_chunk
        self._cache = KVCache(batch_size, capacity)
        # With a token shift: the hidden state that predicts the first token of each sequence's next block.
        self._first_states: list[Tensor | None] = [None] * batch_size

    def length(self, index: int) -> int:
        """Return the number of committed tokens of a sequence, a multiple of the block size."""
        return self._cache.of([index * self._capacity]).lengths[0]

    def predicts_first(self, index: int) -> bool:
        """Return whether a cached state predicts the first token of the sequence's next block."""
        return self._first_states[index] is not None

    def first_state(self, index: int) -> Tensor:
        """Return the hidden state `[H]` that predicts the first token of the next block, without a forward pass."""
        state = self._first_states[index]
        assert state is not None
        return state

    def clear(self, index: int) -> None:
        """Empty a sequence, so that another one can take its place."""
        self._view([index]).truncate([0])
        self._first_states[index] = None

    @torch.no_grad()
    def prefill(self, index: int, tokens: Sequence[int]) -> None:
        """Commit whole blocks of known tokens."""
        size = self._model.config.block_size
        assert len(tokens) % size == 0
        step = max(1, self._prefill_chunk // size) * size
        for begin in range(0, len(tokens), step):
            chunk = torch.tensor(tokens[begin : begin + step])[None]
            states = self._forward([index], chunk, block_causal(chunk.size(1), size))
            self._commit([index], [chunk.size(1)], states)

    @torch.no_grad()
    def forward(self, indices: Sequence[int], blocks_BN: Tensor, complete: Sequence[bool]) -> Tensor:
        """Run one forward pass over the next block of some sequences, and commit the complete blocks.

        Args:
            indices: Batch indices of the sequences.
            blocks_BN: Token ids, int64 on the CPU, with the mask token for unknown ones.
            complete: Whether each block is free of mask tokens.

        Returns:
            Hidden states that predict each unknown token, `[B, N, H]`.
        """
        size = blocks_BN.size(1)
        states = self._forward(indices, blocks_BN, torch.ones(size, size, dtype=torch.bool))
        predicting = states
        if self._model.config.token_shift:  # the very first token of a sequence is given, so its state is not used
            first = [self.first_state(i) if self.predicts_first(i) else states[b, 0] for b, i in enumerate(indices)]
            predicting = shifted(states, torch.stack(first)[:, None], size)
        self._commit(indices, [size if is_complete else 0 for is_complete in complete], states)
        return predicting

    def _forward(self, indices: Sequence[int], tokens_BN: Tensor, within_NN: Tensor) -> Tensor:
        device, cache = self._model.network.device, self._view(indices)
        within = within_NN.to(device).expand(len(indices), -1, -1)
        positions = cache.slots(tokens_BN.size(1), device)
        visible = visible_slots(cache.lengths, within)
        return self._model.network.hidden(tokens_BN.to(device), positions, visible, cache)

    def _commit(self, indices: Sequence[int], counts: Sequence[int], states: Tensor) -> None:
        self._view(indices).commit([range(count) for count in counts])
        for b, (index, count) in enumerate(zip(indices, counts, strict=True)):
            if count and self._model.config.token_shift:
                self._first_states[index] = states[b, count - 1].clone()

    def _view(self, indices: Sequence[int]) -> KVCache:
        return self._cache.of([index * self._capacity for index in indices])
