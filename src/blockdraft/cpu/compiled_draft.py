"""The draft pass, and the context that it reads, each as one call of the library that `build` compiles."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from blockdraft.cpu.compiled import EVERYWHERE, CompiledDecoder, address, chain_parents, numbers
from blockdraft.cpu.compiled_network import CompiledNetwork, library_for, why_not_compiled
from blockdraft.cpu.library import CallFields, ConvolutionFields, Library, LinearFields, ModelFields
from blockdraft.machine import return_freed
from blockdraft.nn.cache import KVCache
from blockdraft.nn.dflash import DFlashNetwork, DraftLayer
from blockdraft.nn.dflash2 import ConvolvedLayer, DynamicConv
from blockdraft.nn.draft_pass import DraftPass
from blockdraft.nn.quantized import LEAST_GROUP
from blockdraft.timing import PASS, mark


def why_not_drafts(network: DFlashNetwork, dtype: torch.dtype) -> str | None:
    """Why a draft network has no compiled pass; None where it has one."""
    if network.layer_class not in (DraftLayer, ConvolvedLayer):
        return f"it does not know layers of the kind {network.layer_class.__name__}"
    return why_not_compiled(network.fc.weight, dtype, network.config.head_dim)


def draft_pass(
    network: DFlashNetwork,
    target: CompiledDecoder | None,
    embed: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
    own_head: bool = False,
    bits: int | None = None,
    owned: bool = False,
    dtype: torch.dtype | None = None,
) -> DraftPass | CompiledDraftPass:
    """The fastest way to run a network; where its target is compiled, a compiled one, if there is one.

    Args:
        target: That of the drafter, compiled.
        embed, head: As in `DraftPass`.
        own_head: Whether the head is another than the target's.
        bits: To which weights are rounded: those of a target's layers. They stay as they are if this is None, if rows
            are not of whole groups, or if the target's library has no vectors for the heads.
        owned: As in `Target.draft_runner`.
        dtype: Of arithmetic and cache; None is the network's.
    """
    dtype = dtype or network.fc.weight.dtype
    if target is None:
        return DraftPass(network.to(dtype), embed, head, "its target is not compiled")
    reason = why_not_drafts(network, dtype)
    if reason is not None:
        return DraftPass(network.to(dtype), embed, head, reason)
    inputs = {module.in_features for module in network.modules() if isinstance(module, torch.nn.Linear)}
    fits = all(size % LEAST_GROUP == 0 for size in inputs)
    store = torch.int8 if target.library.store_dtype == torch.int8 else dtype
    heads = network.config.head_dim % target.library.lanes == 0
    if bits is not None and fits and heads and target.library.store_dtype == store:
        own = None if own_head else target
        return CompiledDraftPass(network, target.library, embed, head, own, bits, owned, dtype)
    library, reason = library_for(network.state_dict().values(), dtype, store, network.config.head_dim)
    if library is None:
        return DraftPass(network.to(dtype), embed, head, reason)
    lends = target.library is library and not own_head
    return CompiledDraftPass(network, library, embed, head, target if lends else None, None, owned, dtype)


class CompiledDraftPass(CompiledNetwork):
    """`DraftPass` in one call each of its two methods. Arithmetic is float32, whatever the dtype.

    Args:
        network: One for which `why_not_drafts` has no reason, of any dtype. Its weights are copied into the library's
            layout and must not be changed afterwards.
        library: Built for its dtype and head size.
        embed, head: As in `DraftPass`.
        target: Lends its embedding and head, where it uses the same library: then a pass with its head is one call.
        bits: To which weights are rounded, if they are.
        owned, dtype: As in `draft_pass`.
    """

    @torch.no_grad()
    def __init__(
        self,
        network: DFlashNetwork,
        library: Library,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        target: CompiledDecoder | None = None,
        bits: int | None = None,
        owned: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._embed, self._head, self._network, config = embed, head, network, network.config
        super().__init__(library, config, config.num_hidden_layers, dtype or network.fc.weight.dtype, bits, owned)
        for own, module, kind in zip(self._layers, network.layers, config.layers, strict=True):
            layer = cast(DraftLayer, module)
            self._lay_out(own, layer)
            own.window, own.whole_block = kind.window or 0, not kind.causal
            if isinstance(layer, ConvolvedLayer):
                own.attention_conv = self._convolution(layer.attention_conv)
                own.mlp_conv = self._convolution(layer.mlp_conv)
        self._model = ModelFields(
            self._layers,
            LinearFields() if target is None else target.embedding,
            LinearFields() if target is None else target.head,
            self._pointer(network.norm.weight),
            *(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads),
            *(config.head_dim, config.intermediate_size, 0, 0),
            *(config.rms_norm_eps, config.input_embedding_scale, config.head_dim**-0.5, 0.0, 0.0),
        )
        self._features, self._hidden_norm = self._pack(network, "fc"), self._pointer(network.hidden_norm.weight)
        self._target = target  # which owns the memory of its tables
        return_freed()
        # The one output that is wanted is that of the final norm.
        self._taps = numbers([config.num_hidden_layers])

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        observed = 4 * self.library.draft_context_workspace(self._model, batch, nodes, self._features.inputs)
        return max(observed, super().workspace_bytes(batch, nodes, slots))

    def observe(self, state: KVCache, features: Tensor) -> None:
        """As `DraftPass.observe`."""
        rows, places = features.float().contiguous(), (numbers(state.lengths), numbers(state.rows))
        call, end = self._call(state, rows.size(0), rows.size(1), *places)
        call.embedded = rows.data_ptr()
        self._in_workspace(self.library.draft_context, call, end, self._features, self._hidden_norm)

    def __call__(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        """As `DraftPass.__call__`."""
        rows, places = block.float().contiguous(), (numbers(state.lengths), numbers(state.rows))
        call, end = self._call(state, rows.size(0), rows.size(1), *places)
        call.embedded = rows.data_ptr()
        return self._pass(call, end, None, window).to(block.dtype)

    def guesses(self, state: KVCache, tokens: Tensor, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """As `DraftPass.guesses`."""
        if self._target is None:
            hidden = self(state, self._embed(tokens), window)[:, first:]
            mark(PASS)
            return hidden, self._head(hidden)
        tokens, places = tokens.contiguous(), (numbers(state.lengths), numbers(state.rows))
        call, end = self._call(state, tokens.size(0), tokens.size(1), *places)
        call.tokens = tokens.data_ptr()
        wanted = _slots_from(first, *tokens.shape)
        logits = torch.empty(len(tokens), tokens.size(1) - first, self._model.head.outputs)
        call.logits, call.logits_at, call.num_logits = logits.data_ptr(), address(wanted), len(wanted)
        hidden = self._pass(call, end, tokens, window)[:, first:].to(self._dtype)
        mark(PASS)
        return hidden, logits

    def _pass(self, call: CallFields, end: int, tokens: Tensor | None, window: int | None) -> Tensor:
        """`[B, N, H]` behind the final norm."""
        parents = chain_parents(call.batch, call.nodes)
        hidden = torch.empty(call.batch, call.nodes, self.config.hidden_size)
        call.parents, call.taps, call.num_taps = address(parents), address(self._taps), 1
        call.features, call.reach = hidden.data_ptr(), EVERYWHERE if window is None else window
        self._run(call, end, tokens)
        return hidden

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        tables = self._network.angles(torch.arange(count), torch.float32)
        cos, sin = (table[:, : self.config.head_dim // 2].contiguous() for table in tables)
        return [(cos, sin)] * self.config.num_hidden_layers

    def _convolution(self, module: DynamicConv) -> ConvolutionFields:
        _, taps, groups = module.corrections
        # Not rounded to few bits: it is small, and what it corrects is near the identity.
        projection = self._pack(module, "kernel_projection", rounds=False)
        return ConvolutionFields(projection, self._pointer(module.base_kernel), taps, groups)


@lru_cache(maxsize=256)
def _slots_from(first: int, batch: int, count: int) -> array[int]:
    """The nodes of all rows, counted through, that are slot `first` or later of their row."""
    return numbers(node for node in range(batch * count) if node % count >= first)
