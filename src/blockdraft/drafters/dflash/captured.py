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
        self._graphs = Graphs(host.recorder, self._device, host.compiler)
        layers = range(2, 2 + self.config.num_hidden_layers)
        self._compiled = compiled(self._through_layers, {0: (0, 1), 1: (0,)} | dict.fromkeys(layers, (0, 2)))

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        # A pass with a window is not captured, because it reads other KV slots each time.
        batch, count = tokens.shape
        slots = slot_bucket(max(state.lengths) + count)
        if window is not None or slots > state.capacity:
            return super().draft_tokens(state, tokens, first, window)
        store, is_memory = state.view(self._memory(state), count, slots)
        if not is_memory:
            return super().draft_tokens(state, tokens, first, window)

        def draft(store: Tensor, tokens: Tensor, starts: Tensor) -> list[Tensor]:
            run = self._compiled if self._graphs.compiles else self._through_layers
            hidden = run(self._embed(tokens), starts, *store.unbind(0))[:, first:]
            return [hidden, self._head(hidden)]

        like = store.new_empty(len(store), store.size(2), store.size(4))
        kind = (SEVERAL[0] if batch > 1 else 1, SEVERAL[1] if count > 1 else 1)

        def warm_up() -> None:
            for memory in scratch(like, *kind):
                zeros = torch.zeros(kind, dtype=torch.int64, device=self._device)
                draft(memory, zeros, zeros.new_zeros(kind[0]))

        key = (place(store), batch, count, slots, first)
        inputs = [tokens, torch.tensor(state.lengths)]
        call = partial(draft, store[..., :slots, :])
        results = self._graphs.run(key, call, inputs, count - first, kind, warm_up)
        if results is None:
            return super().draft_tokens(state, tokens, first, window)
        hidden, logits = results
        return hidden, logits

    def _through_layers(self, block: Tensor, starts: Tensor, *stores: Tensor) -> Tensor:
        """Run all layers over blocks.

        Args:
            block: Embeddings `[B, N, H]`.
            starts: Numbers of committed tokens `[B]` int64.
            stores: Keys and values of each layer, `[B, heads, slots, D]`, which inductor writes to in place only where
                they are arguments of their own.
        """
        config, slots, count = self.config, stores[0].size(2), block.size(1)
        at = starts[:, None] + torch.arange(count, device=starts.device)
        visible = {kind: self._visible(starts, at, kind, slots) for kind in set(config.layers)}
        masks = {kind: grouped_mask(seen, self._group, block.dtype) for kind, seen in visible.items()}
        return self._through(block, at, self._angles(at), masks, stores, slice(0, slots))
