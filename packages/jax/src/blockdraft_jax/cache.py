"""Key/value cache in JAX arrays of static shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft_jax.model import MIN_SLOTS, Array, CacheView, Memory, ShardedLayout, as_numpy, bucket, jax, jit, jnp
from blockdraft_jax.tensor import JaxTensor

NOWHERE = 2**30  # start of a sequence that pads a batch; nothing is read or written there


class JaxCache(KVCache):
    """A `KVCache` in JAX arrays.

    It holds keys and values `[layers, kv_heads, KV slots, D]`, and optionally one hidden state per token, `[1, 1, KV
    slots, H]`. Every write donates them.

    A forward leaves the keys and values of its nodes in `pending`, and `commit` writes those of the accepted path. So
    rollback is free, and a tree costs a commit no more than a chain.

    Args:
        config: Shape of the model.
        dtype, layout: Dtype of the arrays, and their placement.
        hidden_size: Size H of the hidden states; 0 stores none.
    """

    def __init__(
        self, batch: int, capacity: int, config: DecoderConfig, dtype: Any, layout: ShardedLayout, hidden_size: int = 0
    ) -> None:
        super().__init__(batch, capacity)
        slots = -(-max(self._slots, 1) // MIN_SLOTS) * MIN_SLOTS  # rounded up, so that engines share compiled code
        shapes = [(len(config.layers), config.num_kv_heads, slots, config.head_dim)] * 2
        shapes += [(1, 1, slots, hidden_size)] if hidden_size else []
        axes, self._layout = (None, "kv_heads", None, None), layout
        for number, shape in enumerate(shapes):
            self._stores[str(number)] = jnp.zeros(shape, dtype, device=layout.sharding(axes, shape))
        self.pending: Memory | None = None

    @property
    def arrays(self) -> Memory:
        """Keys, values and hidden states. A function that donates them must assign its result."""
        return tuple(self._stores.values())

    @arrays.setter
    def arrays(self, memory: Memory) -> None:
        self._stores.update(zip(self._stores, memory, strict=True))

    def view_of_batch(self) -> CacheView:
        """Return the places of the sequences, padded to a power of two."""
        batch = bucket(len(self.starts))
        starts, lengths = np.full(batch, NOWHERE, np.int32), np.zeros(batch, np.int32)
        starts[: len(self.starts)], lengths[: len(self.starts)] = self.starts, self.lengths
        slots = min(self.arrays[0].shape[2], bucket(max(self.lengths, default=0), MIN_SLOTS))
        starts, lengths = self._layout.put((starts, lengths))
        return CacheView(starts, lengths, slots)

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        if any(path):
            assert self.pending is not None, "commit follows a forward"
            batch, nodes = self.pending[0].shape[1:3]
            source = np.zeros((batch, min(bucket(max(map(len, path))), nodes)), np.int32)
            slots = np.full(source.shape, self.arrays[0].shape[2], np.int32)  # beyond the memory: not written
            for number, (start, length, accepted) in enumerate(zip(self.starts, self.lengths, path, strict=True)):
                source[number, : len(accepted)] = list(accepted)
                slots[number, : len(accepted)] = start + length + np.arange(len(accepted))
            self.arrays = _write(self._layout, self.arrays, self.pending, *self._layout.put((source, slots)))
        self.pending = None

    def copy_slots(self, source: int, start: int, count: int) -> None:
        span = self._layout.put(np.array([source, start, count], np.int32))
        self.arrays = tuple(_copy(store, span, bucket(count, MIN_SLOTS)) for store in self.arrays)

    def zero(self, first: int, end: int) -> None:
        span = self._layout.put(np.array([first, end], np.int32))
        self.arrays = tuple(_zero(store, span) for store in self.arrays)

    def read_slots(self, store: Array, first: int, end: int) -> Tensor:
        part = store[:, :, first:end]
        return JaxTensor(part, part.shape).real

    def write_slots(self, name: str, first: int, part: Tensor) -> None:
        self._stores[name] = _load(self._stores[name], *self._layout.put((as_numpy(part), np.int32(first))))


@partial(jit, static_argnums=0, donate_argnums=1)
def _write(layout: ShardedLayout, memory: Memory, nodes: Memory, path: Array, slots: Array) -> Memory:
    """Write the nodes `path` `[B, M]` of a forward to the KV slots `slots` `[B, M]`."""

    def put(store: Array, new: Array) -> Array:
        accepted = jnp.take_along_axis(new, path[None, :, :, None, None], axis=2)  # [layers, B, M, kv_heads, D]
        store = store.at[:, :, slots].set(jnp.moveaxis(accepted, 3, 1), mode="drop")
        return layout.place(store, None, "kv_heads")

    return tuple(put(store, new) for store, new in zip(memory, nodes, strict=True))


@partial(jit, static_argnums=2, donate_argnums=0)
def _copy(store: Array, span: Array, size: int) -> Array:
    """Copy tokens between sequences; `span` is source, destination and length, and `size` bounds the length."""
    source, destination, length = span
    at = jnp.arange(size, dtype=jnp.int32)
    slots = jnp.where(at < length, destination + at, store.shape[2])
    return store.at[:, :, slots].set(store[:, :, jnp.clip(source + at, 0, store.shape[2] - 1)], mode="drop")


@partial(jit, donate_argnums=0)
def _zero(store: Array, span: Array) -> Array:
    at = jnp.arange(store.shape[2], dtype=jnp.int32)[None, None, :, None]
    return jnp.where((at >= span[0]) & (at < span[1]), jnp.zeros((), store.dtype), store)


@partial(jit, donate_argnums=0)
def _load(store: Array, part: Array, first: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(store, part.astype(store.dtype), first, axis=2)
