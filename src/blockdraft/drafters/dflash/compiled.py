"""Draft pass, and the context that it reads, each as one call of the library compiled from `decoder.c`."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.kernels.cpu.compiled_decoder import (
    EVERYWHERE,
    CompiledDecoder,
    address,
    chain_parents,
    numbers,
    why_not_compiled,
)
from blockdraft.kernels.cpu.compiled_network import Beside, CompiledNetwork, library_for, rounded_beside
from blockdraft.kernels.cpu.library import CallFields, Library, LinearFields, ModelFields
from blockdraft.machine import return_freed
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_layer import DraftLayer
from blockdraft.nn.layers import ReducedHead
from blockdraft.timing import PASS, mark


def compiled(
    network: DFlashNetwork,
    beside: Beside,
    head: Callable[[Tensor], Tensor] | None,
    owned: bool,
    kind: type[CompiledDraftPass] | None = None,
) -> CompiledDraftPass | str:
    """Compiled runner of a network, or the reason why there is none.

    Args:
        beside: The target.
        head: The network's own head; None is the target's.
        owned: As in `Target.runner`.
        kind: Runner for layers of the network's class; None is `CompiledDraftPass`.
    """
    kind = kind or CompiledDraftPass
    if network.layer_class is not kind.layer_class:
        return f"it does not know layers of the kind {network.layer_class.__name__}"
    target, dtype = beside.decoder, beside.dtype
    reduced = head if isinstance(head, ReducedHead) else None
    reason = why_not_compiled(dtype, network.fc.weight.device, network.config.head_dim)
    if reason is not None:
        return reason
    library, bits = target.library, beside.bits
    if not rounded_beside(network, network.config.head_dim, beside):
        weights = [*network.state_dict().values(), *([] if reduced is None else [reduced.weight])]
        found, reason = library_for(weights, dtype, beside.store, network.config.head_dim)
        if found is None:
            return reason or ""
        library, bits = found, None
    lender = target if target.library is library and head is reduced else None
    return kind(network, library, beside, head=head, target=lender, bits=bits, owned=owned)


class CompiledDraftPass(CompiledNetwork):
    """`DraftPass` whose methods are one call of the library each. Arithmetic is float32, whatever the dtype.

    Args:
        network: Network of any dtype, whose weights are copied into the library's layout and must not be changed
            afterwards.
        library: Library built for its dtype and head size.
        beside: The target.
        head: The network's own head, packed if it is a `ReducedHead` and `target` is given; None is the target's.
        target: The target's forward, if it uses the same library and lends its embedding, and its head to a network
            that has none; a draft then is one call. Else None.
        bits: Bits to which weights are rounded; None keeps them unrounded.
        owned: As in `Target.runner`.

    Attributes:
        layer_class: Class of the network's layers.
    """

    layer_class: ClassVar[type[DraftLayer]] = DraftLayer

    @torch.no_grad()
    def __init__(
        self,
        network: DFlashNetwork,
        library: Library,
        beside: Beside,
        *,
        head: Callable[[Tensor], Tensor] | None,
        target: CompiledDecoder | None,
        bits: int | None,
        owned: bool,
    ) -> None:
        self._embed, self._head, self._network, config = beside.embed, head or beside.head, network, network.config
        super().__init__(library, config, config.num_hidden_layers, beside.dtype, bits, owned)
        for own, layer, kind in zip(self._layers, network.layers, config.layers, strict=True):
            self._pack_layer(own, layer)
            own.window, own.whole_block = kind.window or 0, not kind.causal
        self._reduced = head if isinstance(head, ReducedHead) and target is not None else None
        lent_head = LinearFields() if target is None else target.head
        self._model = ModelFields(
            layers=self._layers,
            embedding=LinearFields() if target is None else target.embedding,
            head=lent_head if self._reduced is None else self._pack(self._reduced, "projection"),
            norm=self._pointer(network.norm.weight),
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            eps=config.rms_norm_eps,
            embedding_scale=config.input_embedding_scale,
            attention_scale=config.head_dim**-0.5,
        )
        self._hidden_states, self._hidden_norm = self._pack(network, "fc"), self._pointer(network.hidden_norm.weight)
        self._target = target  # keeps alive the memory that the model's fields point to
        return_freed()
        self._target_layers = numbers(
            [config.num_hidden_layers]
        )  # the output of the final norm is the only one to return

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        observed = 4 * self.library.draft_context_workspace(self._model, batch, nodes, self._hidden_states.inputs)
        return max(observed, super().workspace_bytes(batch, nodes, slots))

    def observe(self, state: KVCache, hidden_states: Tensor) -> None:
        """As `DraftPass.observe`."""
        hidden_states = hidden_states.float().contiguous()
        call, end = self._call(state, hidden_states.size(0), hidden_states.size(1))
        call.embedded = hidden_states.data_ptr()
        self._in_workspace(self._observed, call, end)

    def _observed(self, model: ModelFields, call: CallFields) -> int:
        return self.library.draft_context(model, call, self._hidden_states, self._hidden_norm)

    def __call__(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        """As `DraftPass.__call__`."""
        embedded = block.float().contiguous()
        call, end = self._call(state, embedded.size(0), embedded.size(1))
        call.embedded = embedded.data_ptr()
        return self._pass(call, end, None, window).to(block.dtype)

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `DraftPass.draft_tokens`."""
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
        """Run a pass; returns hidden states `[B, N, H]` after the final norm."""
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


@lru_cache(maxsize=256)
def _nodes_from(first: int, batch: int, count: int) -> array[int]:
    """Indices, counted through all rows, of the nodes that are node `first` or later of their row."""
    return numbers(node for node in range(batch * count) if node % count >= first)


RUNNERS = {DFlashNetwork: compiled}
