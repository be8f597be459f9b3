"""The draft pass, and the context that it reads, each as one call of the library that `build` compiles."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.cpu.build import build
from blockdraft.cpu.compiled import EVERYWHERE, CompiledDecoder, CompiledLayers, address, numbers
from blockdraft.cpu.library import KINDS, CallFields, ConvolutionFields, Library, LinearFields, ModelFields
from blockdraft.machine import return_freed
from blockdraft.nn.cache import KVCache
from blockdraft.nn.dflash import DFlashNetwork, DraftLayer
from blockdraft.nn.dflash2 import ConvolvedLayer, DynamicConv
from blockdraft.nn.draft_pass import DraftPass
from blockdraft.nn.packed import PackedLinear, fits_bfloat16, lay_out
from blockdraft.nn.quantized import LEAST_GROUP, PIECE, QuantizedWeight, best_group
from blockdraft.nn.rounding import QUICK, rounded
from blockdraft.timing import PASS, mark


def why_not_drafts(network: DFlashNetwork, dtype: torch.dtype) -> str | None:
    """Why a draft network has no compiled pass; None where it has one."""
    device = network.fc.weight.device
    if device.type != "cpu":
        return f"it is for CPUs, and the device is {device}"
    if dtype not in KINDS:
        return f"it knows float32 and bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    if network.layer_class not in (DraftLayer, ConvolvedLayer):
        return f"it does not know layers of the kind {network.layer_class.__name__}"
    return f"heads of {network.config.head_dim} are no multiple of 4" if network.config.head_dim % 4 else None


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

    Weights in float32 that bfloat16 holds as well are kept in it, for the same numbers in half of the memory.

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
    halved = dtype == torch.float32 and all(
        fits_bfloat16(each) for each in network.state_dict().values() if each.ndim == 2
    )
    made = build(torch.bfloat16 if halved else dtype, store, network.config.head_dim)
    library = made.library()
    if library is None:
        logging.getLogger(__name__).warning("The drafter runs uncompiled, which is slower: %s.", made.reason)
        return DraftPass(network.to(dtype), embed, head, made.reason)
    lends = target.library is library and not own_head
    return CompiledDraftPass(network, library, embed, head, target if lends else None, None, owned, dtype)


class PartOfPacked(nn.Module):
    """Stands in a network for an `nn.Linear` whose weight is kept laid out, some rows of a larger one; it takes no
    memory of its own, and is slow. A deep copy is an `nn.Linear`."""

    def __init__(self, whole: PackedLinear, rows: slice) -> None:
        super().__init__()
        self._whole, self._rows = [whole], rows  # in a list, so that it is no module of the network
        self.in_features, self.out_features = whole.in_features, rows.stop - rows.start

    @property
    def weight(self) -> Tensor:
        return self._whole[0].weight[self._rows]

    @property
    def bias(self) -> Tensor | None:
        bias = self._whole[0].bias
        return None if bias is None else bias[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        with torch.device("meta"):
            copied = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        copied.load_state_dict({name: each.clone() for name, each in self.state_dict().items()}, assign=True)
        return copied


class CompiledDraftPass(CompiledLayers):
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

    compile_reason: str | None = None

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
        self._embed, self._head = embed, head
        self.config = config = network.config
        super().__init__(library, config.num_hidden_layers, EVERYWHERE)
        self._network, self._dtype = network, dtype or network.fc.weight.dtype
        self._packed: list[PackedLinear] = []
        self._bits, self._owned = bits, owned
        for own, module, kind in zip(self._layers, network.layers, config.layers, strict=True):
            layer = cast(DraftLayer, module)
            attention, mlp = layer.self_attn, layer.mlp
            own.qkv = self._pack(attention, "q_proj", "k_proj", "v_proj")
            own.output = self._pack(attention, "o_proj")
            own.gate_up = self._pack(mlp, "gate_proj", "up_proj")
            own.down = self._pack(mlp, "down_proj")
            own.before_attention = self._pointer(layer.input_layernorm.weight)
            own.before_mlp = self._pointer(layer.post_attention_layernorm.weight)
            own.query_norm = self._pointer(attention.q_norm.weight)
            own.key_norm = self._pointer(attention.k_norm.weight)
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

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        config, slot = self.config, self.library.slot_size(self.config.head_dim) * self.library.store_dtype.itemsize
        return 2 * config.num_hidden_layers * config.num_key_value_heads * slot * batch * capacity

    def weight_bytes(self) -> int:
        return sum(each.nbytes for each in self._packed) + sum(each.nbytes for each in self._alive)

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

    def _call(
        self, state: KVCache, batch: int, count: int, lengths: array[int], starts: array[int]
    ) -> tuple[CallFields, int]:
        """A call about N nodes behind each row's committed tokens; and the slots that it reaches."""
        config, end = self.config, state.check_room(count)
        size = self.library.slot_size(config.head_dim)
        shape = (config.num_hidden_layers, 2 * config.num_key_value_heads, size)
        memory = state.memory(*shape, torch.empty(0, dtype=self.library.store_dtype))
        assert len(lengths) == batch, (state.lengths, batch)
        call = CallFields(lengths=address(lengths), starts=address(starts), batch=batch, nodes=count)
        call.store, call.threads, call.slots = memory.data_ptr(), torch.get_num_threads(), memory.size(2)
        call.layer_stride, call.head_stride = memory.stride()[:2]
        return call, end

    def _pointer(self, weight: Tensor) -> int:
        return super()._pointer(weight.to(self._dtype))

    def _convolution(self, module: DynamicConv) -> ConvolutionFields:
        _, taps, groups = module.corrections
        # Not rounded to few bits: it is small, and what it corrects is near the identity.
        projection = self._pack(module, "kernel_projection", rounds=False)
        return ConvolutionFields(projection, self._pointer(module.base_kernel), taps, groups)

    def _pack(self, module: nn.Module, *names: str, rounds: bool = True) -> LinearFields:
        """Lay some projections of a module out as one, rounded if weights are and `rounds`."""
        projections, dtype = [cast(nn.Linear, getattr(module, name)) for name in names], self._dtype
        parts: list[Tensor | QuantizedWeight] = [each.weight.detach() for each in projections]
        if self._bits is not None and rounds:
            group, step = best_group(projections[0].in_features), max(1, PIECE // projections[0].in_features)
            pieces = [piece for each in projections for piece in each.weight.detach().split(step)]
            parts = [rounded(piece.to(dtype), self._bits, group, shares=QUICK) for piece in pieces]
        biases = [each.bias.detach().to(dtype) for each in projections if each.bias is not None]
        packed = PackedLinear(lay_out(parts, self.library), torch.cat(biases) if biases else None)
        packed.dtype = dtype
        self._packed.append(packed)  # which owns the memory
        if self._owned:
            end = 0
            for name, each in zip(names, projections, strict=True):
                setattr(module, name, PartOfPacked(packed, slice(end, end := end + each.out_features)))
        return self.library.linear(packed)


@lru_cache(maxsize=256)
def _chain_parents(batch: int, count: int) -> array[int]:
    return numbers(list(range(-1, count - 1)) * batch)


@lru_cache(maxsize=256)
def _slots_from(first: int, batch: int, count: int) -> array[int]:
    """The nodes of all rows, counted through, that are slot `first` or later of their row."""
    return numbers(node for node in range(batch * count) if node % count >= first)
