"""Key/value memory in JAX arrays of one static shape, and torch tensors whose numbers are still on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from blockdraft.jax.model import LEAST_SLOTS, Array, Layout, Memory, Rows, bucket, jax, jnp, write
from blockdraft.nn.cache import KVCache
from blockdraft.nn.foreign import ForeignTensor

NOWHERE = 2**30  # first slot of a row that pads a batch, of which nothing is read or written


class JaxTensor(ForeignTensor):
    """A torch tensor whose numbers are a JAX array, which is padded at the end of each dimension. A function of torch
    waits for the numbers and runs on the host, but for one that cuts off what is behind a number of nodes."""

    _real: Tensor | None

    @staticmethod
    def __new__(cls, array: Array, shape: Sequence[int]) -> JaxTensor:
        dtype = getattr(torch, "int64" if array.dtype == jnp.int32 else str(array.dtype))
        made: JaxTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.array, made._real = array, None
        return made

    @property
    def real(self) -> Tensor:  # type: ignore[override]
        """As in `ForeignTensor`. The only place where the host waits for an array's numbers."""
        if self._real is None:
            numbers = np.asarray(jax.device_get(self.array))[tuple(slice(size) for size in self.shape)]
            half = numbers.dtype == jnp.bfloat16  # numpy has none
            found = torch.from_numpy(np.array(numbers.view(np.int16) if half else numbers))
            self._real = found.view(torch.bfloat16) if half else found.to(self.dtype)
        return self._real

    @classmethod
    def call(cls, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "__getitem__" and (cut := _beginning(args[0], args[1])) is not None:
            return JaxTensor(args[0].array, cut)
        return super().call(name, func, args, kwargs)


def _beginning(x: Any, index: Any) -> tuple[int, ...] | None:
    """Shape of `x[:, :n]`, which remains on the device; None for other indices."""
    if not isinstance(x, JaxTensor) or not isinstance(index, tuple) or len(index) != 2 or index[0] != slice(None):
        return None
    cut = index[1]
    whole = isinstance(cut, slice) and cut.start is None and cut.step is None and type(cut.stop) is int
    return (x.size(0), min(cut.stop, x.size(1)), *x.shape[2:]) if whole and cut.stop >= 0 else None


class JaxCache(KVCache):
    """A `KVCache` in JAX arrays, keys and values `[layers, kv_heads, slots, D]` and, where asked for, a feature of each
    token, `[1, 1, slots, H]`. Every write donates them.

    A forward writes nothing: it leaves its nodes here, and `commit` writes those of the path. So there is nothing to
    roll back, and a tree costs a commit no more than a chain.

    Args:
        layers, kv_heads, head_dim, dtype: Of the model.
        layout: Where the arrays lie.
        hidden_states: Size of a feature; 0 is none.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any,
        layout: Layout,
        hidden_states: int = 0,
    ) -> None:
        super().__init__(batch, capacity)
        # Rounded up, so that engines of similar sizes share what is compiled.
        slots = -(-max(self._slots, 1) // LEAST_SLOTS) * LEAST_SLOTS
        shapes = [(layers, kv_heads, slots, head_dim)] * 2 + ([(1, 1, slots, hidden_states)] if hidden_states else [])
        axes, self._layout = (None, "kv_heads", None, None), layout
        stores = tuple(jnp.zeros(shape, dtype, device=layout.sharding(axes, shape)) for shape in shapes)
        self._held: list[Memory] = [stores]  # shared by all views
        self._nodes: Memory | None = None

    @property
    def arrays(self) -> Memory:
        """Keys, values and features. Whoever gives them away assigns what comes back."""
        return self._held[0]

    @arrays.setter
    def arrays(self, memory: Memory) -> None:
        self._held[0] = memory

    @property
    def nbytes(self) -> int:
        return sum(int(each.nbytes) for each in self.arrays)

    def where(self) -> Rows:
        """Places of the rows, padded to a bucket of rows."""
        batch, total = bucket(len(self.rows)), self.arrays[0].shape[2]
        firsts, lengths = np.full(batch, NOWHERE, np.int32), np.zeros(batch, np.int32)
        firsts[: len(self.rows)], lengths[: len(self.rows)] = self.rows, self.lengths
        slots = min(total, bucket(max(self.lengths, default=0), LEAST_SLOTS))
        firsts, lengths = self._layout.put((firsts, lengths))
        return Rows(firsts, lengths, slots)

    def leave(self, nodes: Memory) -> None:
        """Keep what the nodes of a forward have for their slots, until the commit."""
        self._nodes = nodes

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        if any(path):
            assert self._nodes is not None, "commit follows a forward"
            count, (batch, nodes) = max(map(len, path)), self._nodes[0].shape[1:3]
            source = np.zeros((batch, min(bucket(count), nodes)), np.int32)
            slots = np.full(source.shape, self.arrays[0].shape[2], np.int32)
            for number, (row, kept) in enumerate(zip(self.rows, path, strict=True)):
                source[number, : len(kept)] = list(kept)
                slots[number, : len(kept)] = row + self._lengths[row] + np.arange(len(kept))
            self.arrays = _write(self._layout, self.arrays, self._nodes, *self._layout.put((source, slots)))
        self.advance([len(kept) for kept in path])

    def advance(self, counts: Sequence[int]) -> None:
        """Count as many tokens of each row as committed, whose keys and values are written."""
        self._nodes = None
        for row, count in zip(self.rows, counts, strict=True):
            self._lengths[row] += count

    def copy(self, source: int, row: int, length: int) -> None:
        assert length <= self._lengths[source] and length <= self._capacities[row] and self._lengths[row] == 0
        size = bucket(length, LEAST_SLOTS)
        self._edit(_copy, self._layout.put(np.array([source, row, length], np.int32)), size)
        self._lengths[row] = length

    def zero_slots(self, row: int, whole: bool = False) -> None:
        first, end = row + (0 if whole else self._lengths[row]), row + self._capacities[row]
        self._edit(_zero_slots, self._layout.put(np.array([first, end], np.int32)))

    def _edit(self, change: Any, *how: Any) -> None:
        self.arrays = tuple(change(store, *how) for store in self.arrays)


F = TypeVar("F", bound=Callable[..., Any])


def jitted(**how: Any) -> Callable[[F], F]:
    """`jax.jit` at the first call, since JAX may not be installed."""

    def decorate(function: F) -> F:
        compiled = cache(lambda: jax.jit(function, **how))
        return cast(F, wraps(function)(lambda *args: compiled()(*args)))

    return decorate


@jitted(static_argnums=0, donate_argnums=1)
def _write(layout: Layout, memory: Memory, nodes: Memory, path: Array, slots: Array) -> Memory:
    return write(layout, memory, nodes, path, slots)


@jitted(static_argnums=2, donate_argnums=0)
def _copy(store: Array, where: Array, size: int) -> Array:
    """Copy tokens from one row to another, `where` is source, row and length, through a window of `size` slots."""
    source, row, length = where
    at = jnp.arange(size, dtype=jnp.int32)
    slots = jnp.where(at < length, row + at, store.shape[2])
    return store.at[:, :, slots].set(store[:, :, jnp.clip(source + at, 0, store.shape[2] - 1)], mode="drop")


@jitted(donate_argnums=0)
def _zero_slots(store: Array, where: Array) -> Array:
    at = jnp.arange(store.shape[2], dtype=jnp.int32)[None, None, :, None]
    return jnp.where((at >= where[0]) & (at < where[1]), jnp.zeros((), store.dtype), store)
