"""Key/value cache in JAX arrays of static shape, and torch tensors whose values are still on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.foreign_tensor import ForeignTensor
from blockdraft_jax.model import MIN_SLOTS, Array, CacheView, Memory, ShardedLayout, bucket, jax, jit, jnp

NOWHERE = 2**30  # start of a sequence that pads a batch; nothing is read or written there


class Largest(NamedTuple):
    """Result of `max` and `topk`, with torch's field names."""

    values: Any
    indices: Any


# Functions of each element or over the last dimension that run on the device, so that the host fetches fewer numbers.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mul": lambda x, factor: x * factor,
    "div": lambda x, divisor: x / divisor,
    "tanh": lambda x: jnp.tanh(x),
    "float": lambda x: x.astype(jnp.float32),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, axis=-1),
    "amax": lambda x: jnp.max(x, axis=-1),
    "max": lambda x: Largest(jnp.max(x, axis=-1), jnp.argmax(x, axis=-1).astype(jnp.int32)),
    "topk": lambda x, k: Largest(*jax.lax.top_k(x, k)),
}


@partial(jit, static_argnums=(0, 2))
def _on_device(name: str, x: Array, args: tuple[Any, ...]) -> Any:
    return FUNCTIONS[name](x, *args)


class JaxTensor(ForeignTensor):
    """A torch tensor whose values are a JAX array, which may be padded at the end of each dimension.

    `FUNCTIONS` and slices `x[:, :n]` stay on the device. Other functions of torch fetch the values and run on the host.
    """

    _real: Tensor | None

    @staticmethod
    def __new__(cls, array: Array, shape: Sequence[int]) -> JaxTensor:
        dtype = getattr(torch, "int64" if array.dtype == jnp.int32 else str(array.dtype))
        made: JaxTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.array, made._real = array, None
        return made

    @property
    def real(self) -> Tensor:  # type: ignore[override]
        if self._real is None:
            values = np.asarray(jax.device_get(self.array))[tuple(slice(size) for size in self.shape)]
            is_bfloat16 = values.dtype == jnp.bfloat16  # numpy has none
            fetched = torch.from_numpy(np.array(values.view(np.int16) if is_bfloat16 else values))
            self._real = fetched.view(torch.bfloat16) if is_bfloat16 else fetched.to(self.dtype)
        return self._real

    @classmethod
    def call(cls, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        if isinstance(x, JaxTensor):
            if name == "__getitem__" and (count := _leading_nodes(args[1])) is not None:
                return JaxTensor(x.array, (x.size(0), min(count, x.size(1)), *x.shape[2:]))
            numbers = all(type(argument) in (int, float) for argument in args[1:])
            if name in FUNCTIONS and numbers and kwargs in ({}, {"dim": -1}) and x.size(-1) == x.array.shape[-1]:
                out = _on_device(name, x.array, tuple(args[1:]))
                return jax.tree.map(lambda array: JaxTensor(array, (*x.shape[:-1], *array.shape[x.ndim - 1 :])), out)
        return super().call(name, func, args, kwargs)


def _leading_nodes(index: Any) -> int | None:
    """Return n for the index of `x[:, :n]`, else None."""
    match index:
        case (slice(start=None, stop=None), slice(start=None, stop=int(count), step=None)) if count >= 0:
            return int(count)
    return None


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
        arrays = tuple(jnp.zeros(shape, dtype, device=layout.sharding(axes, shape)) for shape in shapes)
        self._shared: list[Memory] = [arrays]  # one list for all views
        self.pending: Memory | None = None

    @property
    def arrays(self) -> Memory:
        """Keys, values and hidden states. A function that donates them must assign its result."""
        return self._shared[0]

    @arrays.setter
    def arrays(self, memory: Memory) -> None:
        self._shared[0] = memory

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)

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
