"""DFlash's draft pass, compiled and as CUDA graphs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork, DraftPass
from blockdraft.kernels.cuda.compiler import SEVERAL, compiled
from blockdraft.kernels.cuda.graphs import CapturedHost, Graphs, place, scratch
from blockdraft.nn.attention import grouped_mask
from blockdraft.nn.cache import KVCache, slot_bucket


class CapturedDraftPass(DraftPass):
    """Draft pass with its head, as CUDA graphs. The keys and values of the context are written without graphs."""

    def __init__(self, network: DFlashNetwork, host: CapturedHost) -> None:
        super().__init__(network, host)
        self._device = network.fc.weight.device
        self._graphs, self._compiler = Graphs(host.recorder, self._device), host.compiler
        self._compiled = compiled(self._through_layers, {0: (0, 1), 1: (1, 3), 2: (0,)})

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        # A pass with a window is not captured, because it reads other KV slots each time.
        (batch, count), compiler = tokens.shape, self._compiler
        slots = slot_bucket(max(state.lengths) + count)
        if window is not None or slots > state.capacity:
            return super().draft_tokens(state, tokens, first, window)
        store, is_memory = state.view(self._memory(state), count, slots)
        if not is_memory:
            return super().draft_tokens(state, tokens, first, window)

        def draft(store: Tensor, tokens: Tensor, starts: Tensor) -> list[Tensor]:
            uncompiled = compiler is None or compiler.reason is not None
            run = self._through_layers if uncompiled else self._compiled
            hidden = run(self._embed(tokens), store, starts)[:, first:]
            return [hidden, self._head(hidden)]

        kind = (SEVERAL[0] if batch > 1 else 1, SEVERAL[1] if count > 1 else 1)

        def warm_up() -> None:
            for memory in scratch(store, *kind):
                zeros = torch.zeros(kind, dtype=torch.int64, device=self._device)
                draft(memory, zeros, zeros.new_zeros(kind[0]))

        key = (place(store), batch, count, slots, first)
        inputs = [tokens, torch.tensor(state.lengths)]
        if compiler is not None and key not in self._graphs and not compiler.ready((id(self), *kind), warm_up):
            return super().draft_tokens(state, tokens, first, window)
        hidden, logits = self._graphs.run(key, partial(draft, store[..., :slots, :]), inputs, count - first)
        return hidden, logits

    def _through_layers(self, block: Tensor, store: Tensor, starts: Tensor) -> Tensor:
        """Run all layers over blocks of embeddings `[B, N, H]` behind committed tokens `[B]` int64."""
        config, slots, count = self.config, store.size(3), block.size(1)
        at = starts[:, None] + torch.arange(count, device=starts.device)
        visible = {kind: self._visible(starts, at, kind, slots) for kind in set(config.layers)}
        masks = {kind: grouped_mask(seen, self._group, block.dtype) for kind, seen in visible.items()}
        return self._through(block, at, self._angles(at), masks, store, slice(0, slots))
