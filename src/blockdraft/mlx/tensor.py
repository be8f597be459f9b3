"""Torch tensors whose numbers are MLX arrays, on which torch's functions stay lazy.

The engine and the drafters are written with torch. `MLXTensor` lets them work on arrays of MLX as they are: a function
of `FUNCTIONS` becomes a node of MLX's lazy graph, and any other one waits for the numbers and runs in torch, on the
CPU. So a drafter's guesses can be scored before anybody has seen them, and a greedy cycle waits once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from blockdraft.nn.foreign_tensor import ForeignTensor, converted

try:
    mx: Any = import_module("mlx.core")
except ImportError:  # the extra `mlx` is missing, and nothing below is called
    mx = None

Array: TypeAlias = Any  # mx.array

LOCK = threading.RLock()  # MLX's graph belongs to one thread at a time


@cache
def dtypes() -> dict[torch.dtype, Any]:
    """MLX's dtypes by torch's."""
    names = ("float32", "bfloat16", "float16", "int64", "int32", "uint8", "int8", "int16")
    return {getattr(torch, name): getattr(mx, name) for name in names} | {torch.bool: mx.bool_}


@cache
def _stream() -> Any:
    return mx.new_thread_unsafe_stream(mx.default_device())


@contextmanager
def computing() -> Iterator[None]:
    """Context of everything that makes or evaluates arrays: one thread at a time, on a stream that all threads share.
    MLX's own streams belong to the thread that made them."""
    with LOCK, mx.stream(_stream()):
        yield


class MLXTensor(ForeignTensor):
    """A torch tensor whose numbers are an MLX array, perhaps not computed yet.

    A result never shares memory with another tensor, so writing to a part of one is an error, not a lost write.
    """

    _is_part: bool

    @staticmethod
    def __new__(cls, array: Array, is_part: bool = False) -> MLXTensor:
        kinds = {theirs: ours for ours, theirs in dtypes().items()} | {mx.uint32: torch.int64}
        made: MLXTensor = Tensor._make_wrapper_subclass(
            cls, array.shape, dtype=kinds[array.dtype], device=torch.device("cpu")
        )
        made.array, made._is_part = array.astype(mx.int64) if array.dtype == mx.uint32 else array, is_part
        return made

    @property
    def real(self) -> Tensor:  # type: ignore[override]
        return fetched(self.array)

    @classmethod
    def call(cls, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """As in `ForeignTensor`, lazily where `FUNCTIONS` has the function."""
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(args[0], MLXTensor) and (args[0]._is_part or name not in FUNCTIONS):
            raise NotImplementedError(f"{name} writes to part of an MLX array, or in a way that is not known here.")
        in_place = writes and not isinstance(args[0], MLXTensor)  # of a tensor of torch's own
        if name not in FUNCTIONS or in_place or kwargs.get("stable"):  # MLX promises no stable order
            return super().call(name, func, args, kwargs)
        with computing():
            found = FUNCTIONS[name](*converted(args, in_mlx), **converted(kwargs, in_mlx))
            if writes:
                args[0].array = found
                return args[0]
            is_part = name in PARTS
            return converted(found, lambda value: MLXTensor(value, is_part) if isinstance(value, mx.array) else value)


def fetched(array: Array) -> Tensor:
    """An array's numbers in a tensor of torch. The only place where the host waits for them."""
    with computing():
        mx.eval(array)
        if array.dtype == mx.bfloat16:  # numpy has none
            return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))


def in_mlx(value: Any) -> Any:
    """An array for a tensor, and MLX's dtype for one of torch; other values as they are."""
    if isinstance(value, MLXTensor):
        return value.array
    if isinstance(value, nn.Parameter):
        return weight(value)
    if isinstance(value, Tensor):
        return sent(value)
    return dtypes()[value] if isinstance(value, torch.dtype) else value


def sent(values: Tensor) -> Array:
    """An array of a torch tensor's numbers."""
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        return mx.array(values.contiguous().view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array((values.float() if values.dtype == torch.float64 else values).numpy())


_weights: Any = WeakIdKeyDictionary()  # arrays of weights, by the tensor that they were made of


@dataclass(frozen=True)
class FewBits:
    """A weight in few bits, as `mx.quantize` makes it. The scales are float32 whatever the arithmetic: rounded to half
    precision they move whole groups of weights, and guesses of deep drafters stop being accepted."""

    weight: Array
    scales: Array
    biases: Array
    group_size: int
    bits: int

    def product(self, x: Array) -> Array:
        parts = (self.weight, self.scales, self.biases)
        found = mx.quantized_matmul(
            x.astype(mx.float32), *parts, transpose=True, group_size=self.group_size, bits=self.bits
        )
        return found.astype(x.dtype)


def weight(tensor: Tensor) -> Array | FewBits:
    """The array of a weight, which is copied once."""
    with computing():
        if tensor not in _weights:
            _weights[tensor] = sent(tensor)
        return _weights[tensor]


def round_weight(tensor: Tensor, bits: int, group_size: int) -> None:
    """Keep a weight `[out, in]` in few bits from now on, where `in` is a multiple of the group size."""
    if tensor.size(1) % group_size == 0:
        with computing():
            few = mx.quantize(sent(tensor).astype(mx.float32), group_size=group_size, bits=bits)
            mx.eval(few)
            _weights[tensor] = FewBits(few[0], few[1], few[2], group_size, bits)


# Torch's functions on arrays of MLX. Arguments have torch's names and meaning.


class Found(NamedTuple):
    """As the results of torch's `max`, `sort` and `topk`."""

    values: Array
    indices: Array


def _linear(x: Array, weight: Array | FewBits, bias: Array | None = None) -> Array:
    out = weight.product(x) if isinstance(weight, FewBits) else x @ weight.T
    return out if bias is None else out + bias


def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Found:
    order = mx.argpartition(-x, k - 1, axis=dim)[..., :k] if k < x.shape[-1] else mx.argsort(-x, axis=dim)
    values = mx.take_along_axis(x, order, axis=dim)
    within = mx.argsort(-values, axis=dim)
    return Found(mx.take_along_axis(values, within, axis=dim), mx.take_along_axis(order, within, axis=dim))


def _sort(x: Array, dim: int = -1, descending: bool = False) -> Found:
    order = mx.argsort(-x if descending else x, axis=dim)
    return Found(mx.take_along_axis(x, order, axis=dim), order)


def _max(x: Array, dim: int, keepdim: bool = False) -> Found:
    return Found(mx.max(x, axis=dim, keepdims=keepdim), mx.argmax(x, axis=dim, keepdims=keepdim))


def _scatter(x: Array, dim: int, index: Array, src: Any) -> Array:
    return mx.put_along_axis(x, index, mx.array(src, x.dtype) if not isinstance(src, mx.array) else src, axis=dim)


def _gather(x: Array, dim: int, index: Array) -> Array:
    cut = tuple(slice(None) if axis == dim % x.ndim else slice(n) for axis, n in enumerate(index.shape))
    return mx.take_along_axis(x[cut], index, axis=dim)


def _clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    return mx.clip(x, min, max)


def _expand(x: Array, *sizes: Any) -> Array:
    wanted = list(sizes[0] if isinstance(sizes[0], tuple | list) else sizes)
    new = len(wanted) - x.ndim
    return mx.broadcast_to(x, [x.shape[i - new] if n == -1 else n for i, n in enumerate(wanted)])


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    return mx.flatten(x, start_dim, end_dim)


def _index(x: Array, index: Any) -> Array:
    return x[_indices(index)]


def _write(x: Array, index: Any, values: Any) -> Array:
    x[_indices(index)] = values.astype(x.dtype) if isinstance(values, mx.array) else values
    return x


def _indices(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_indices(each) for each in index)
    return mx.array(index) if isinstance(index, list) else index


def _to(x: Array, *how: Any, dtype: Any = None, **_: Any) -> Array:
    wanted = dtype or next((each for each in how if isinstance(each, mx.Dtype)), None)
    return x if wanted is None else x.astype(wanted)


def _index_copy(x: Array, dim: int, index: Array, values: Array) -> Array:
    return mx.put_along_axis(x, mx.broadcast_to(index, values.shape), values, axis=dim)


def _attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None, enable_gqa: bool = False
) -> Array:
    scale = query.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=attn_mask)


def _pad(x: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    return mx.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, constant_values=value or 0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__getitem__": _index,
    "__setitem__": _write,
    "index_copy_": _index_copy,
    # Arithmetic.
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "__rsub__": lambda x, y: y - x,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "matmul": lambda x, y: x @ y,
    "minimum": lambda x, y: mx.minimum(x, y),
    "clamp": _clamp,
    "clamp_min": lambda x, min: mx.maximum(x, min),
    "clamp_max": lambda x, max: mx.minimum(x, max),
    "exp": lambda x: mx.exp(x),
    "log": lambda x: mx.log(x),
    "tanh": lambda x: mx.tanh(x),
    "sigmoid": lambda x: mx.sigmoid(x),
    "silu": lambda input, inplace=False: input * mx.sigmoid(input),
    "where": lambda condition, x, y: mx.where(condition, x, y),
    "masked_fill": lambda x, mask, value: mx.where(mask, mx.array(value, x.dtype), x),
    # Shapes.
    "unsqueeze": lambda x, dim: mx.expand_dims(x, dim),
    "squeeze": lambda x, dim: mx.squeeze(x, dim),
    "transpose": lambda x, dim0, dim1: mx.swapaxes(x, dim0, dim1),
    "mT": lambda x: mx.swapaxes(x, -1, -2),
    "expand": _expand,
    "flatten": _flatten,
    "unflatten": lambda x, dim, sizes: mx.unflatten(x, dim, tuple(sizes)),
    "chunk": lambda x, chunks, dim=0: mx.split(x, chunks, axis=dim),
    "unbind": lambda x, dim=0: [mx.squeeze(part, dim) for part in mx.split(x, x.shape[dim], axis=dim)],
    "repeat_interleave": lambda x, repeats, dim: mx.repeat(x, repeats, axis=dim),
    "cat": lambda tensors, dim=0: mx.concatenate(list(tensors), axis=dim),
    "stack": lambda tensors, dim=0: mx.stack(list(tensors), axis=dim),
    "pad": _pad,
    # Choosing.
    "gather": _gather,
    "scatter": _scatter,
    "index_select": lambda x, dim, index: mx.take(x, index, axis=dim),
    "topk": _topk,
    "sort": _sort,
    "max": _max,
    "amax": lambda x, dim, keepdim=False: mx.max(x, axis=dim, keepdims=keepdim),
    # Sums.
    "sum": lambda x, dim, keepdim=False: mx.sum(x, axis=dim, keepdims=keepdim),
    "cumsum": lambda x, dim: mx.cumsum(x, axis=dim),
    "cumprod": lambda x, dim: mx.cumprod(x, axis=dim),
    "softmax": lambda x, dim, **_: mx.softmax(x.astype(mx.float32), axis=dim),
    "logsumexp": lambda x, dim, keepdim=False: mx.logsumexp(x, axis=dim, keepdims=keepdim),
    "log_softmax": lambda x, dim, **_: x - mx.logsumexp(x, axis=dim, keepdims=True),
    # Dtypes and devices, of which there is one.
    "to": _to,
    "float": lambda x: x.astype(mx.float32),
    "cpu": lambda x: x,
    "new_full": lambda x, size, fill_value: mx.full(size, fill_value, dtype=x.dtype),
    # Layers.
    "linear": _linear,
    "embedding": lambda input, weight, *_, **__: weight[input],
    "scaled_dot_product_attention": _attention,
    "rms_norm": lambda input, normalized_shape, weight=None, eps=1e-6: mx.fast.rms_norm(input, weight, eps),
}
# Functions whose results share memory with their input in torch, and not in MLX.
PARTS = {"__getitem__", "unsqueeze", "squeeze", "transpose", "mT", "expand", "flatten", "unflatten"}
PARTS |= {"chunk", "unbind", "to", "float", "cpu"}
