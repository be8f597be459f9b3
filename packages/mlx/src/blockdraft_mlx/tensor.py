"""Torch tensors whose values are MLX arrays, so that draft networks written in torch run lazily in MLX.

The functions of torch in `FUNCTIONS` extend MLX's lazy graph. Any other function waits for the values and runs in torch
on the CPU. So the target can score draft tokens that are not computed yet, and a greedy step of a chain waits once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from blockdraft.nn.foreign_tensor import ForeignTensor, converted

try:
    mx: Any = import_module("mlx.core")
except ImportError:  # MLX is not installed, and nothing below is called
    mx = None

Array: TypeAlias = Any  # mx.array

LOCK = threading.RLock()  # one thread at a time may extend MLX's graph
_thread = threading.local()


@cache
def dtypes() -> dict[torch.dtype, Any]:
    """Map torch dtypes to MLX dtypes."""
    names = ("float32", "bfloat16", "float16", "int64", "int32", "uint8", "int8", "int16")
    return {getattr(torch, name): getattr(mx, name) for name in names} | {torch.bool: mx.bool_}


@cache
def _stream() -> Any:
    return mx.new_thread_unsafe_stream(mx.default_device())


class _ThreadCleanup:
    """Frees what MLX caches for a thread when the thread ends.

    Otherwise MLX frees it after the thread was joined, and aborts the process if the interpreter is shutting down.
    """

    def __del__(self) -> None:
        with LOCK:
            mx.clear_streams()


@contextmanager
def computing() -> Iterator[None]:
    """Make or evaluate arrays under the lock, on one stream for all threads. MLX's own streams belong to a thread."""
    if not hasattr(_thread, "cleanup"):
        is_main = threading.current_thread() is threading.main_thread()  # MLX cleans up after this thread itself
        _thread.cleanup = None if is_main else _ThreadCleanup()
    with LOCK, mx.stream(_stream()):
        yield


class MLXTensor(ForeignTensor):
    """A torch tensor whose values are an MLX array, which may not be computed yet.

    Results never share memory, so writing to what would be a view in torch is an error instead of a lost write.
    """

    is_view: bool

    @staticmethod
    def __new__(cls, array: Array, is_view: bool = False) -> MLXTensor:
        array = array.astype(mx.int64) if array.dtype == mx.uint32 else array  # indices
        [dtype] = (ours for ours, theirs in dtypes().items() if theirs == array.dtype)
        made: MLXTensor = Tensor._make_wrapper_subclass(cls, array.shape, dtype=dtype, device=torch.device("cpu"))
        made.array, made.is_view = array, is_view
        return made

    @property
    def real(self) -> Tensor:  # type: ignore[override]
        with computing():
            mx.eval(self.array)
            if self.array.dtype == mx.bfloat16:  # numpy has none
                return torch.from_numpy(np.array(self.array.view(mx.int16))).view(torch.bfloat16)
            return torch.from_numpy(np.array(self.array))

    @classmethod
    def call(cls, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        is_known, is_ours = name in FUNCTIONS, isinstance(args[0], MLXTensor)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if in_place and is_ours and (args[0].is_view or not is_known):
            raise NotImplementedError(f"{name} would write to a view of an MLX array, or has no lazy version.")
        if not is_known or (in_place and not is_ours) or kwargs.get("stable"):  # MLX has no stable sort
            return super().call(name, func, args, kwargs)
        with computing():
            options = {{"dim": "axis", "keepdim": "keepdims"}.get(key, key): value for key, value in kwargs.items()}
            out = FUNCTIONS[name](*converted(args, in_mlx), **converted(options, in_mlx))
            if in_place:
                args[0].array = out
                return args[0]
            is_view = name in VIEWS
            return converted(out, lambda value: MLXTensor(value, is_view) if isinstance(value, mx.array) else value)


def in_mlx(value: Any) -> Any:
    """Convert tensors to arrays, or weights to quantized ones, and dtypes to MLX's. Other values stay as they are."""
    if isinstance(value, MLXTensor):
        return value.array
    if isinstance(value, nn.Parameter):
        if value not in _weights:
            _weights[value] = _copied(value)
        return _weights[value]
    if isinstance(value, Tensor):
        return _copied(value)
    return dtypes()[value] if isinstance(value, torch.dtype) else value


def _copied(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.contiguous().view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array((tensor.float() if tensor.dtype == torch.float64 else tensor).numpy())


class MLXQuantizedWeight(NamedTuple):
    """A weight `[out, in]` as `mx.quantize` stores it.

    Its scales are float32 whatever the arithmetic: rounded to half precision they shift whole groups of weights, and
    deep drafters lose their acceptance.
    """

    weight: Array
    scales: Array
    biases: Array
    group_size: int
    bits: int


_weights: Any = WeakIdKeyDictionary()  # arrays of weights, each made once, by their parameter


def quantize_weight(weight: Tensor, bits: int, group_size: int) -> None:
    """Run a weight `[out, in]` quantized from now on, if `in` is a multiple of the group size."""
    if weight.size(1) % group_size == 0:
        with computing():
            quantized, scales, biases = mx.quantize(_copied(weight).astype(mx.float32), group_size, bits)
            mx.eval(quantized, scales, biases)
            _weights[weight] = MLXQuantizedWeight(quantized, scales, biases, group_size, bits)


class Ranked(NamedTuple):
    """Result of `max`, `sort` and `topk`, with torch's field names."""

    values: Array
    indices: Array


def _linear(x: Array, weight: Array | MLXQuantizedWeight, bias: Array | None = None) -> Array:
    if isinstance(weight, MLXQuantizedWeight):
        parts, group_size, bits = weight[:3], weight.group_size, weight.bits
        out = mx.quantized_matmul(x.astype(mx.float32), *parts, transpose=True, group_size=group_size, bits=bits)
        out = out.astype(x.dtype)
    else:
        out = x @ weight.T
    return out if bias is None else out + bias


def _topk(x: Array, k: int, axis: int = -1, sorted: bool = True) -> Ranked:
    part = mx.argpartition(-x, k - 1, axis=axis)[..., :k] if k < x.shape[-1] else mx.argsort(-x, axis=axis)
    order = mx.argsort(-mx.take_along_axis(x, part, axis=axis), axis=axis)
    indices = mx.take_along_axis(part, order, axis=axis)
    return Ranked(mx.take_along_axis(x, indices, axis=axis), indices)


def _sort(x: Array, axis: int = -1, descending: bool = False) -> Ranked:
    order = mx.argsort(-x if descending else x, axis=axis)
    return Ranked(mx.take_along_axis(x, order, axis=axis), order)


def _gather(x: Array, axis: int, index: Array) -> Array:
    cut = tuple(slice(None) if dim == axis % x.ndim else slice(size) for dim, size in enumerate(index.shape))
    return mx.take_along_axis(x[cut], index, axis=axis)


def _scatter(x: Array, axis: int, index: Array, src: Any) -> Array:
    return mx.put_along_axis(x, index, src if isinstance(src, mx.array) else mx.array(src, x.dtype), axis=axis)


def _expand(x: Array, *sizes: int) -> Array:
    shape = (1,) * (len(sizes) - x.ndim) + x.shape
    return mx.broadcast_to(x, [own if size == -1 else size for own, size in zip(shape, sizes, strict=True)])


def _set(x: Array, index: Any, values: Any) -> Array:
    x[_index(index)] = values.astype(x.dtype) if isinstance(values, mx.array) else values
    return x


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return mx.array(index) if isinstance(index, list) else index


def _pad(x: Array, pad: list[int], mode: str = "constant", value: float | None = None) -> Array:
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]  # torch begins with the last dimension
    return mx.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, constant_values=value or 0)


def _to(x: Array, *options: Any, **named: Any) -> Array:
    kinds = [option for option in (*options, *named.values()) if isinstance(option, mx.Dtype)]
    return x.astype(kinds[0]) if kinds else x


def _attention(q: Array, k: Array, v: Array, attn_mask: Array | None = None, enable_gqa: bool = False) -> Array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=attn_mask)


# Torch's functions by the names of MLX's that take the same arguments, with `axis` for `dim`.
SAME = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative", "matmul": "matmul"}
SAME |= {"amax": "max", "cat": "concatenate", "unsqueeze": "expand_dims", "transpose": "swapaxes", "chunk": "split"}
SAME |= {"movedim": "moveaxis"}
SAME |= {name: name for name in ("exp", "tanh", "softmax", "logsumexp", "cumsum", "stack", "squeeze")}
SAME |= {name: name for name in ("flatten", "unflatten")}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{ours: partial(lambda name, *args, **options: getattr(mx, name)(*args, **options), SAME[ours]) for ours in SAME},
    "__getitem__": lambda x, index: x[_index(index)],
    "__setitem__": _set,
    "index_copy_": lambda x, axis, index, src: mx.put_along_axis(x, mx.broadcast_to(index, src.shape), src, axis=axis),
    "index_select": lambda x, axis, index: mx.take(x, index, axis=axis),
    "gather": _gather,
    "scatter": _scatter,
    "max": lambda x, axis, keepdims=False: Ranked(mx.max(x, axis, keepdims), mx.argmax(x, axis, keepdims)),
    "sort": _sort,
    "topk": _topk,
    "clamp": lambda x, min=None, max=None: mx.clip(x, min, max),
    "masked_fill": lambda x, mask, value: mx.where(mask, mx.array(value, x.dtype), x),
    "log_softmax": lambda x, axis: x - mx.logsumexp(x, axis=axis, keepdims=True),
    "mT": lambda x: mx.swapaxes(x, -1, -2),
    "expand": _expand,
    "unbind": lambda x, axis=0: [mx.squeeze(part, axis) for part in mx.split(x, x.shape[axis], axis)],
    "pad": _pad,
    "new_full": lambda x, size, value: mx.full(size, value, x.dtype),
    "to": _to,
    "float": lambda x: x.astype(mx.float32),
    "linear": _linear,
    "embedding": lambda tokens, weight, **options: weight[tokens],
    "silu": lambda x, inplace=False: x * mx.sigmoid(x),
    "rms_norm": lambda x, shape, weight=None, eps=1e-6: mx.fast.rms_norm(x, weight, eps),
    "scaled_dot_product_attention": _attention,
}
# Functions whose results may share memory with their input in torch.
VIEWS = {"__getitem__", "unsqueeze", "squeeze", "transpose", "mT", "expand", "flatten", "unflatten", "chunk", "unbind"}
VIEWS |= {"to", "float", "movedim"}
