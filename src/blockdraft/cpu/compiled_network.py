"""What compiled draft networks have in common: weights laid out from those of a network, and calls about its rows."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.cpu.build import build
from blockdraft.cpu.compiled import EVERYWHERE, CompiledDecoder, CompiledLayers, address
from blockdraft.cpu.library import KINDS, CallFields, LayerFields, Library, LinearFields
from blockdraft.nn.cache import KVCache
from blockdraft.nn.packed import PackedLinear, fits_bfloat16, lay_out
from blockdraft.nn.quantized import PIECE, QuantizedWeight, best_group
from blockdraft.nn.rounding import QUICK, rounded


@dataclass(frozen=True)
class Beside:
    """A compiled target, as the runners of draft networks use it.

    Attributes:
        embed, head: The target's, with its own names for tokens and hidden states.
        head_dim: Of the target's attention.
        dtype: Of the target, in which drafters compute too.
        bits: To which weights of drafters are rounded; None leaves them as they are.
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


def why_not_compiled(weight: Tensor, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no draft network is compiled that has such weights and heads; None where one may be."""
    if weight.device.type != "cpu":
        return f"it is for CPUs, and the device is {weight.device}"
    if dtype not in KINDS:
        return f"it knows float32 and bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    return f"heads of {head_dim} are no multiple of 4" if head_dim % 4 else None


def library_for(
    weights: Iterable[Tensor], dtype: torch.dtype, store: torch.dtype, head_dim: int
) -> tuple[Library | None, str | None]:
    """A library for a network's weights, or why there is none, which is also logged. Weights in float32 that bfloat16
    holds as well are kept in it, for the same numbers in half of the memory.

    Args:
        store: Dtype of keys and values.
    """
    halved = dtype == torch.float32 and all(fits_bfloat16(each) for each in weights if each.ndim == 2)
    made = build(torch.bfloat16 if halved else dtype, store, head_dim)
    library = made.library()
    if library is None:
        logging.getLogger(__name__).warning("The drafter runs uncompiled, which is slower: %s.", made.reason)
    return library, made.reason


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


def laid_out(
    places: Sequence[tuple[nn.Module, str]],
    library: Library,
    dtype: torch.dtype,
    bits: int | None = None,
    owned: bool = False,
) -> PackedLinear:
    """Some projections as one, side by side.

    Args:
        places: Each an `nn.Linear`, by its module and name.
        dtype, bits, owned: As in `CompiledNetwork`.
    """
    projections = [cast(nn.Linear, getattr(module, name)) for module, name in places]
    parts: list[Tensor | QuantizedWeight] = [each.weight.detach() for each in projections]
    if bits is not None:
        group, step = best_group(projections[0].in_features), max(1, PIECE // projections[0].in_features)
        pieces = [piece for each in projections for piece in each.weight.detach().split(step)]
        parts = [rounded(piece.to(dtype), bits, group, shares=QUICK) for piece in pieces]
    biases = [each.bias.detach().to(dtype) for each in projections if each.bias is not None]
    packed = PackedLinear(lay_out(parts, library), torch.cat(biases) if biases else None)
    packed.dtype = dtype
    end = 0
    for (module, name), each in zip(places, projections, strict=True):
        if owned:
            setattr(module, name, PartOfPacked(packed, slice(end, end := end + each.out_features)))
    return packed


class CompiledNetwork(CompiledLayers):
    """Layers of a draft network. Arithmetic is float32, whatever the dtype.

    Args:
        library: Built for the dtype of the weights, and the head size.
        config: With the shape of the layers.
        dtype: Of the arithmetic that is compared with, to which weights are rounded first.
        bits: To which weights are rounded, if they are.
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
        self._bits, self._owned = bits, owned

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        heads, slot = self.config.num_key_value_heads, self.library.slot_size(self.config.head_dim)
        return 2 * len(self._layers) * int(heads) * slot * self.library.store_dtype.itemsize * batch * capacity

    def weight_bytes(self) -> int:
        return sum(each.nbytes for each in self._packed) + sum(each.nbytes for each in self._alive)

    def _lay_out(self, own: LayerFields, layer: Any) -> None:
        """A layer's projections and norms, as draft layers name them."""
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

    def _call(
        self, state: KVCache, batch: int, count: int, lengths: array[int], starts: array[int], done: int = 0
    ) -> tuple[CallFields, int]:
        """A call about N nodes behind each row's committed tokens and `done` earlier nodes; and the slots that it
        reaches."""
        config, end = self.config, state.check_room(done + count)
        size = self.library.slot_size(config.head_dim)
        shape = (len(self._layers), 2 * config.num_key_value_heads, size)
        memory = state.memory(*shape, torch.empty(0, dtype=self.library.store_dtype))
        assert len(lengths) == batch, (state.lengths, batch)
        call = CallFields(lengths=address(lengths), starts=address(starts), batch=batch, nodes=count, done=done)
        call.store, call.threads, call.slots = memory.data_ptr(), torch.get_num_threads(), memory.size(2)
        call.layer_stride, call.head_stride = memory.stride()[:2]
        return call, end

    def _pointer(self, weight: Tensor) -> int:
        return super()._pointer(weight.to(self._dtype))

    def _pack(self, module: nn.Module, *names: str, rounds: bool = True) -> LinearFields:
        """Lay some projections of a module out as one, rounded if weights are and `rounds`."""
        places = [(module, name) for name in names]
        packed = laid_out(places, self.library, self._dtype, self._bits if rounds else None, self._owned)
        self._packed.append(packed)  # which owns the memory
        return self.library.linear(packed)
