"""Torch tensors whose values are JAX arrays, still on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.nn.foreign_tensor import ForeignTensor
from blockdraft_jax.model import Array, jax, jit, jnp


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
