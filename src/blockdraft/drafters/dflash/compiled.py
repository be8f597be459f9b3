"""DFlash's draft pass, and the context that it reads, each as one call of the library compiled from `decoder.c`."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DynamicConv
from blockdraft.kernels.cpu.compiled_decoder import EVERYWHERE, address, chain_parents, numbers
from blockdraft.kernels.cpu.compiled_network import CompiledHost, CompiledNetwork
from blockdraft.kernels.cpu.library import CallFields, ConvolutionFields, LayerFields, ModelFields
from blockdraft.machine import return_freed
from blockdraft.nn.cache import KVCache
from blockdraft.timing import PASS, mark


class CompiledDraftPass(CompiledNetwork):
    """`DraftPass` with one library call per method. Arithmetic is float32, whatever the dtype.

    Where the target's library runs the network too, embedding, layers and head are a single call.

    Args:
        network, host, owned: As in `CompiledNetwork`. An own head that is a `ReducedHead` is packed.
    """

    @torch.no_grad()
    def __init__(self, network: DFlashNetwork, host: CompiledHost, owned: bool = False) -> None:
        config = network.config
        super().__init__(network, host, config.num_hidden_layers, owned)
        self._embed, self._head, self._network = host.embed, host.head, network
        for own, layer, kind in zip(self._layers, network.layers, config.layers, strict=True):
            self._pack_layer(own, layer)
            own.window, own.whole_block = kind.window or 0, not kind.causal
        head = None if self._reduced is None else self._pack(self._reduced.projection)
        self._model = self._model_fields(
            config, head, norm=self._pointer(network.norm.weight), embedding_scale=config.input_embedding_scale
        )
        self._fc, self._hidden_norm = self._pack(network.fc), self._pointer(network.hidden_norm.weight)
        return_freed()
        self._target_layers = numbers(
            [config.num_hidden_layers]
        )  # the output of the final norm is the only one to return

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        observed = 4 * self.library.draft_context_workspace(self._model, batch, nodes, self._fc.inputs)
        return max(observed, super().workspace_bytes(batch, nodes, slots))

    def observe(self, state: KVCache, hidden_states: Tensor) -> None:
        hidden_states = hidden_states.float().contiguous()
        call, end = self._call(state, hidden_states.size(0), hidden_states.size(1))
        call.embedded = hidden_states.data_ptr()
        self._in_workspace(self._observed, call, end)

    def _observed(self, model: ModelFields, call: CallFields) -> int:
        return self.library.draft_context(model, call, self._fc, self._hidden_norm)

    def __call__(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        embedded = block.float().contiguous()
        call, end = self._call(state, embedded.size(0), embedded.size(1))
        call.embedded = embedded.data_ptr()
        return self._pass(call, end, None, window).to(block.dtype)

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if self._target is None:
            hidden = self(state, self._embed(tokens), window)[:, first:]
            mark(PASS)
            return hidden, self._head(hidden)
        tokens = tokens.contiguous()
        call, end = self._call(state, tokens.size(0), tokens.size(1))
        call.tokens = tokens.data_ptr()
        wanted = _nodes_from(first, *tokens.shape)
        logits = torch.empty(len(tokens), tokens.size(1) - first, self._model.head.outputs)
        call.logits, call.logits_at, call.num_logits = logits.data_ptr(), address(wanted), len(wanted)
        hidden = self._pass(call, end, tokens, window)[:, first:].to(self._dtype)
        mark(PASS)
        return hidden, logits if self._reduced is None else self._reduced.everywhere(logits)

    def _pass(self, call: CallFields, end: int, tokens: Tensor | None, window: int | None) -> Tensor:
        """Run a pass, and return hidden states `[B, N, H]` after the final norm."""
        parents = chain_parents(call.batch, call.nodes)
        hidden = torch.empty(call.batch, call.nodes, self.config.hidden_size)
        call.parents, call.target_layers, call.num_target_layer_ids = address(parents), address(self._target_layers), 1
        call.hidden_states, call.reach = hidden.data_ptr(), EVERYWHERE if window is None else window
        self._run(call, end, tokens)
        return hidden

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        tables = self._network.angles(torch.arange(count), torch.float32)
        cos, sin = (table[:, : self.config.head_dim // 2].contiguous() for table in tables)
        return [(cos, sin)] * self.config.num_hidden_layers


class CompiledConvolvedPass(CompiledDraftPass):
    """Compiled runner of DFlash2, with convolutions in the layers."""

    def _pack_layer(self, own: LayerFields, layer: Any) -> None:
        super()._pack_layer(own, layer)
        own.attention_conv = self._convolution(layer.attention_conv)
        own.mlp_conv = self._convolution(layer.mlp_conv)

    def _convolution(self, module: DynamicConv) -> ConvolutionFields:
        _, taps, groups = module.corrections
        projection = self._pack(module.kernel_projection, quantize=False)  # small, so 4 bits would save little
        base = self._pointer(module.base_kernel)
        return ConvolutionFields(projection=projection, base=base, taps=taps, groups=groups)


@lru_cache(maxsize=256)
def _nodes_from(first: int, batch: int, count: int) -> array[int]:
    """Return the indices, over all sequences, of the nodes from node `first` of each sequence on."""
    return numbers(node for node in range(batch * count) if node % count >= first)
