"""Key/value cache of texts that grow by whole blocks, each computed on top of those before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.diffusion.losses import block_causal, shifted
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.nn.attention import visible_slots
from blockdraft.nn.cache import KVCache

PIECE = 512  # tokens of a prompt per pass, about


class Context:
    """Committed blocks of a batch of rows: the clean text that a noisy block sees in training.

    Args:
        rows: Number of rows.
        capacity: Most tokens of a row, its present block included.
    """

    def __init__(self, model: DiffusionModel, rows: int, capacity: int) -> None:
        self._model, self._capacity = model, capacity
        self._cache = KVCache(rows, capacity)
        # With a token shift, the state that predicts the first token of each row's next block.
        self._before: list[Tensor | None] = [None] * rows

    def length(self, row: int) -> int:
        """Committed tokens of a row; a multiple of the block size."""
        return self._cache.of([row * self._capacity]).lengths[0]

    def knows_first(self, row: int) -> bool:
        """Whether there is a state that predicts the first token of the row's next block."""
        return self._before[row] is not None

    def clear(self, row: int) -> None:
        """Empty a row, so that another text can take its place."""
        self._part([row]).truncate([0])
        self._before[row] = None

    @torch.no_grad()
    def read(self, row: int, tokens: Sequence[int]) -> None:
        """Commit whole blocks of known tokens."""
        size = self._model.config.block_size
        assert len(tokens) % size == 0
        step = max(1, PIECE // size) * size
        for begin in range(0, len(tokens), step):
            part = torch.tensor(tokens[begin : begin + step])[None]
            states = self._forward([row], part, block_causal(part.size(1), size))
            self._commit([row], [part.size(1)], states)

    @torch.no_grad()
    def look(self, rows: Sequence[int], blocks_RN: Tensor, known: Sequence[bool]) -> Tensor:
        """Run one pass over the next block of some rows, and commit the blocks that are wholly known.

        Args:
            blocks_RN: Token ids, int64 on the CPU, with the mask token for unknown ones.
            known: Whether each block is free of mask tokens.

        Returns:
            Hidden states that predict each unknown token, `[R, N, H]`.
        """
        count = blocks_RN.size(1)
        states = self._forward(rows, blocks_RN, torch.ones(count, count, dtype=torch.bool))
        about = states
        if self._model.config.token_shift:  # a row's very first token is given, so its state is not used
            before = [self.first(row) if self.knows_first(row) else states[i, 0] for i, row in enumerate(rows)]
            about = shifted(states, torch.stack(before)[:, None], count)
        self._commit(rows, [count if each else 0 for each in known], states)
        return about

    def first(self, row: int) -> Tensor:
        """Hidden state that predicts the first token of the row's next block, `[H]`, without a pass."""
        found = self._before[row]
        assert found is not None
        return found

    def _forward(self, rows: Sequence[int], tokens_RN: Tensor, within_NN: Tensor) -> Tensor:
        device, cache = self._model.network.device, self._part(rows)
        within = within_NN.to(device).expand(len(rows), -1, -1)
        positions = cache.slots(tokens_RN.size(1), device)
        visible = visible_slots(cache.lengths, within)
        return self._model.network.hidden(tokens_RN.to(device), positions, visible, cache)

    def _commit(self, rows: Sequence[int], counts: Sequence[int], states: Tensor) -> None:
        self._part(rows).commit([range(count) for count in counts])
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count and self._model.config.token_shift:
                self._before[row] = states[place, count - 1].clone()

    def _part(self, rows: Sequence[int]) -> KVCache:
        return self._cache.of([row * self._capacity for row in rows])
