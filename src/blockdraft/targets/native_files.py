"""Reader of checkpoints for the native decoder, with a library that runs it compiled, if any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.stored import FEW_BITS, StoredTensor
from blockdraft.kernels.cpu.build import Build, build
from blockdraft.kernels.cpu.compiled_decoder import why_not, why_not_packed
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.weight_cache import Make, Origin, cached_weights
from blockdraft.kernels.cuda.rounded import round_weights, why_not_rounded
from blockdraft.machine import return_freed
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import Read
from blockdraft.nn.packed import Kernels, PackedWeight, join_packed, pack_weights
from blockdraft.nn.quantization import QuantizedWeight, best_group
from blockdraft.nn.quantize_weight import QUICK, quantize_weight
from blockdraft.targets.base import NotCovered
from blockdraft.targets.checkpoint import checked_folder, load_generation_config, load_tokenizer, loading
from blockdraft.targets.families import decoder_config, text_part
from blockdraft.targets.fingerprint import weights_fingerprint
from blockdraft.targets.model_config import AnyConfig, load_config
from blockdraft.targets.weights import HEAD, TABLE, open_weights
from blockdraft.types import LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BITS = {"int8": 8, "int4": 4}
TABLE_BITS = 8  # of embedding and head, where fewer would lose most and save least


@dataclass(frozen=True, kw_only=True)
class NativeCheckpoint:
    """A decoder read from a checkpoint, and the other parts of a target.

    Attributes:
        build: Library for the compiled forward pass, which may still be compiling; None if there will be none.
        reason: Why there will be none.
        config, generation_config, source_fingerprint: As in `CheckpointTarget`.
        folder: Folder of the checkpoint, if it is not on the hub.
        tokenizer_reason: As in `Target`.
    """

    decoder: Decoder
    config: AnyConfig
    tokenizer: PreTrainedTokenizerBase | None
    generation_config: Any
    folder: Path | None
    build: Build | None
    reason: str | None
    source_fingerprint: str | None
    tokenizer_reason: str | None = None


def read_checkpoint(path: str | Path, options: LoadOptions) -> NativeCheckpoint:
    """Read a checkpoint in safetensors and its tokenizer, if any, from a local folder or by hub name.

    Matrices in bfloat16 are kept if the forward pass is compiled, also for float32 arithmetic: values do not change. A
    compiler runs, if needed, while the weights are read.

    Raises:
        NotCovered: The decoder does not support the family or one of its settings, or weights are missing under the
            usual names and shapes.
        UsageError: There is no such folder or hub name, or a file cannot be read.
    """
    dtype, device, compile, quantize = options.torch_dtype, options.torch_device, options.compile, options.quantize
    folder, by_gpu = checked_folder(path, options.revision), None
    with loading(path):
        config = load_config(path, options.revision)
    if quantize == "fp8" or (quantize and device.type == "cuda"):
        refused = why_not_rounded(quantize, device, dtype)
        if refused is not None:
            raise UsageError(f"quantize is {quantize!r}: {refused}.")
        by_gpu, quantize = quantize, None
    wanted = decoder_config(config)
    few, config = _few_bits_of(config, options), text_part(config)
    check_store(path, wanted, options)
    special = wanted.decode_only if device.type == "cpu" else wanted.unusual
    if special and (options.quantize or (few and few.get("quant_method") != "mxfp4")):
        elsewhere = "" if wanted.decode_only else "the device cpu or "
        raise NotCovered(
            f"it has {special}, whose weights it neither quantizes nor reads quantized; use {elsewhere}a GGUF file of "
            "the model, which holds them quantized"
        )
    reason = "compile is off" if compile == "off" else why_not(wanted, dtype, device)
    opened, source = open_weights(path, wanted, config, options)
    tensors = opened.tensors
    if quantize is None:
        _check_alike(wanted, tensors)
    kind = torch.bfloat16 if is_bfloat16(wanted, tensors) else dtype
    store = options.store_dtype(default=dtype)
    packs = compile != "off" and why_not_packed(wanted, dtype, device) is None
    made = build(kind, store, wanted.head_divisor, bool(quantize or few), dtype) if packs else None

    def read(name: str) -> Tensor | QuantizedWeight:
        weight = tensors[name].read()
        if isinstance(weight, QuantizedWeight):
            return weight
        if weight.ndim != 2:
            return weight.to(device, dtype, copy=True)  # without a copy it would keep its file mapped
        if quantize is not None and name not in wanted.gates:
            return quantize_matrix(name, weight, BITS[quantize], dtype)
        return weight.to(device, dtype) if library is None else weight

    with loading(path):
        tokenizer = load_tokenizer(path, options.revision, config)
    library = None if made is None else made.library()
    with loading(path, device), torch.no_grad():
        if source is None and (quantize or library is not None):  # before the weights are packed
            own = ((name, tensors[name].tensor()) for name in wanted.tensor_shapes())
            source = weights_fingerprint(own) if dtype != torch.float16 else ""
        origin = Origin(opened.files, {"dtype": str(dtype), "quantize": quantize, "few_bits": few})
        decoder = make_decoder(wanted, read, library, origin if options.adapter is None else None)
        if source is None and by_gpu:
            source = weights_fingerprint(decoder.named_weights()) if dtype != torch.float16 else ""
        if by_gpu:
            round_weights(decoder, by_gpu)
    return NativeCheckpoint(
        decoder=decoder,
        config=config,
        tokenizer=tokenizer,
        generation_config=load_generation_config(path, options.revision),
        folder=folder if folder.exists() else None,
        build=made if reason is None else None,
        reason=reason,
        source_fingerprint=source,
    )


def check_store(path: str | Path, wanted: DecoderConfig, options: LoadOptions) -> None:
    """Raise a UsageError for a dtype of keys and values that does not suit the attention."""
    if wanted.latent is not None and options.kv_dtype == "int8":
        raise UsageError(
            f"kv_dtype is 'int8', and {path} has latent attention: a token's vector and its rotated channels would "
            "share a factor, and lose much. Use bfloat16 or float32."
        )


def make_decoder(
    wanted: DecoderConfig,
    read: Read,
    library: Library | None,
    origin: Origin | None,
    must_map: bool = False,
    make: Make | None = None,
) -> Decoder:
    """Create a decoder, with weights packed for the library if there is one.

    Packed weights are read from the cache folder, or packed one matrix at a time.

    Args:
        read: As in `Decoder`; with a library, matrices may be of any dtype.
        origin: Checkpoint for the cache of packed weights; None does not cache them.
        must_map: Whether the weights do not fit into memory without the cache.
        make: Packs the matrices of one product; None packs what `read` returns.

    Raises:
        UsageError: The weights must be mapped, and cannot be cached.
    """
    if library is None:
        return Decoder(wanted, read)
    make = make or packing(read, library)
    cached = None if origin is None else cached_weights(origin, library, wanted.products(), make)
    if cached is None and must_map:
        raise UsageError(
            "The weights do not fit into the free memory, and another process is writing them to the cache folder, or "
            "the disk is full; try again, free disk space, or close other programs."
        )
    decoder = Decoder(wanted, read, make if cached is None else cached.matrix)
    return_freed()
    return decoder


def packing(read: Read, kernels: Kernels) -> Make:
    """Return a function that packs the matrices of one product, those of each expert at a time."""

    def make(names: Sequence[str]) -> PackedWeight:
        parts = [
            pack_weights([read(name) for name in own], kernels)
            for _, own in groupby(names, lambda name: name.rsplit(".", 2)[0])
        ]
        if len({part.form for part in parts}) > 1:  # experts of others' checkpoints may differ
            return pack_weights([read(name) for name in names], kernels)
        return parts[0] if len(parts) == 1 else join_packed(parts)

    return make


def quantize_matrix(name: str, weight: Tensor, bits: int, dtype: torch.dtype) -> QuantizedWeight:
    """Quantize a matrix of a checkpoint to `bits`, or to `TABLE_BITS` where fewer would lose most.

    Raises:
        UsageError: A number is NaN or infinite. The message names the matrix.
    """
    bits = TABLE_BITS if name in (TABLE, HEAD) else bits
    weight = weight if dtype == torch.float32 else weight.to(dtype)
    try:
        return quantize_weight(weight, bits, best_group(weight.size(1)), shares=QUICK)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error


def _few_bits_of(config: AnyConfig, options: LoadOptions) -> Mapping[str, Any] | None:
    """Return the settings of a quantized checkpoint, or None for other checkpoints.

    Raises:
        NotCovered: The device runs no quantized weights.
        UsageError: The options ask for quantization of a quantized checkpoint.
    """
    few: Mapping[str, Any] | None = getattr(config, "quantization_config", None)
    if not few:
        return None
    if options.quantize not in (None, "int8"):
        raise UsageError(
            f"quantize is {options.quantize!r}, and the checkpoint is quantized already ({few.get('quant_method')}); "
            "leave it out, or give int8, which quantizes what is still in 16 bits."
        )
    if options.torch_device.type != "cpu":
        raise NotCovered(f"it is quantized ({few.get('quant_method')}), which the device cpu alone can run")
    return few


def _check_alike(wanted: DecoderConfig, files: Mapping[str, StoredTensor]) -> None:
    """Raise `NotCovered` if only some matrices of a fused product are quantized."""
    for layer in range(len(wanted.layers)):
        for parts in wanted.projections(layer).values():
            few = [name for name, _ in parts if files[f"{name}.weight"].kind == FEW_BITS]
            others = [name for name, _ in parts if name not in few]
            if few and others:
                raise NotCovered(
                    f"{', '.join(few)} are quantized and {', '.join(others)} are not, and they are computed in one "
                    "product; quantize 'int8' quantizes those too"
                )


def is_bfloat16(wanted: DecoderConfig, files: Mapping[str, StoredTensor]) -> bool:
    """Return whether all unquantized matrices are in bfloat16, which is then kept for any dtype of the arithmetic."""
    matrices = [name for name, shape in wanted.tensor_shapes().items() if len(shape) == 2]
    return all(files[name].kind in ("BF16", FEW_BITS) for name in matrices)
