"""Base of draft networks in JAX: their parameters, their state, and the conversion of arguments to padded arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from blockdraft.nn.decoder_config import DecoderConfig, LayerKind, Rope
from blockdraft.nn.draft_network import DraftHost
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.nn.rotary import rotary_frequencies
from blockdraft_jax.cache import JaxCache, JaxTensor
from blockdraft_jax.model import Array, CacheView, Decoder, Memory, Params, angles, as_numpy, bucket, load_params

NO_LIMIT = np.int32(2**30)  # a draft window that hides nothing


@dataclass(frozen=True, kw_only=True)
class JaxHost(DraftHost):
    """What a draft network in JAX borrows from its target.

    Attributes:
        decoder: The target's decoder.
        params: The target's weights by their checkpoint names.
    """

    decoder: Decoder
    params: Params


class Context(NamedTuple):
    """Arguments that all jitted functions of a draft network share."""

    target_params: Params
    params: Params
    memory: Memory
    view: CacheView


class JaxDraftRunner:
    """A draft network in JAX, whose layers are those of a decoder.

    Args:
        config: Configuration of the network.
        tensors: Weights by the names that they have in a decoder's checkpoint.
        windows: Sliding window of each layer.
        qk_norm: Whether queries and keys are normed.
        hidden_size: Size of the hidden state that is stored per token beside keys and values; 0 stores none.
    """

    compile_reason: str | None = None
    bits = None

    def __init__(
        self,
        config: Any,
        host: JaxHost,
        tensors: Mapping[str, Tensor],
        windows: Sequence[int | None] = (None,),
        qk_norm: bool = True,
        hidden_size: int = 0,
    ) -> None:
        frequencies, scale = rotary_frequencies(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )
        rope = Rope(tuple(frequencies.tolist()), scale)
        layers = DecoderConfig(
            vocab_size=host.decoder.config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            layers=tuple(LayerKind(rope, window) for window in windows),
            norm_eps=config.rms_norm_eps,
            activation="silu",
            query_scale=config.head_dim**-0.5,
            tied_head=True,
            qk_norm=qk_norm,
        )
        self.config, self._host, self._hidden_size = config, host, hidden_size
        self._layout, self._dtype = host.decoder.layout, host.params["model.norm.weight"].dtype
        self.decoder, self.target_decoder = Decoder(layers, self._layout), host.decoder
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        heads = layers.num_heads, layers.num_kv_heads
        self.params = load_params(shapes, tensors.__getitem__, self._dtype, self._layout, *heads)

    def new_state(self, batch: int, capacity: int) -> JaxCache:
        return JaxCache(batch, capacity, self.decoder.config, self._dtype, self._layout, self._hidden_size)

    def state_bytes(self, batch: int, capacity: int) -> int:
        layers = self.decoder.config
        slot = 2 * len(layers.layers) * layers.num_kv_heads * layers.head_dim + self._hidden_size
        return int(batch * capacity * slot * self._dtype.itemsize)

    def weight_bytes(self) -> int:
        return sum(int(weight.nbytes) for weight in self.params.values())  # JAX's copy

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def context(self, state: JaxCache) -> Context:
        return Context(self._host.params, self.params, state.arrays, state.view_of_batch())

    def rotation(self, positions: Array) -> tuple[Array, Array]:
        return angles(self.decoder.config.ropes[0], positions, self._dtype)

    def hidden_states(self, hidden_states: Tensor) -> Array:
        """Return hidden states `[B, N, m * H]` of the target layers, padded to powers of two."""
        batch = bucket(hidden_states.size(0))
        if isinstance(hidden_states, JaxTensor) and hidden_states.array.shape[0] == batch:
            return hidden_states.array
        return self._layout.put(padded(hidden_states, (batch, bucket(hidden_states.size(1)), hidden_states.size(2))))


def padded(tensor: Tensor, shape: Sequence[int]) -> Any:
    """Convert a tensor to numpy, integers to int32, and pad it with zeros at the end of each dimension."""
    values = as_numpy(in_torch(tensor))
    values = values.astype(np.int32) if values.dtype == np.int64 else values
    return np.pad(values, [(0, size - own) for size, own in zip(shape, values.shape, strict=True)])


def draft_window(window: int | None) -> Any:
    """Return the draft window as a number."""
    return NO_LIMIT if window is None else np.int32(window)
