"""Tensors of checkpoints that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from safetensors import safe_open
from torch import Tensor

from blockdraft.nn.quantized import QuantizedWeight

KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
FLOATS = {*KINDS.values(), "F64"}
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


def open_tensors(files: Sequence[str], opened: ExitStack) -> dict[str, Stored]:
    """The tensors of safetensors files, which stay open as long as `opened`."""
    found = {}
    for file in files:
        shard = opened.enter_context(safe_open(file, "pt"))
        for name in shard.keys():  # noqa: SIM118 (no dictionary)
            header = shard.get_slice(name)
            found[name] = Stored(tuple(header.get_shape()), header.get_dtype(), partial(shard.get_tensor, name))
    return found


def stored(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), KINDS.get(tensor.dtype, str(tensor.dtype)), lambda: tensor)
