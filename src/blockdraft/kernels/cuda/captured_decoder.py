"""A decoder's forward passes of few nodes as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.decode.proposal import depths, tree_mask
from blockdraft.kernels.cuda.compiler import SEVERAL, Compiler, compiled_layers
from blockdraft.kernels.cuda.graphs import MAX_NODES, GraphRecorder, Graphs, place, room, scratch
from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, bucket, slot_bucket
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_layer import DecoderLayer
from blockdraft.nn.executor import TargetOutput
from blockdraft.nn.torch_decoder import TorchDecoder


class CapturedDecoder(TorchDecoder):
    """Runs forward passes of few nodes as graphs, and others as `TorchDecoder`.

    Others have too many nodes or KV slots for a graph, sequences at unequal distances, logits of single nodes, or come
    while a graph is compiled in the background. The target's drafters use recorder and compiler too.

    Args:
        decoder: The decoder, without `DecoderConfig.unusual` parts.
        recorder: Makes the graphs.
        compiler: Compiles what they hold. None leaves torch's operations as they are.
    """

    def __init__(self, decoder: Decoder, recorder: GraphRecorder, compiler: Compiler | None = None) -> None:
        super().__init__(decoder)
        self.recorder, self.compiler = recorder, compiler
        self._compiled_layer = None if compiler is None else compiled_layers()
        self._graphs = Graphs(recorder, decoder.device, compiler)
        self._group = decoder.config.num_heads // decoder.config.num_kv_heads

    @property
    def traits(self) -> list[str]:
        return [*super().traits, "captured"]

    def slots_for(self, tokens: int) -> int:
        return room(tokens)

    def compile_at_once(self) -> None:
        if self.compiler is not None:
            self.compiler.compile_at_once()

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        replayed = None if logits_at is not None else self._replay(tokens, parents, cache, target_layers)
        return super().forward(tokens, parents, cache, target_layers, logits_at) if replayed is None else replayed

    def _replay(
        self, tokens: Tensor, parents: Tensor, cache: KVCache, target_layers: Sequence[int]
    ) -> TargetOutput | None:
        """Run the forward pass as a graph. Return None if there is none for it, or not yet."""
        decoder, (batch, count), lengths = self.decoder, tokens.shape, cache.lengths
        nodes = bucket(count)
        slots = slot_bucket(max(lengths) + nodes)
        if nodes > MAX_NODES or slots > cache.capacity:
            return None
        [memory] = cache.stores
        store, is_memory = cache.view(memory, count, slots)
        if not is_memory:
            return None
        padded = F.pad(parents, (0, nodes - count), value=-1)  # nodes without ancestors, to which none attends
        like = store.new_empty(1, store.size(2), store.size(4))  # the memory itself may go while a thread compiles
        several, more = SEVERAL if self._group != SEVERAL[0] else (SEVERAL[0] + 1, SEVERAL[1])
        kind = (several if batch > 1 else 1, more if nodes > 1 else 1)

        def warm_up() -> None:
            for memory in scratch(like, *kind):
                zeros = torch.zeros(kind, dtype=torch.int64, device=decoder.device)
                within = torch.zeros(*kind, kind[1], dtype=torch.bool, device=decoder.device)
                same_for_all = memory.expand(len(decoder.layers), -1, -1, -1, -1)
                self._score(target_layers, same_for_all, zeros, zeros.new_zeros(kind[0]), zeros, within)

        key = (place(store), batch, nodes, slots, tuple(target_layers))
        inputs = [F.pad(tokens, (0, nodes - count)), torch.tensor(lengths), depths(padded), tree_mask(padded)]
        results = self._graphs.run(key, partial(self._score, target_layers, store), inputs, count, kind, warm_up)
        if results is None:
            return None
        logits, *hidden_states = results
        return TargetOutput(logits, hidden_states[0] if hidden_states else None)

    def _score(
        self,
        target_layers: Sequence[int],
        store: Tensor,
        tokens: Tensor,
        starts: Tensor,
        depths: Tensor,
        within: Tensor,
    ) -> list[Tensor]:
        """Return logits, and hidden states if there are target layers.

        Args:
            store: Keys before values, `[layers, B, 2 * num_kv_heads, slots, D]`.
            tokens, depths: `[B, N]` int64, tokens and their distances from the anchor.
            starts: `[B]` int64, committed tokens.
            within: `[B, N, N]` bool, whether node i attends to node j.
        """
        decoder, slots = self.decoder, store.size(3)
        positions, at = starts[:, None] + depths, starts[:, None] + torch.arange(tokens.size(1), device=starts.device)
        masks = [
            grouped_mask(visible_slots(starts, within, positions, window, slots), self._group, decoder.dtype)
            for window in decoder.config.windows
        ]
        run = self._compiled_layer if self._graphs.compiles and self._compiled_layer else DecoderLayer.__call__
        logits, hidden_states = decoder(tokens, positions, at, masks, store.unbind(0), target_layers, run_layer=run)
        return [logits] if hidden_states is None else [logits, hidden_states]
