"""DFlash's draft pass as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork, DraftPass
from blockdraft.kernels.cuda.graphs import Graphs, Recorder, place
from blockdraft.nn.attention import grouped_mask
from blockdraft.nn.cache import KVCache, slot_bucket


class CapturedDraftPass(DraftPass):
    """Draft pass with its head, as CUDA graphs. The keys and values of the context are written without graphs.

    Args:
        network, embed, head: As in `DraftPass`.
        recorder: Recorder of the target.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        recorder: Recorder,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(network, embed, head)
        self._graphs = Graphs(recorder, network.fc.weight.device)

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `DraftPass.draft_tokens`. A pass with a window is not captured, because it reads other slots each time."""
        config, (batch, count) = self.config, tokens.shape
        slots = slot_bucket(max(state.lengths) + count)
        if window is not None or slots > state.capacity:
            return super().draft_tokens(state, tokens, first, window)
        store, is_memory = state.view(self._memory(state), count, slots)
        if not is_memory:
            return super().draft_tokens(state, tokens, first, window)

        def call(tokens: Tensor, starts: Tensor) -> list[Tensor]:
            at = starts[:, None] + torch.arange(count, device=starts.device)
            block = self._embed(tokens)
            visible = {kind: self._visible(starts, at, kind, slots) for kind in set(config.layers)}
            masks = {kind: grouped_mask(each, self._group, block.dtype) for kind, each in visible.items()}
            hidden = self._through(block, at, self._angles(at), masks, store, slice(0, slots))[:, first:]
            return [hidden, self._head(hidden)]

        key = (place(store), batch, count, slots, first)
        inputs = [tokens, torch.tensor(state.lengths)]
        hidden, logits = self._graphs.run(key, call, inputs, count - first)
        return hidden, logits


RUNNERS = {DFlashNetwork: CapturedDraftPass}
