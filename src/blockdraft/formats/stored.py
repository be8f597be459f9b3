"""Tensors of checkpoints that are read when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.quantization import QuantizedWeight

FLOAT_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
KINDS = {**FLOAT_KINDS, torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
KINDS |= {torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
FLOATS = {*FLOAT_KINDS.values()}
FEW_BITS = "few bits"


class StoredTensor:
    """Tensor of a checkpoint, which is read when it is needed.

    Attributes:
        kind: Dtype under its name in safetensors files, or `FEW_BITS` or a type of GGUF files for a `QuantizedWeight`.
        read: Function that returns the tensor on the CPU.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor | QuantizedWeight]

    def tensor(self) -> Tensor:
        """Read the tensor; dequantize a `QuantizedWeight`."""
        return dense(self.read())

    def rows(self, index: Tensor) -> StoredTensor:
        """Return the tensor of some rows, `[n]` int64."""
        return MadeTensor((len(index), *self.shape[1:]), self.kind, partial(_read_rows, self, index))


@dataclass(frozen=True)
class MadeTensor(StoredTensor):
    """Tensor that a function reads."""

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor | QuantizedWeight]


@dataclass(frozen=True)
class TensorFiles:
    """Tensors in the files of a checkpoint. Reading one keeps memory only as long as the tensor lives.

    Attributes:
        files: Files that hold them.
        tensors: Tensors by name.
    """

    files: Sequence[Path]
    tensors: Mapping[str, StoredTensor]

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of values by the kind of their tensor."""
        kinds: dict[str, int] = {}
        for tensor in self.tensors.values():
            kinds[tensor.kind] = kinds.get(tensor.kind, 0) + math.prod(tensor.shape)
        return kinds


def dense(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def _read_rows(tensor: StoredTensor, index: Tensor) -> Tensor | QuantizedWeight:
    weight = tensor.read()
    return weight.channels(index) if isinstance(weight, QuantizedWeight) else weight[index]


def stored(tensor: Tensor) -> StoredTensor:
    return MadeTensor(tuple(tensor.shape), KINDS.get(tensor.dtype, str(tensor.dtype)), lambda: tensor)


def check_floats(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise a UsageError unless all tensors are unquantized floating-point numbers of 16 bits or more."""
    others = [name for name, tensor in tensors.items() if tensor.kind not in FLOATS]
    if others:
        more = f", and {len(others) - 1} other tensors are of such a type too" if len(others) > 1 else ""
        raise UsageError(
            f"{others[0]} is of type {tensors[others[0]].kind}{more}; weights must be of one of "
            f"{', '.join(FLOAT_KINDS.values())}. Use the unquantized checkpoint, or cast them to one of these."
        )
