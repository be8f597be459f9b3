"""Interface to the compiled `decoder.c`: its structs, functions and errors. Structs are compared with C's at load."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.machine import allowed_cores
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantization import InterleavedWeight, spans

KINDS = {torch.float32: 0, torch.bfloat16: 1}  # codes of kernels.h for dtypes of weights and stores
INTEGERS = {8: 2, 4: 3, 6: 6}  # its codes for integers, by bits
FLOAT4 = 5  # its code for 4-bit floating-point numbers
STORES = KINDS | {torch.int8: INTEGERS[8]}
FACTORS = {torch.float32: 0, torch.int8: 2, torch.float16: 4}  # its codes for dtypes of scales and offsets
DTYPES = {number: dtype for dtype, number in STORES.items()}
FACTOR = 4  # int8 numbers behind a key or a value that hold its factor
PROJECTIONS = ("qkv", "output", "gate_up", "down")
ROUTED = ("router", "shared_gate_up", "shared_down", "shared_gate")  # of layers with routed experts
LAYER_INPUTS = ("input_gate", "input_projection")  # of layers with embeddings of their own
DELTA_GATES = "delta_gates"  # projection of a gated delta net to shares and decays
HEADS = ("queries", "absorbed_keys", "values")  # projections of latent attention
DELTA_TENSORS = ("delta_filter", "fading", "fading_bias", "delta_norm")
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "relu2": 2}  # codes of calls.h
NORMS_BESIDE = ("before_router", "before_experts", "after_shared", "after_experts")  # of experts beside an MLP
NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp")


class Fields(ctypes.Structure):
    """A struct of calls.h, filled by keyword. Other fields are zero or null."""

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - type(self).__dict__.keys()
        assert not unknown, f"{type(self).__name__} has no fields {sorted(unknown)}"
        super().__init__(**values)


class LinearFields(Fields):
    """`Linear` of calls.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "scale", "offset", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "kind", "group", "scale_kind", "offset_kind")),
        *((name, c_void_p) for name in ("scale_unit", "offset_unit")),
        ("span", c_int64),
    ]


class ConvolutionFields(Fields):
    """`Convolution` of calls.h."""

    _fields_ = [("projection", LinearFields), ("base", c_void_p), ("taps", c_int64), ("groups", c_int64)]


class LayerFields(Fields):
    """`Layer` of calls.h."""

    _fields_ = [
        *((name, LinearFields) for name in PROJECTIONS),
        *((name, c_void_p) for name in (*NORMS, "query_norm", "key_norm", "cos", "sin")),
        ("window", c_int64),
        ("whole_block", c_int64),
        ("attention_conv", ConvolutionFields),
        ("mlp_conv", ConvolutionFields),
        *((name, LinearFields) for name in ROUTED),
        *((name, c_void_p) for name in ("expert_bias", "filter", "sinks")),
        *((name, c_void_p) for name in (*NORMS_BESIDE, "expert_scale")),
        *((name, LinearFields) for name in LAYER_INPUTS),
        ("after_input", c_void_p),
        *((name, c_int64) for name in ("head_dim", "kv_heads", "inner", "place", "second", "shared")),
        ("values_are_keys", c_int64),
        ("scale", c_float),
        (DELTA_GATES, LinearFields),
        *((name, c_void_p) for name in (*DELTA_TENSORS, "delta_bias", "skip")),
        *((name, LinearFields) for name in HEADS),
    ]


class ModelFields(Fields):
    """`Model` of calls.h."""

    _fields_ = [
        ("layers", POINTER(LayerFields)),
        ("embedding", LinearFields),
        ("head", LinearFields),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "activation")),
        ("max_positions", c_int64),
        *((name, c_float) for name in ("eps", "embedding_scale", "attention_scale", "attention_cap", "logit_cap")),
        ("joined", LinearFields),
        *((name, c_void_p) for name in ("token_norm", "hidden_state_norm")),
        *((name, c_int64) for name in ("pairs", "normed_stream", "rotated")),
        *((name, c_int64) for name in ("experts", "chosen", "expert_inner", "shared_inner", "normed", "sigmoid")),
        ("share_scale", c_float),
        ("kernel", c_int64),
        *((name, c_float) for name in ("clamp_alpha", "clamp_limit")),
        *((name, LinearFields) for name in ("input_table", "input_projection")),
        ("input_norm", c_void_p),
        *((name, c_int64) for name in ("input_size", "gated", "key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("delta_kernel", "tiled", "recurrent_layers", "joint_norm", "mamba")),
        ("delta_eps", c_float),
        *((name, c_int64) for name in ("groups", "chosen_groups", "pair_of_group", "latent", "unrotated")),
        *((name, c_int64) for name in ("latent_value", "query_rank")),
        ("latent_eps", c_float),
    ]


class RecurrentFields(Fields):
    """`Recurrent` of calls.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("state", "window", "past", "trail", "state_after", "window_after", "path")),
        ("pending", c_int64),
        ("count", c_int64),
    ]


class CallFields(Fields):
    """`Call` of calls.h.

    Attributes:
        owners: Objects that own the memory of pointers, to keep them alive.
    """

    owners: tuple[object, ...] = ()

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "parents", "lengths", "target_layers", "logits_at", "embedded")),
        *((name, c_int64) for name in ("batch", "nodes", "num_target_layer_ids", "num_logits", "reach")),
        ("pool", c_void_p),
        *((name, c_int64) for name in ("slots", "room")),
        ("store", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "head_stride")),
        *((name, c_void_p) for name in ("starts", "hidden_states", "logits", "workspace", "best", "beside")),
        *((name, c_int64) for name in ("hidden_slots", "done")),
        ("inputs", c_void_p),
        ("second_store", c_void_p),
        *((name, c_int64) for name in ("second_layer_stride", "second_head_stride")),
        ("recurrent", POINTER(RecurrentFields)),
    ]


class ChainFields(Fields):
    """`Chain` of calls.h.

    Attributes:
        owners: As of `CallFields`.
    """

    owners: tuple[object, ...] = ()

    _fields_ = [
        *((name, c_void_p) for name in ("kept", "tokens", "current", "parents")),
        *((name, c_int64) for name in ("draft_tokens", "made")),
        ("seconds", c_void_p),
        ("calibration", c_double),
        *((name, c_void_p) for name in ("expected", "survival", "following")),
    ]


class Described(ctypes.Structure):
    """`Field` of calls.h: one line of C's description. The line with a struct's size has no name."""

    _fields_ = [("structure", c_char_p), ("name", c_char_p), ("offset", c_int64), ("size", c_int64)]


STRUCTS: Mapping[str, type[Fields]] = {
    "Linear": LinearFields,
    "Convolution": ConvolutionFields,
    "Layer": LayerFields,
    "Model": ModelFields,
    "Recurrent": RecurrentFields,
    "Call": CallFields,
    "Chain": ChainFields,
}


def check_structs(library: ctypes.CDLL, structs: Mapping[str, type[Fields]] = STRUCTS) -> None:
    """Raise an AssertionError for the first field whose name, offset or size differs in C."""
    library.fields.restype = POINTER(Described)
    described, index = defaultdict(list), 0
    while (line := library.fields()[index]).structure:
        described[line.structure.decode()].append((line.name.decode(), line.offset, line.size))
        index += 1
    for name, struct in structs.items():
        places = [(field, getattr(struct, field)) for field, *_ in struct._fields_]
        ours = [(field, place.offset, place.size) for field, place in places] + [("", 0, ctypes.sizeof(struct))]
        for mine, theirs in zip_longest(ours, described[name]):
            assert mine == theirs, f"struct {name}: the field (name, offset, size) is {mine} in Python, {theirs} in C"


class Pool:
    """Threads that share the work of a call (`pool.h`).

    A pool serves one call at a time, so concurrent calls have a pool each. `return_pool` keeps it for the next call.

    Args:
        library: Library of the kernels.
        threads: Number of threads, the caller included.

    Attributes:
        address: Address of the pool in C; None if no further thread can be started, and the caller works alone.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self._free = _function(library, "pool_free", c_void_p, returns=None)
        create = _function(library, "pool_new", c_int64, c_int64, returns=c_void_p)
        self.address: int | None = create(threads, threads <= allowed_cores())

    def close(self) -> None:
        """End the threads."""
        self._free(self.address)


_idle: list[Pool] = []


def return_pool(pool: Pool) -> None:
    """Keep a pool for the next call."""
    _idle.append(pool)


def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


atexit.register(_close_idle)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)  # threads stay in the parent process


class OneTorchThread(threading.local):
    """A context in which torch's own operations run in the calling thread alone.

    Threads of torch spin for milliseconds after each large operation. Beside a compiled forward pass, they would take
    the cores that its threads need.
    """

    def __init__(self) -> None:
        self.threads = 0  # torch's number outside the context

    def __enter__(self) -> None:
        self.threads = torch.get_num_threads()
        _omp_set_num_threads()(1)

    def __exit__(self, *error: object) -> None:
        _omp_set_num_threads()(self.threads)
        self.threads = 0


one_torch_thread = OneTorchThread()


def num_threads() -> int:
    """Return the number of threads for the kernels: torch's, outside of `one_torch_thread`."""
    return one_torch_thread.threads or torch.get_num_threads()


@cache
def _omp_set_num_threads() -> Callable[[int], object]:
    """Return OpenMP's function for torch's number of threads in the calling thread, or one that does nothing.

    `torch.set_num_threads` would also change the number of threads that begin later.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            return _function(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)), "omp_set_num_threads", c_int)
        except (OSError, AttributeError):
            continue
    return lambda threads: None


class Product:
    """Matrix product with a weight in a library's layout.

    Attributes:
        fields: The weight in the form of the library's functions, valid as long as this object lives.
    """

    def __init__(
        self,
        library: Library,
        weight: Tensor | InterleavedWeight,
        bias: Tensor | None,
        inputs: int,
        outputs: int,
    ) -> None:
        self.handle = library
        self.owners = weight, bias
        self.fields = LinearFields(bias=None if bias is None else bias.data_ptr(), inputs=inputs, outputs=outputs)
        if isinstance(weight, Tensor):
            self.fields.weight, self.fields.kind = weight.data_ptr(), KINDS[weight.dtype]
        else:
            tensors = weight.tensors()
            for name, tensor in tensors.items():
                setattr(self.fields, name, tensor.data_ptr())
            for name in tensors.keys() & {"scale", "offset"}:
                setattr(self.fields, f"{name}_kind", FACTORS[tensors[name].dtype])
            self.fields.kind = FLOAT4 if weight.floating else INTEGERS[weight.stored_bits]
            self.fields.group = weight.group
            self.fields.span = max(spans(weight.scale, weight.offset), default=0)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        self.handle.multiply(self.fields, x, out)


class Library:
    """A compiled `decoder.c`. Its methods raise an AssertionError with C's message for arguments that C refuses.

    Args:
        path: File of the library.

    Attributes:
        lanes: Number of interleaved output channels of a weight.
        weights_dtype: Dtype of unquantized weights: float32 or bfloat16.
        has_integers: Whether 8-bit and 4-bit weights are accepted too.
        inputs_dtype: Dtype to which inputs of unquantized weights are rounded.
        store_dtype: Dtype of keys and values: float32, bfloat16, or int8 with a factor per head and token.

        torch_threads: Context in which torch's own operations run beside the kernels.

    Raises:
        OSError: The file is no library.
        AttributeError: The library lacks a function.
        AssertionError: Structs of the library differ from those of this module.
    """

    torch_threads: AbstractContextManager[None] = one_torch_thread

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        check_structs(library)
        self.handle = library
        self._problem = _function(library, "problem", c_int64, returns=c_char_p)
        self._decoder_workspace = _function(library, "decoder_workspace", c_void_p, *[c_int64] * 3)
        self._decoder_forward = _function(library, "decoder_forward", c_void_p, c_void_p)
        self._draft_chain = _function(library, "draft_chain", *[c_void_p] * 3)
        self._draft_context_workspace = _function(library, "draft_context_workspace", c_void_p, *[c_int64] * 3)
        self._draft_context = _function(library, "draft_context", *[c_void_p] * 4)
        types = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        self.packed_linear = _function(library, "packed_linear", *types)
        of_matrix = c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64
        self._pack_blocks = _function(library, "pack_blocks", *of_matrix, *[c_void_p] * 5, c_int64, c_void_p)
        self.lanes = int(_function(library, "lanes")())
        self.weights_dtype = DTYPES[_function(library, "weight_kind")()]
        self.inputs_dtype = torch.bfloat16 if _function(library, "is_narrow")() else torch.float32
        self.store_dtype = DTYPES[_function(library, "store_kind")()]
        self.has_integers = bool(_function(library, "has_integer_kernels")())

    def __reduce__(self) -> NoReturn:
        raise UsageError("A compiled target or drafter cannot be pickled; load it anew in the process that needs it.")

    def slot_size(self, head_dim: int) -> int:
        """Return the numbers of `store_dtype` per key or value of one head and token."""
        return head_dim + (FACTOR if self.store_dtype == torch.int8 else 0)

    def decoder_workspace(self, model: ModelFields, batch: int, nodes: int, threads: int) -> int:
        """Return the float32 numbers in the workspace of `decoder_forward`."""
        return self.checked(self._decoder_workspace(byref(model), batch, nodes, threads))

    def decoder_forward(self, model: ModelFields, call: CallFields) -> int:
        """Run the layers and return 0.

        If the call's workspace is too small, do nothing and return the float32 numbers that it needs.
        """
        return self.checked(self._decoder_forward(byref(model), byref(call)))

    def draft_chain(self, model: ModelFields, call: CallFields, chain: ChainFields) -> int:
        """Draft chains. Returns as `decoder_forward`."""
        return self.checked(self._draft_chain(byref(model), byref(call), byref(chain)))

    def draft_context_workspace(self, model: ModelFields, batch: int, nodes: int, inputs: int) -> int:
        """Return the size of the workspace of `draft_context` in float32 numbers, for inputs of `inputs` numbers."""
        return self.checked(self._draft_context_workspace(byref(model), batch, nodes, inputs))

    def draft_context(self, model: ModelFields, call: CallFields, hidden_states: LinearFields, norm: int) -> int:
        """Write keys and values of projected hidden states. Returns as `decoder_forward`."""
        return self.checked(self._draft_context(byref(model), byref(call), byref(hidden_states), norm))

    def product(self, weight: Tensor | InterleavedWeight, bias: Tensor | None, inputs: int, outputs: int) -> Product:
        """As `nn.packed.Kernels.product`."""
        return Product(self, weight, bias, inputs, outputs)

    def linear(self, layer: PackedLinear) -> LinearFields:
        """Return a layer's weight, packed for this library, valid as long as the layer lives."""
        product = layer.pack(self)
        assert isinstance(product, Product)
        return product.fields

    def multiply(self, weight: LinearFields, x: Tensor, out: Tensor) -> None:
        """Write `x @ weight.T + bias` to `out`. Both are float32 matrices; `out` and each `x[i]` are contiguous."""
        pool = self.borrow_pool(num_threads())
        try:
            at = x.data_ptr(), x.stride(0), len(x), out.data_ptr(), pool.address
            self.checked(self.packed_linear(byref(weight), *at))
        finally:
            return_pool(pool)

    def pack_blocks(
        self, kind: int, raw: np.ndarray, order: Tensor | None, weight: InterleavedWeight, inputs: int, wide: int
    ) -> None:
        """Write a matrix of a GGUF file to `weight`, whose outputs fill its blocks.

        Args:
            kind: GGUF's number of its type: Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, or MXFP4 with
                exponents from 104 to 143.
            raw: Bytes of each row, `[rows, bytes]` uint8.
            order: Row of each output, int64; None is their own order.
            wide: 0, or groups per block of Q4_K, Q5_K and Q6_K when written alike: 16 with Q6_K, else 8.
        """
        tensors, pool = weight.tensors(), self.borrow_pool(num_threads())
        names = ("weight", "scale", "scale_unit", "offset", "offset_unit")
        out = [tensors[name].data_ptr() if name in tensors else None for name in names]
        rows, outputs = None if order is None else order.data_ptr(), weight.outputs
        assert len(raw) == outputs and raw.strides == (raw.shape[1], 1), (raw.shape, raw.strides, outputs)
        try:
            of_matrix = kind, raw.ctypes.data, raw.shape[1], rows, outputs, inputs
            self.checked(self._pack_blocks(*of_matrix, *out, wide, pool.address))
        finally:
            return_pool(pool)

    def borrow_pool(self, threads: int) -> Pool:
        """Return an idle pool of this many threads, or a new one. Idle pools of other sizes are closed."""
        while _idle:
            try:
                pool = _idle.pop()
            except IndexError:  # another thread was faster
                break
            if pool.threads == threads:
                return pool
            pool.close()
        return Pool(self.handle, threads)

    def checked(self, result: int) -> int:
        assert result >= 0, self._problem(-result).decode()
        return result


def _function(library: ctypes.CDLL, name: str, *takes: Any, returns: Any = c_int64) -> Callable[..., Any]:
    function = getattr(library, name)
    function.argtypes, function.restype = takes, returns
    return cast("Callable[..., Any]", function)
