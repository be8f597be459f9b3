"""Reader of GGUF files for the native decoder, and of their tokenizers and limits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import FLOATS, GGUFFile, bytes_held, open_gguf, usual_block
from blockdraft.formats.stored import dense
from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.compiled_decoder import why_not, why_not_packed
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.weight_cache import Make, Origin
from blockdraft.machine import free_bytes, return_freed
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_layer import Read, ReadFused, joined
from blockdraft.nn.packed import DeviceWeight
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.targets.base import NotCovered, TargetText
from blockdraft.targets.checkpoint import end_tokens, loading, max_context
from blockdraft.targets.families import decoder_config
from blockdraft.targets.gguf.config import EMBEDDING, gguf_config
from blockdraft.targets.gguf.tensors import GGUFWeights, decoder_weights, fitted
from blockdraft.targets.gguf.tokenizer import UnknownTokenizer, end_ids, gguf_tokenizer
from blockdraft.targets.native_files import NativeCheckpoint, check_store, make_decoder, packing
from blockdraft.types import LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GIB = 2**30
MUCH_MORE = GIB  # bytes in memory beyond those in the file that cause a warning
log = logging.getLogger(__name__)


def read_gguf(path: str | Path, options: LoadOptions) -> NativeCheckpoint:
    """Read a decoder from a GGUF file.

    Quantized matrices are kept on a CPU, and on an NVIDIA GPU with Triton, where factors are rounded to float16.
    Elsewhere, they are dequantized.

    Raises:
        UsageError: The file cannot be read, the decoder does not support its architecture, types or settings, or the
            options ask for quantization or an adapter.
    """
    check_options(path, options)
    file = open_gguf(path)
    with understanding(path):
        config = gguf_config(file)
        wanted = fitted(decoder_config(config), file)
        weights = decoder_weights(file, wanted)
        tokenizer, missing = find_tokenizer(file)
        ends = end_ids(file.metadata)
        longest = int(file.metadata[f"{file.metadata['general.architecture']}.context_length"])
    check_store(path, wanted, options)
    if config.max_position_embeddings < longest:
        log.warning(
            "The context of %s ends at %d tokens instead of %d: beyond, its rotary embeddings change with the length.",
            path,
            config.max_position_embeddings,
            longest,
        )
    file = replace(file, metadata={})  # frees its vocabulary
    return_freed()
    dtype, device = options.torch_dtype, options.torch_device
    on_cpu = device.type == "cpu"
    matrices = {tensor.kind for tensor in weights.tensors.values() if len(tensor.shape) == 2}
    halved = matrices & set(FLOATS) == {"BF16"} and not weights.expanded
    kind = torch.bfloat16 if halved else dtype
    reason = "compile is off" if options.compile == "off" else why_not(wanted, dtype, device)
    store = options.store_dtype(default=torch.bfloat16)
    packs = options.compile != "off" and why_not_packed(wanted, dtype, device) is None
    made = build(kind, store, wanted.head_divisor, not matrices <= set(FLOATS)) if packs else None
    library, origin = None if made is None else made.library(), Origin(file.files, {"dtype": str(dtype)})
    keeps = on_cpu or (device.type == "cuda" and options.compile != "off" and find_spec("triton") is not None)
    held = bytes_held if on_cpu else partial(held_on_gpu, dtype=dtype)
    needed = weights.nbytes(kind if on_cpu else dtype, keeps, held)
    mapped = library is not None and origin.is_worth_it()
    fits = check_memory(file, needed, free_bytes(device), device, mapped)

    def read(name: str) -> Tensor | QuantizedWeight:
        weight = weights.read(name)
        if isinstance(weight, QuantizedWeight) and keeps and not on_cpu:
            return weight  # moved once it is fused
        if not on_cpu:
            return dense(weight).to(device, dtype)
        if isinstance(weight, QuantizedWeight) or (library is not None and weight.ndim == 2):
            return weight
        return weight.to(dtype)

    make = None if library is None else file_packing(weights, read, library)
    with loading(path, device), torch.no_grad():
        if keeps and not on_cpu:
            decoder = Decoder(wanted, read, fusing_on_gpu(read, device, dtype))
        else:
            decoder = make_decoder(wanted, read, library, origin, not fits, make)
    return NativeCheckpoint(
        decoder=decoder,
        config=config,
        tokenizer=tokenizer,
        generation_config=SimpleNamespace(eos_token_id=ends),
        folder=file.path,
        build=made if reason is None else None,
        reason=reason,
        source_fingerprint="" if dtype == torch.float16 else weights.fingerprint(),
        tokenizer_reason=missing,
    )


def file_packing(weights: GGUFWeights, read: Read, library: Library) -> Make:
    """Return a function that packs the matrices of one product, straight from the file where the library can."""
    otherwise = packing(read, library)
    return lambda names: weights.packed(names, library) or otherwise(names)


def held_on_gpu(kind: str, dtype: torch.dtype) -> float:
    """Return at most the bytes of memory on a GPU per value of a quantized matrix. One fused with 8 bits takes 1.25."""
    block = usual_block(kind)
    if block.floating:
        return dtype.itemsize
    return 0.5 + 4 / 32 if block.bits == 4 else 1 + 4 / 16  # codes, and two factors of 16 bits per group


def fusing_on_gpu(read: Read, device: torch.device, dtype: torch.dtype) -> ReadFused:
    """Return a function that reads the weights of one product onto a GPU, quantized where its kernel knows them."""
    from blockdraft.kernels.cuda.quantized_product import PackedCodes, fits  # needs Triton

    def fused(names: Sequence[str]) -> Tensor | DeviceWeight:
        weights = [read(name) for name in names]
        if not all(isinstance(weight, QuantizedWeight) for weight in weights):
            return torch.cat([dense(weight).to(device, dtype) for weight in weights])
        whole = joined(weights)
        assert isinstance(whole, QuantizedWeight)
        return PackedCodes.of(whole).to(device) if fits(whole) else dense(whole).to(device, dtype)

    return fused


def check_memory(file: GGUFFile, needed: int, free: int, device: torch.device, mapped: bool = False) -> bool:
    """Return whether weights fit into the free memory. Warn if they fill it, or need much more than in the file.

    Args:
        mapped: Whether packed weights are mapped from the cache folder, so that they need not fit.

    Raises:
        UsageError: They do not fit and are not mapped.
    """
    path, stored = file.path, file.bytes
    if mapped and needed > free / 2:
        log.warning(
            "The weights of %s take %.1f GiB of %.1f GiB of free memory. They are mapped from the cache folder%s.",
            path,
            needed / GIB,
            free / GIB,
            "" if needed <= free else ", and what does not fit is read again when it is needed, which is slow",
        )
        return needed <= free
    if needed > free:
        raise UsageError(
            f"The weights of {path} take {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free; close "
            "other programs, or use a smaller model"
            f"{', or this one in Q4_K_M or Q4_0' if device.type == 'cpu' else ''}."
        )
    if needed > stored + MUCH_MORE:
        log.warning(
            "The weights of %s take %.1f GiB of memory and %.1f GiB in the file: %s.",
            path,
            needed / GIB,
            stored / GIB,
            "types of fewer than 4 bits and those with a table of values take 8 bits, and F16 takes 32"
            if device.type == "cpu"
            else "on a GPU they are dequantized to the target's dtype",
        )
    return True


@contextmanager
def understanding(path: str | Path) -> Iterator[None]:
    """Turn all errors in interpreting a file's metadata into a UsageError that names the file."""
    try:
        yield
    except NotCovered as refused:
        raise UsageError(
            f"{path} cannot be run: {refused}. No other backend runs GGUF files; use the folder of the original "
            "model, or, if transformers supports the architecture, one that it converts from the file "
            "(AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME, "
            "quantization_config=GgufConfig(dequantize=True)), then save_pretrained)."
        ) from refused
    except UsageError:
        raise
    except Exception as error:  # of any kind, since metadata can be wrong in any way
        raise UsageError(
            f"{path} has metadata that make no model ({type(error).__name__}: {error}); copy or download it again."
        ) from error


def check_options(path: str | Path, options: LoadOptions) -> None:
    """Raise a UsageError for options that GGUF files do not take."""
    if options.quantize is not None:
        raise UsageError(
            f"quantize is {options.quantize!r}, and the weights of a GGUF file are not changed; leave it out, give "
            "the model's folder instead, or make another file with llama-quantize."
        )
    refuse(path, adapter=options.adapter, revision=options.revision)


def refuse(path: str | Path, **options: object) -> None:
    """Raise a UsageError for given options that apply only to a model folder or hub name."""
    for name, given in options.items():
        if given is not None:
            raise UsageError(
                f"{name} is {given!r}, which goes with a model folder or hub name; leave it out for {path}."
            )


def load_gguf_text(path: str | Path, revision: str | None = None) -> TargetText:
    """Load tokenizer and limits of a GGUF file. Errors as in `read_gguf`."""
    refuse(path, revision=revision)
    file = open_gguf(path)
    with understanding(path):
        config = gguf_config(file)
        tokenizer, missing = find_tokenizer(file)
        ends = end_tokens(SimpleNamespace(eos_token_id=end_ids(file.metadata)), config, tokenizer)
    return TargetText(file.path, tokenizer, max_context(config), ends, missing)


def find_tokenizer(file: GGUFFile) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Return the tokenizer of a file, or the reason why there is none.

    Raises:
        UsageError: It has more tokens than the model.
    """
    tokens, rows = len(file.metadata.get("tokenizer.ggml.tokens") or ()), file.tensors[EMBEDDING].shape[0]
    if tokens > rows:
        raise UsageError(
            f"{file.path} has a tokenizer of {tokens} tokens and a model of {rows} (rows of {EMBEDDING}), which do not "
            "belong together; get a file of this model from elsewhere."
        )
    try:
        return gguf_tokenizer(file.metadata), None
    except UnknownTokenizer as unknown:
        return None, f"{file.path.name}: {unknown}"
