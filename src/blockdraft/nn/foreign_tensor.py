"""Torch tensors backed by arrays of another framework, for backends that compute there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Attributes and functions that need no numbers.
SHAPE = {"shape", "dtype", "device", "ndim", "size", "dim", "__len__", "is_cuda", "requires_grad", "is_floating_point"}
SHAPE |= {"numel", "nbytes", "element_size", "itemsize", "is_leaf", "grad_fn", "layout", "is_sparse", "is_quantized"}
SHAPE |= {"names"}


class ForeignTensor(Tensor):
    """A torch tensor without own memory: shape and dtype are known, and functions of torch are passed to `call`.

    Attributes:
        array: The array of the other framework.
    """

    array: Any

    @property
    @abstractmethod
    def real(self) -> Tensor:  # type: ignore[override]
        """The same numbers in a plain torch tensor. Waits for them."""

    @classmethod
    def call(cls, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function of torch, here computed by torch on the host."""
        return func(*converted(args, in_torch), **converted(kwargs, in_torch))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name in SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.call(name, func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} bypassed torch's functions and reached an array of another framework.")


def in_torch(value: Any) -> Any:
    return value.real if isinstance(value, ForeignTensor) else value


def converted(values: Any, convert: Callable[[Any], Any]) -> Any:
    """Apply a function to values, also inside lists, tuples and dictionaries."""
    if isinstance(values, dict):
        return {name: converted(value, convert) for name, value in values.items()}
    if not isinstance(values, tuple | list):
        return convert(values)
    parts = [converted(value, convert) for value in values]
    return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
