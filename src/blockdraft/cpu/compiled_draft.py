"""The draft pass, and the context that it reads, each as one call of the library that `build` compiles."""

from __future__ import annotations

import logging
from array import array
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from blockdraft.cpu.build import build
from blockdraft.cpu.compiled import EVERYWHERE, CompiledDecoder, CompiledLayers, address, numbers
from blockdraft.cpu.library import KINDS, CallFields, Library, LinearFields, ModelFields
from blockdraft.nn.cache import KVCache
from blockdraft.nn.dflash import DFlashNetwork, DraftLayer
from blockdraft.nn.draft_pass import DraftPass, joined
from blockdraft.nn.packed import PackedLinear, fits_bfloat16


def why_not_drafts(network: DFlashNetwork) -> str | None:
    """Why a draft network has no compiled pass; None where it has one."""
    weight = network.fc.weight
    if weight.device.type != "cpu":
        return f"it is for CPUs, and the device is {weight.device}"
    if weight.dtype not in KINDS:
        return f"it knows float32 and bfloat16, and the dtype is {str(weight.dtype).removeprefix('torch.')}"
    if network.layer_class is not DraftLayer:
        return f"it does not know layers of the kind {network.layer_class.__name__}"
    return f"heads of {network.config.head_dim} are no multiple of 4" if network.config.head_dim % 4 else None


def draft_pass(network: DFlashNetwork, target: CompiledDecoder | None) -> DraftPass | CompiledDraftPass:
    """The fastest way to run a network; where its target is compiled, a compiled one, if there is one.

    Weights in float32 that bfloat16 holds as well are kept in it, for the same numbers in half of the memory.
    """
    if target is None:
        return DraftPass(network, "its target is not compiled")
    reason = why_not_drafts(network)
    if reason is not None:
        return DraftPass(network, reason)
    dtype = network.fc.weight.dtype
    halved = dtype == torch.float32 and all(fits_bfloat16(p) for p in network.parameters() if p.ndim == 2)
    made = build(torch.bfloat16 if halved else dtype, dtype, network.config.head_dim)
    library = made.library()
    if library is None:
        logging.getLogger(__name__).warning("The drafter runs uncompiled, which is slower: %s.", made.reason)
        return DraftPass(network, made.reason)
    return CompiledDraftPass(network, library, target if target.library is library else None)


class CompiledDraftPass(CompiledLayers):
    """`DraftPass` in one call each of its two methods. Arithmetic is float32, whatever the dtype.

    Args:
        network: One for which `why_not_drafts` has no reason. Its weights are copied into the library's layout and must
            not be changed afterwards.
        library: Built for its dtype and head size.
        target: Lends its embedding and head, where it uses the same library.

    Attributes:
        has_head: Whether `guesses` can be called, which takes fewer calls than its parts.
    """

    compile_reason: str | None = None

    @torch.no_grad()
    def __init__(self, network: DFlashNetwork, library: Library, target: CompiledDecoder | None = None) -> None:
        self.config = config = network.config
        super().__init__(library, config.num_hidden_layers, EVERYWHERE)
        self._network, self._like = network, network.fc.weight
        self._packed: list[PackedLinear] = []
        for own, module, kind in zip(self._layers, network.layers, config.layers, strict=True):
            layer = cast(DraftLayer, module)
            attention, mlp = layer.self_attn, layer.mlp
            own.qkv = self._pack(attention.q_proj, attention.k_proj, attention.v_proj)
            own.output = self._pack(attention.o_proj)
            own.gate_up = self._pack(mlp.gate_proj, mlp.up_proj)
            own.down = self._pack(mlp.down_proj)
            own.before_attention = self._pointer(layer.input_layernorm.weight)
            own.before_mlp = self._pointer(layer.post_attention_layernorm.weight)
            own.query_norm = self._pointer(attention.q_norm.weight)
            own.key_norm = self._pointer(attention.k_norm.weight)
            own.window, own.whole_block = kind.window or 0, not kind.causal
        self._model = ModelFields(
            self._layers,
            LinearFields() if target is None else target.embedding,
            LinearFields() if target is None else target.head,
            self._pointer(network.norm.weight),
            *(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads),
            *(config.head_dim, config.intermediate_size, 0, 0),
            *(config.rms_norm_eps, config.input_embedding_scale, config.head_dim**-0.5, 0.0, 0.0),
        )
        self._features, self._hidden_norm = self._pack(network.fc), self._pointer(network.hidden_norm.weight)
        self.has_head = target is not None
        self._target = target  # which owns the memory of its tables
        # The one output that is wanted is that of the final norm.
        self._taps = numbers([config.num_hidden_layers])

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        observed = 4 * self.library.draft_context_workspace(self._model, batch, nodes)
        return max(observed, super().workspace_bytes(batch, nodes, slots))

    def observe(self, state: KVCache, features: Tensor) -> None:
        """As `DraftPass.observe`."""
        rows, lengths = features.float().contiguous(), numbers(state.lengths)
        call, end = self._call(state, rows.size(0), rows.size(1), lengths)
        call.embedded = rows.data_ptr()
        self._in_workspace(self.library.draft_context, call, end, self._features, self._hidden_norm)

    def __call__(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        """As `DraftPass.__call__`."""
        rows, lengths = block.float().contiguous(), numbers(state.lengths)
        call, end = self._call(state, rows.size(0), rows.size(1), lengths)
        call.embedded = rows.data_ptr()
        return self._pass(call, end, None, window).to(block.dtype)

    def guesses(self, state: KVCache, tokens: Tensor, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """A pass over blocks of tokens, with the head behind it.

        Args:
            tokens: `[B, N]` int64, `[anchor, mask, mask, ...]`.
            first: Slot of each block from which on logits are wanted.
            window: As in `__call__`.

        Returns:
            Hidden states `[B, N - first, H]` in the network's dtype, and logits `[B, N - first, V]` in float32.
        """
        assert self.has_head
        tokens, lengths = tokens.contiguous(), numbers(state.lengths)
        call, end = self._call(state, tokens.size(0), tokens.size(1), lengths)
        call.tokens = tokens.data_ptr()
        wanted = _slots_from(first, *tokens.shape)
        logits = torch.empty(len(tokens), tokens.size(1) - first, self._model.head.outputs)
        call.logits, call.logits_at, call.num_logits = logits.data_ptr(), address(wanted), len(wanted)
        return self._pass(call, end, tokens, window)[:, first:].to(self._like.dtype), logits

    def _pass(self, call: CallFields, end: int, tokens: Tensor | None, window: int | None) -> Tensor:
        """`[B, N, H]` behind the final norm."""
        parents = _chain_parents(call.batch, call.nodes)
        hidden = torch.empty(call.batch, call.nodes, self.config.hidden_size)
        call.parents, call.taps, call.num_taps = address(parents), address(self._taps), 1
        call.features, call.reach = hidden.data_ptr(), EVERYWHERE if window is None else window
        self._run(call, end, tokens)
        return hidden

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        tables = self._network.angles(torch.arange(count), torch.float32)
        cos, sin = (table[:, : self.config.head_dim // 2].contiguous() for table in tables)
        return [(cos, sin)] * self.config.num_hidden_layers

    def _call(self, state: KVCache, batch: int, count: int, lengths: array[int]) -> tuple[CallFields, int]:
        """A call about N nodes behind each row's committed tokens; and the slots that it reaches."""
        config = self.config
        shape = (config.num_hidden_layers, 2 * config.num_key_value_heads, config.head_dim)
        store, end = state.stacked(*shape, self._like), max(state.lengths, default=0) + count
        slots = store.size(3)
        assert end <= slots and store.stride()[3:] == (config.head_dim, 1), (end, store.shape, store.stride())
        assert len(lengths) == batch and store.dtype == self.library.store_dtype, (state.lengths, batch, store.dtype)
        call = CallFields(lengths=address(lengths), batch=batch, nodes=count, slots=slots)
        call.store, call.threads = store.data_ptr(), torch.get_num_threads()
        call.layer_stride, call.row_stride, call.head_stride = store.stride()[:3]
        return call, end

    def _pack(self, *projections: torch.nn.Linear) -> LinearFields:
        packed = joined(projections, views=False)
        self._packed.append(packed)  # which owns the memory
        return self.library.linear(packed)


@lru_cache(maxsize=256)
def _chain_parents(batch: int, count: int) -> array[int]:
    return numbers(list(range(-1, count - 1)) * batch)


@lru_cache(maxsize=256)
def _slots_from(first: int, batch: int, count: int) -> array[int]:
    """The nodes of all rows, counted through, that are slot `first` or later of their row."""
    return numbers(node for node in range(batch * count) if node % count >= first)
