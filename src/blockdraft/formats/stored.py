"""Tensors of checkpoints that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from safetensors import safe_open
from torch import Tensor

from blockdraft.nn.quantized import QuantizedWeight

KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
FLOATS = {kind for dtype, kind in KINDS.items() if dtype.is_floating_point} | {"F64"}
FEW_BITS = "few bits"


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, on disk or in memory.

    Attributes:
        kind: Its dtype as safetensors files name it, or `FEW_BITS` for a `QuantizedWeight`.
        read: Gives it, on the CPU.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor | QuantizedWeight]

    def tensor(self) -> Tensor:
        """It, as a tensor in any case."""
        found = self.read()
        return found.dequantize() if isinstance(found, QuantizedWeight) else found


def open_tensors(files: Sequence[str]) -> dict[str, Stored]:
    """The tensors of safetensors files. What is read of a file is in memory as long as the tensor."""
    found = {}
    for file in files:
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dictionary)
                header = shard.get_slice(name)
                found[name] = Stored(tuple(header.get_shape()), header.get_dtype(), partial(_read, file, name))
    return found


def _read(file: str, name: str) -> Tensor:
    # Opened anew, since all that was ever read stays mapped as long as a file is open.
    with safe_open(file, "pt") as shard:
        tensor: Tensor = shard.get_tensor(name)
        return tensor


def stored(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), KINDS.get(tensor.dtype, str(tensor.dtype)), lambda: tensor)
