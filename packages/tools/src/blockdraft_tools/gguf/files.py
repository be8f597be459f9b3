"""Writer of GGUF files, with one tensor in memory at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType, quantize
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.formats.stored import MadeTensor, StoredTensor
from blockdraft.nn.quantization import QuantizedWeight, best_group
from blockdraft.nn.quantize_weight import QUICK, quantize_weight
from blockdraft_tools.gguf import MatrixType

FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}
TABLES = ("token_embd.weight", "output.weight")  # where 4 bits cost the most accuracy and save the least memory
PARTIAL = ".partial"
Q4_0, Q4_0_INPUTS = "Q4_0", 32  # inputs of a block, which share a scale


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    weights: MatrixType,
) -> None:
    """Write one file.

    Args:
        metadata: Values by their keys: unsigned 32-bit integers, float32 numbers, strings, and lists of these.
        tensors: Tensors by their names, in the order of the file.
        weights: Type to which the package gguf quantizes matrices. With q4_0, embedding and head get 8 bits. Tensors of
            `q4_0_tensor` are written as they are, integers unchanged, and others as float32.

    Raises:
        UsageError: The type does not fit a matrix's number of columns, or cannot represent its numbers.
    """
    kinds = {name: _kind(name, tensor, weights) for name, tensor in tensors.items()}
    writer = GGUFWriter(path, architecture)
    writer.add_file_type(FILE_TYPES[weights])
    if weights.startswith("q"):
        writer.add_quantization_version(GGML_QUANT_VERSION)
    for key, value in metadata.items():
        _put(writer, key, value)
    for name, tensor in tensors.items():
        values, size = GGML_QUANT_SIZES[kinds[name]]
        count = math.prod(tensor.shape) // values * size
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), count, kinds[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            writer.write_tensor_data(_rounded(name, tensor, kinds[name]))
    finally:
        writer.close()


@contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder for new files.

    On success they move to `folder` together and replace files with the same names; after an error they are deleted.

    Raises:
        UsageError: `folder` is a file or cannot be written, or another process is writing there.
    """
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; choose a folder for --out.")
    scratch, made = folder / PARTIAL, not folder.exists()
    with held(folder, "exporting"):
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
            scratch.mkdir(parents=True)
            yield scratch
            for file in sorted(scratch.iterdir()):
                file.replace(folder / file.name)
        except OSError as error:
            raise UsageError(f"{folder} cannot be written ({error}); nothing of it is left.") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if made:
                with suppress(OSError):  # if anything was written
                    folder.rmdir()


def _put(writer: GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _kind(name: str, tensor: StoredTensor, weights: MatrixType) -> GGMLQuantizationType:
    """Return the type in which a tensor is written."""
    if tensor.kind in ("I64", Q4_0):
        return GGMLQuantizationType[tensor.kind]
    if len(tensor.shape) != 2 or tensor.shape[0] == 1 or not name.endswith(".weight"):
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[("q8_0" if weights == "q4_0" and name in TABLES else weights).upper()]
    values, _ = GGML_QUANT_SIZES[kind]
    if tensor.shape[1] % values:
        raise UsageError(
            f"{name} has {tensor.shape[1]} columns, and {kind.name} rounds {values} numbers at a time; use bf16, f16 "
            "or f32."
        )
    return kind


def q4_0_tensor(weight: Tensor) -> StoredTensor | None:
    """Return a matrix in 4 bits, quantized as a drafter is when it is loaded; None if Q4_0 cannot hold that exactly.

    A drafter that was trained for these values has the same ones again when it is loaded from the file.
    """
    if weight.ndim != 2 or weight.size(1) % Q4_0_INPUTS:
        return None
    quantized = quantize_weight(weight, 4, best_group(weight.size(1)), shares=QUICK)
    exact = isinstance(quantized.scale, Tensor) and quantized.scale.dtype == torch.float16
    return MadeTensor(tuple(weight.shape), Q4_0, lambda: quantized) if exact else None


def _q4_0_blocks(weight: QuantizedWeight) -> np.ndarray[Any, Any]:
    """Return the blocks of a matrix `[out, bytes]`: a scale, and codes of which the first half are the low 4 bits."""
    assert isinstance(weight.scale, Tensor)
    scale = weight.scale.repeat_interleave(weight.group // Q4_0_INPUTS, dim=1).unsqueeze(-1).view(torch.uint8)
    low, high = (weight.codes + 8).view(torch.uint8).unflatten(1, (-1, 2, Q4_0_INPUTS // 2)).unbind(2)
    return torch.cat([scale, low | high << 4], dim=-1).flatten(1).numpy()


def _rounded(name: str, tensor: StoredTensor, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    if tensor.kind == Q4_0:
        quantized = tensor.read()
        assert isinstance(quantized, QuantizedWeight)
        return _q4_0_blocks(quantized)
    weight = tensor.tensor()
    if kind == GGMLQuantizationType.I64:
        return weight.numpy()
    numbers = np.ascontiguousarray(weight.to(torch.float32).numpy())
    most = np.abs(numbers).max(initial=0)
    if not np.isfinite(most):
        raise UsageError(f"{name} holds {most:g}, so its model is broken; copy or train it again.")
    if kind == GGMLQuantizationType.F16 and most > np.finfo(np.float16).max:
        raise UsageError(f"{name} holds {most:g}, which f16 cannot represent; use bf16 or f32.")
    rounded: np.ndarray[Any, Any] = quantize(numbers, kind)
    return rounded
