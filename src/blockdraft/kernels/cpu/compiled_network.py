"""Base of compiled draft networks: a network's weights packed for a library, and calls of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.compiled_decoder import EVERYWHERE, CompiledDecoder, CompiledLayers, address, numbers
from blockdraft.kernels.cpu.library import CallFields, LayerFields, Library, LinearFields
from blockdraft.nn.cache import KVCache
from blockdraft.nn.packed import PackedLinear, fits_bfloat16, pack_weights
from blockdraft.nn.quantized import LEAST_GROUP, PIECE, QuantizedWeight, best_group
from blockdraft.nn.rounding import QUICK, rounded


@dataclass(frozen=True)
class Beside:
    """Parts of a compiled target that runners of draft networks use.

    Attributes:
        decoder: The target's compiled forward.
        embed, head: The target's `embed` and `head`.
        head_dim: Size of the target's attention heads.
        dtype: Dtype of the target, in which drafters compute too.
        bits: Bits to which weights of drafters are rounded; None leaves them as they are.
    """

    decoder: CompiledDecoder
    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    head_dim: int
    dtype: torch.dtype
    bits: int | None = None

    @property
    def store(self) -> torch.dtype:
        """Dtype of a drafter's keys and values."""
        return torch.int8 if self.decoder.library.store_dtype == torch.int8 else self.dtype


def library_for(
    weights: Iterable[Tensor], dtype: torch.dtype, store: torch.dtype, head_dim: int
) -> tuple[Library | None, str | None]:
    """A library for a network's weights, and the reason where there is none, which is also logged.

    Weights in float32 that bfloat16 represents exactly are stored in it: the same numbers in half of the memory.

    Args:
        weights: All weights of the network.
        dtype: Dtype of the arithmetic, to which inputs of products are rounded.
        store: Dtype of keys and values.
        head_dim: Size of an attention head.
    """
    halved = dtype == torch.float32 and all(fits_bfloat16(each) for each in weights if each.ndim == 2)
    made = build(torch.bfloat16 if halved else dtype, store, head_dim, inputs=dtype)
    library = made.library()
    if library is None:
        logging.getLogger(__name__).warning("The drafter runs uncompiled, which is slower: %s.", made.reason)
    return library, made.reason


def rounded_beside(network: nn.Module, head_dim: int, beside: Beside) -> bool:
    """Whether a network's weights are rounded like those of the target's layers: where these are, if input sizes are
    multiples of the group size, and the head size is one of the target library's lanes."""
    inputs = {module.in_features for module in network.modules() if isinstance(module, nn.Linear)}
    library = beside.decoder.library
    fits = all(size % LEAST_GROUP == 0 for size in inputs) and head_dim % library.lanes == 0
    return beside.bits is not None and fits and library.store_dtype == beside.store


class PartOfPacked(nn.Module):
    """Substitute for an `nn.Linear` whose weight is part of a packed one. It takes no memory of its own and is slow;
    a deep copy is an `nn.Linear` again.

    Args:
        whole: The packed layer.
        outputs: Output channels of `whole` that are this layer's.
    """

    def __init__(self, whole: PackedLinear, outputs: slice) -> None:
        super().__init__()
        self._whole, self._outputs = [whole], outputs  # the list keeps `whole` from becoming a module of the network
        self.in_features, self.out_features = whole.in_features, outputs.stop - outputs.start

    @property
    def weight(self) -> Tensor:
        return self._whole[0].weight[self._outputs]

    @property
    def bias(self) -> Tensor | None:
        bias = self._whole[0].bias
        return None if bias is None else bias[self._outputs]

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


def pack_together(
    places: Sequence[tuple[object, str]],
    library: Library,
    dtype: torch.dtype,
    bits: int | None = None,
    owned: bool = False,
) -> PackedLinear:
    """Several projections packed as one, their output channels one behind the other.

    Args:
        places: Owner and attribute name of each projection, an `nn.Linear`.
        dtype, bits, owned: As in `CompiledNetwork`.
    """
    projections = [cast(nn.Linear, getattr(module, name)) for module, name in places]
    parts: list[Tensor | QuantizedWeight] = [each.weight.detach() for each in projections]
    if bits is not None:
        group, step = best_group(projections[0].in_features), max(1, PIECE // projections[0].in_features)
        pieces = [piece for each in projections for piece in each.weight.detach().split(step)]
        parts = [rounded(piece.to(dtype), bits, group, shares=QUICK) for piece in pieces]
    biases = [each.bias.detach().to(dtype) for each in projections if each.bias is not None]
    packed = PackedLinear(pack_weights(parts, library), torch.cat(biases) if biases else None)
    packed.dtype = dtype
    end = 0
    for (module, name), each in zip(places, projections, strict=True):
        if owned:
            setattr(module, name, PartOfPacked(packed, slice(end, end := end + each.out_features)))
    return packed


class CompiledNetwork(CompiledLayers):
    """Compiled layers of a draft network. Sums are in float32, whatever the dtype.

    Args:
        library: Library built for the dtype of the weights and the head size.
        config: The network's configuration, which holds the shape of the layers.
        count: Number of layers.
        dtype: Dtype of the uncompiled network, to which weights are rounded first.
        bits: Bits to which weights are rounded then; None leaves them.
        owned: As in `Target.runner`.
    """

    compile_reason: str | None = None

    def __init__(
        self, library: Library, config: Any, count: int, dtype: torch.dtype, bits: int | None, owned: bool
    ) -> None:
        super().__init__(library, count, EVERYWHERE)
        self.config: Any = config
        self._dtype = dtype
        self._packed: list[PackedLinear] = []
        self.bits, self._owned = bits, owned

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        heads, slot = self.config.num_key_value_heads, self.library.slot_size(self.config.head_dim)
        return 2 * len(self._layers) * int(heads) * slot * self.library.store_dtype.itemsize * batch * capacity

    def weight_bytes(self) -> int:
        return sum(each.nbytes for each in self._packed) + sum(each.nbytes for each in self._owners)

    def _pack_layer(self, own: LayerFields, layer: Any) -> None:
        """Pack projections and norms of a draft layer, as `nn/draft_layer.py` names them."""
        attention, mlp = layer.self_attn, layer.mlp
        own.qkv = self._pack(attention, "q_proj", "k_proj", "v_proj")
        own.output = self._pack(attention, "o_proj")
        own.gate_up = self._pack(mlp, "gate_proj", "up_proj")
        own.down = self._pack(mlp, "down_proj")
        own.before_attention = self._pointer(layer.input_layernorm.weight)
        own.before_mlp = self._pointer(layer.post_attention_layernorm.weight)
        if not isinstance(attention.q_norm, nn.Identity):
            own.query_norm = self._pointer(attention.q_norm.weight)
            own.key_norm = self._pointer(attention.k_norm.weight)

    def _call(self, state: KVCache, batch: int, count: int, done: int = 0) -> tuple[CallFields, int]:
        """A call on `count` nodes behind each row's committed tokens and `done` earlier nodes, and how many slots its
        rows reach."""
        config, end = self.config, state.check_room(done + count)
        size = self.library.slot_size(config.head_dim)
        shape = (len(self._layers), 2 * config.num_key_value_heads, size)
        memory = state.memory(*shape, torch.empty(0, dtype=self.library.store_dtype))
        lengths, starts = numbers(state.lengths), numbers(state.rows)
        assert len(lengths) == batch, (state.lengths, batch)
        call = CallFields(
            lengths=address(lengths),
            starts=address(starts),
            batch=batch,
            nodes=count,
            done=done,
            threads=torch.get_num_threads(),
            slots=memory.size(2),
            store=memory.data_ptr(),
            layer_stride=memory.stride(0),
            head_stride=memory.stride(1),
        )
        call.owners = lengths, starts
        return call, end

    def _pointer(self, weight: Tensor) -> int:
        return super()._pointer(weight.to(self._dtype))

    def _pack(self, module: object, *names: str, rounds: bool = True) -> LinearFields:
        """Pack projections of one owner together, rounded to `bits` unless `rounds` is False."""
        places = [(module, name) for name in names]
        packed = pack_together(places, self.library, self._dtype, self.bits if rounds else None, self._owned)
        self._packed.append(packed)  # it owns the memory
        return self.library.linear(packed)
