"""Base of compiled draft networks, and what they borrow from a compiled target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.compiled_decoder import (
    EVERYWHERE,
    CompiledDecoder,
    CompiledLayers,
    address,
    numbers,
    why_not_compiled,
)
from blockdraft.kernels.cpu.library import CallFields, LayerFields, Library, LinearFields, ModelFields
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_network import DraftHost
from blockdraft.nn.layers import ReducedHead
from blockdraft.nn.packed import PackedLinear, fits_bfloat16, pack_weights
from blockdraft.nn.quantization import LEAST_GROUP, PIECE, QuantizedWeight, best_group
from blockdraft.nn.quantize_weight import QUICK, quantize_weight


class NotCompiled(Exception):
    """A draft network that cannot be compiled; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class CompiledHost(DraftHost):
    """What a compiled draft network borrows from a compiled target.

    Attributes:
        decoder: The target's compiled forward pass.
        head_dim: Size of the target's attention heads.
        bits: Bits to which weights of drafters are quantized; None leaves them unquantized.
        head_rows: Function from tokens `[n]` int64 to rows `[n, H]` of the target's head.
    """

    decoder: CompiledDecoder
    head_dim: int
    bits: int | None = None
    head_rows: Callable[[Tensor], Tensor] | None = None

    @property
    def reduced_head(self) -> ReducedHead | None:
        """The own head, where a library can run it."""
        return self.own_head if isinstance(self.own_head, ReducedHead) else None

    def choose_library(self, network: nn.Module, head_dim: int) -> tuple[Library, int | None]:
        """Return the library for a draft network, and the bits to which its weights are quantized, or None.

        Weights are quantized like those of the target where input sizes are multiples of the group size and the
        target's library fits the heads. Otherwise float32 weights that bfloat16 represents exactly are stored in it.

        Args:
            head_dim: Size of the network's attention heads.

        Raises:
            NotCompiled: No library runs the network. A missing compiler is also logged.
        """
        weights = [*network.state_dict().values()]
        weights += [] if self.reduced_head is None else [self.reduced_head.weight]
        reason = why_not_compiled(self.dtype, weights[0].device, head_dim)
        if reason is not None:
            raise NotCompiled(reason)
        target = self.decoder.library
        store = torch.int8 if target.store_dtype == torch.int8 else self.dtype
        inputs = {module.in_features for module in network.modules() if isinstance(module, nn.Linear)}
        fits = all(size % LEAST_GROUP == 0 for size in inputs) and head_dim % target.lanes == 0
        if self.bits is not None and fits and target.store_dtype == store:
            return target, self.bits
        halved = self.dtype == torch.float32 and all(fits_bfloat16(weight) for weight in weights if weight.ndim == 2)
        made = build(torch.bfloat16 if halved else self.dtype, store, head_dim, inputs=self.dtype)
        library = made.library()
        if library is None:
            logging.getLogger(__name__).warning("The drafter runs uncompiled, which is slower: %s.", made.reason)
            raise NotCompiled(made.reason)
        return library, None


def pack_together(
    projections: Sequence[nn.Linear], library: Library, dtype: torch.dtype, bits: int | None = None, owned: bool = False
) -> PackedLinear:
    """Pack several projections as one layer, which concatenates their outputs.

    Args:
        dtype: Dtype to which weights are rounded first.
        bits: Bits to which they are quantized then, or None.
        owned: Whether to free the projections' own weights.
    """
    weights: list[Tensor | QuantizedWeight] = [projection.weight.detach() for projection in projections]
    if bits is not None:
        group, step = best_group(projections[0].in_features), max(1, PIECE // projections[0].in_features)
        pieces = [piece for projection in projections for piece in projection.weight.detach().split(step)]
        weights = [quantize_weight(piece.to(dtype), bits, group, shares=QUICK) for piece in pieces]
    biases = [projection.bias.detach().to(dtype) for projection in projections if projection.bias is not None]
    packed = PackedLinear(pack_weights(weights, library), torch.cat(biases) if biases else None)
    packed.dtype = dtype
    if owned:
        for projection in projections:
            projection.weight = projection.bias = None  # type: ignore[assignment]
    return packed


class CompiledNetwork(CompiledLayers):
    """Compiled layers of a draft network. Sums are in float32, whatever the dtype.

    Args:
        network: Network whose weights are copied into the library's layout and must not change afterwards.
        host: The compiled target.
        count: Number of layers.
        owned: As in `Target.runner`.

    Attributes:
        bits: Bits to which weights are quantized; None where they are not.
        quantized_layers: Names of the linear layers whose weights are quantized.

    Raises:
        NotCompiled: As in `CompiledHost.choose_library`.
    """

    compile_reason: str | None = None

    def __init__(self, network: Any, host: CompiledHost, count: int, owned: bool) -> None:
        self._begin(network, host, count, owned)

    def _begin(self, network: Any, host: CompiledHost, count: int, owned: bool) -> None:
        """Choose the library, and borrow what the target lends."""
        self.config: Any = network.config
        library, self.bits = self._choose_library(network, host)
        super().__init__(library, count, EVERYWHERE)
        self._dtype, self._owned = host.dtype, owned
        self._packed: list[PackedLinear] = []
        self._names = {module: name for name, module in network.named_modules()}
        self.quantized_layers: set[str] = set()
        # A target that uses the same library lends its embedding, and its head unless there is one of another kind.
        # The reference keeps alive the memory that the model's fields point to.
        lends = host.decoder.library is library and host.own_head is host.reduced_head and host.decoder.lends_head
        self._target = host.decoder if lends else None
        self._reduced = host.reduced_head if lends else None

    def _choose_library(self, network: Any, host: CompiledHost) -> tuple[Library, int | None]:
        """Return as `CompiledHost.choose_library`."""
        return host.choose_library(network, self.config.head_dim)

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        heads, slot = self.config.num_key_value_heads, self.library.slot_size(self.config.head_dim)
        return 2 * len(self._layers) * int(heads) * slot * self.library.store_dtype.itemsize * batch * capacity

    def weight_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._packed) + sum(owner.nbytes for owner in self._owners)

    def _model_fields(self, config: Any, head: LinearFields | None, **fields: Any) -> ModelFields:
        """Return the fields of the model with the lent embedding, and the given head or else the lent one.

        Without fields of its shape, that is the usual one of a draft network.
        """
        lent_embedding, lent_head = LinearFields(), LinearFields()
        if self._target is not None:
            lent_embedding, lent_head = self._target.embedding, self._target.head
        if "heads" not in fields:
            fields |= {
                "num_layers": len(self._layers),
                "hidden": config.hidden_size,
                "heads": config.num_attention_heads,
                "kv_heads": config.num_key_value_heads,
                "head_dim": config.head_dim,
                "inner": config.intermediate_size,
                "attention_scale": config.head_dim**-0.5,
            }
        return ModelFields(
            layers=self._layers,
            embedding=lent_embedding,
            head=lent_head if head is None else head,
            eps=config.rms_norm_eps,
            **fields,
        )

    def _pack_layer(self, own: LayerFields, layer: Any) -> None:
        """Pack projections and norms of a draft layer, named as in `nn/draft_network.py`."""
        attention, mlp = layer.self_attn, layer.mlp
        own.qkv = self._pack(attention.q_proj, attention.k_proj, attention.v_proj)
        own.output = self._pack(attention.o_proj)
        own.gate_up = self._pack(mlp.gate_proj, mlp.up_proj)
        own.down = self._pack(mlp.down_proj)
        own.before_attention = self._pointer(layer.input_layernorm.weight)
        own.before_mlp = self._pointer(layer.post_attention_layernorm.weight)
        if not isinstance(attention.q_norm, nn.Identity):
            own.query_norm = self._pointer(attention.q_norm.weight)
            own.key_norm = self._pointer(attention.k_norm.weight)

    def _call(self, state: KVCache, batch: int, count: int, done: int = 0) -> tuple[CallFields, int]:
        """Return a call on `count` nodes per sequence, and how many KV slots its sequences reach.

        The nodes follow the committed tokens of each sequence and `done` earlier nodes.
        """
        config, end = self.config, state.check_room(done + count)
        size = self.library.slot_size(config.head_dim)
        shape = (len(self._layers), 2 * config.num_key_value_heads, size)
        memory = state.memory(*shape, self.no_slots)
        lengths, starts = numbers(state.lengths), numbers(state.starts)
        assert len(lengths) == batch, (state.lengths, batch)
        call = CallFields(
            lengths=address(lengths),
            starts=address(starts),
            batch=batch,
            nodes=count,
            done=done,
            slots=memory.size(2),
            store=memory.data_ptr(),
            layer_stride=memory.stride(0),
            head_stride=memory.stride(1),
        )
        call.owners = lengths, starts
        return call, end

    def _pointer(self, weight: Tensor) -> int:
        """Return a pointer to the weight in float32, rounded to the network's dtype, which this object owns."""
        return self._exact_pointer(weight.to(self._dtype))

    def _pack(self, *projections: nn.Linear, quantize: bool = True) -> LinearFields:
        """Pack projections together, quantized to `bits` unless `quantize` is False."""
        bits = self.bits if quantize else None
        packed = pack_together(projections, self.library, self._dtype, bits, self._owned)
        self._packed.append(packed)  # it owns the memory
        if bits is not None:
            self._note_quantized(*projections)
        return self.library.linear(packed)

    def _note_quantized(self, *projections: nn.Linear) -> None:
        if self.bits is not None:
            self.quantized_layers |= {self._names[layer] for layer in projections if layer in self._names}
