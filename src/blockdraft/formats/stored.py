"""Tensors of checkpoints that are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from safetensors import safe_open
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import QuantizedWeight

FLOAT_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
KINDS = {**FLOAT_KINDS, torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
KINDS |= {torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
FLOATS = {*FLOAT_KINDS.values()}
FEW_BITS = "few bits"


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a checkpoint, on disk or in memory.

    Attributes:
        kind: Dtype under its name in safetensors files, or `FEW_BITS` or a type of GGUF files for a `QuantizedWeight`.
        read: Function that returns the tensor on the CPU.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor | QuantizedWeight]

    def tensor(self) -> Tensor:
        """Read the tensor; dequantize a `QuantizedWeight`."""
        weight = self.read()
        return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight

    def rows(self, index: Tensor) -> StoredTensor:
        """Return the tensor of some rows, `[n]` int64."""
        return StoredTensor((len(index), *self.shape[1:]), self.kind, partial(_read_rows, self, index))


def open_tensors(files: Sequence[str]) -> dict[str, StoredTensor]:
    """Open the tensors of safetensors files. Reading one keeps memory only as long as the tensor lives."""
    tensors = {}
    for file in files:
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dictionary)
                header = shard.get_slice(name)
                tensors[name] = StoredTensor(tuple(header.get_shape()), header.get_dtype(), partial(_read, file, name))
    return tensors


def _read(file: str, name: str) -> Tensor:
    # Opened for each tensor, since tensors stay mapped while their file is open.
    with safe_open(file, "pt") as shard:
        tensor: Tensor = shard.get_tensor(name)
        return tensor


def _read_rows(tensor: StoredTensor, index: Tensor) -> Tensor | QuantizedWeight:
    weight = tensor.read()
    return weight.channels(index) if isinstance(weight, QuantizedWeight) else weight[index]


def stored(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), KINDS.get(tensor.dtype, str(tensor.dtype)), lambda: tensor)


def check_floats(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise a UsageError unless all tensors are unquantized floating-point numbers of 16 bits or more."""
    others = [name for name, tensor in tensors.items() if tensor.kind not in FLOATS]
    if others:
        more = f", and {len(others) - 1} other tensors are of such a type too" if len(others) > 1 else ""
        raise UsageError(
            f"{others[0]} is of type {tensors[others[0]].kind}{more}; weights must be of one of "
            f"{', '.join(FLOAT_KINDS.values())}. Use the unquantized checkpoint, or cast them to one of these."
        )
