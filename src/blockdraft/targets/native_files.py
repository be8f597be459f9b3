"""Checkpoints that our own decoder reads, by the names and shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from blockdraft.cpu.build import Build, build
from blockdraft.cpu.compiled_decoder import why_not
from blockdraft.cpu.library import Library
from blockdraft.cpu.weight_cache import Origin, cached_weights
from blockdraft.cuda.rounded import round_weights, why_not_rounded
from blockdraft.errors import UsageError
from blockdraft.formats.quantized import NotRead, read_quantized
from blockdraft.formats.stored import FEW_BITS, Stored, open_tensors, stored
from blockdraft.machine import return_freed
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import Read
from blockdraft.nn.packed import LaidOut, lay_out
from blockdraft.nn.quantized import QuantizedWeight, best_group
from blockdraft.nn.rounding import QUICK, rounded
from blockdraft.targets.adapter import load_model
from blockdraft.targets.base import LoadOptions
from blockdraft.targets.checkpoint import checked_folder, load_generation_config, load_tokenizer, loading
from blockdraft.targets.families import NotCovered, decoder_config, text_part
from blockdraft.targets.fingerprint import weights_fingerprint

BITS = {"int8": 8, "int4": 4}
TABLE_BITS = 8  # of embedding and head, in which fewer cost the most and save the least
SOURCE = "source_fingerprint"  # key of quantization_config, which other programs ignore
TEXT_PART = "model.language_model."  # how names begin beside those of other parts
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNMEASURED = "on a GPU, CUDA graphs are captured where compile is on only: nobody has measured them yet"


@dataclass(frozen=True)
class Checkpoint:
    """A decoder, and what belongs to it.

    Attributes:
        build: Its compiled forward, which may still be in the making; None where there will be none.
        reason: Why there will be none.
        source_fingerprint: As in `CheckpointTarget`.
        tokenizer_reason: As in `Target`.
    """

    decoder: Decoder
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    generation_config: Any
    folder: Path | None
    build: Build | None
    reason: str | None
    source_fingerprint: str | None
    tokenizer_reason: str | None = None


def read_checkpoint(path: str | Path, options: LoadOptions) -> Checkpoint:
    """Read a checkpoint in safetensors and, where there is one, its tokenizer, from a local folder or by hub name.

    Matrices in bfloat16 are kept in it where the forward is compiled, though its dtype be float32: no number changes.
    The compiler, where one is needed, runs while the weights are read.

    Raises:
        NotCovered: The family or one of its settings is none that the decoder knows, or the weights are not there under
            the usual names and shapes.
        UsageError: No such folder or hub name, or files that cannot be read.
    """
    dtype, device, compile, quantize = options.dtype, options.device, options.compile, options.quantize
    folder, by_gpu = checked_folder(path, options.revision), None
    with loading(path):
        config = AutoConfig.from_pretrained(path, revision=options.revision)
    if quantize == "fp8" or (quantize and device.type == "cuda"):
        refused = why_not_rounded(quantize, device, dtype)
        if refused is not None:
            raise UsageError(f"quantize is {quantize!r}: {refused}.")
        by_gpu, quantize = quantize, None
    wanted = decoder_config(config)
    few, config = few_bits_of(config, options), text_part(config)
    on_gpu = device.type == "cuda"
    if wanted.torch_only and (options.quantize or few):
        raise NotCovered(f"it has {wanted.torch_only}, whose weights it neither rounds nor reads in few bits")
    reason = "it was not asked for" if compile == "off" else UNMEASURED if on_gpu else _why_not(wanted, dtype, device)
    tensors, source = open_weights(path, wanted, config, options)
    if quantize is None:
        check_alike(wanted, tensors)
    kind = torch.bfloat16 if is_bfloat16(wanted, tensors) else dtype
    store = torch.int8 if options.kv_dtype == "int8" else dtype
    made = None if reason is not None else build(kind, store, wanted.head_dim, bool(quantize or few))

    def read(name: str) -> Tensor | QuantizedWeight:
        found = tensors[name].read()
        if isinstance(found, QuantizedWeight):
            return found
        if found.ndim < 2:
            return found.to(device, dtype, copy=True)  # else it would keep its file mapped
        if quantize is not None:
            return rounded_weight(name, found if dtype == torch.float32 else found.to(dtype), BITS[quantize])
        return found.to(device, dtype) if library is None else found

    with loading(path):
        tokenizer = load_tokenizer(path, options.revision)
    library = None if made is None else made.library()
    with loading(path, device), torch.no_grad():
        if source is None and (quantize or library is not None):  # while the weights are at hand
            own = ((name, tensors[name].tensor()) for name in wanted.tensor_shapes())
            source = weights_fingerprint(own) if dtype != torch.float16 else ""
        origin = None
        if options.adapter is None:
            loaded = {"dtype": str(dtype), "quantize": quantize, "few_bits": few}
            origin = Origin(tuple(map(Path, weight_files(path, options.revision))), loaded)
        decoder = make_decoder(wanted, read, library, origin)
        if source is None and by_gpu:
            source = weights_fingerprint(decoder.named_weights()) if dtype != torch.float16 else ""
        if by_gpu:
            round_weights(decoder, by_gpu)
    known = folder if folder.exists() else None
    generation_config = load_generation_config(path, options.revision)
    return Checkpoint(decoder, config, tokenizer, generation_config, known, made, reason, source)


def _why_not(wanted: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a decoder has no compiled forward; None where it has one."""
    return f"it does not know {wanted.torch_only}" if wanted.torch_only else why_not(wanted, dtype, device)


def make_decoder(wanted: DecoderConfig, read: Read, library: Library | None, origin: Origin | None) -> Decoder:
    """A decoder, laid out for a library, if there is one: from the cache folder, or else matrix by matrix as it is
    read.

    Args:
        read: As `Decoder` takes it; with a library, matrices may be of any dtype.
        origin: None where its weights are not to be kept.
    """
    if library is None:
        return Decoder(wanted, read)

    def make(names: Sequence[str]) -> LaidOut:
        return lay_out([read(name) for name in names], library)

    cached = None if origin is None else cached_weights(origin, library, wanted.products(), make)
    decoder = Decoder(wanted, read, make if cached is None else cached.matrix)
    return_freed()
    return decoder


def rounded_weight(name: str, weight: Tensor, bits: int) -> QuantizedWeight:
    """A matrix of a checkpoint in few bits; embedding and head never get fewer than 8."""
    bits = max(bits, TABLE_BITS) if name in (TABLE, HEAD) else bits
    return rounded(weight, bits, best_group(weight.size(1)), shares=QUICK)


def weight_files(path: str | Path, revision: str | None = None) -> list[str]:
    optional: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "revision": revision}
    whole = cached_file(path, "model.safetensors", **optional)
    if whole is not None:
        return [whole]
    index = cached_file(path, "model.safetensors.index.json", **optional)
    return [] if index is None else list(get_checkpoint_shard_files(path, index, revision=revision)[0])


def few_bits_of(config: PretrainedConfig, options: LoadOptions) -> Mapping[str, Any] | None:
    """What a quantised checkpoint says of how it is; None for others.

    Raises:
        NotCovered: It is to run where weights of few bits cannot.
        UsageError: It is to be rounded, where it has few bits already.
    """
    few: Mapping[str, Any] | None = getattr(config, "quantization_config", None)
    if not few:
        return None
    if options.quantize not in (None, "int8"):
        raise UsageError(
            f"quantize is {options.quantize!r}, and the checkpoint is quantised already ({few.get('quant_method')}); "
            "leave it out, or give int8, which rounds what is still in 16 bits."
        )
    if options.device.type != "cpu":
        raise NotCovered(f"it is quantised ({few.get('quant_method')}), which the device cpu alone can run")
    return few


def open_weights(
    path: str | Path, wanted: DecoderConfig, config: PretrainedConfig, options: LoadOptions
) -> tuple[dict[str, Stored], str | None]:
    """The tensors of a checkpoint, its adapter merged into them, and its `source_fingerprint` as in `Checkpoint`.

    Raises:
        NotCovered: They are not those of this decoder.
    """
    source, few = None, getattr(config, "quantization_config", None)
    if options.adapter is not None:
        model, source = load_model(path, options)
        tensors = {name: stored(tensor) for name, tensor in model.state_dict().items()}
    else:
        with loading(path):
            found = open_tensors(weight_files(path, options.revision))
        tensors = {name.replace(TEXT_PART, "model.", 1): tensor for name, tensor in found.items()}
    if few:
        try:
            tensors, source = read_quantized(few, tensors), str(few.get(SOURCE) or "")
        except NotRead as refused:
            raise NotCovered(str(refused)) from refused
    if wanted.tied_head and TABLE not in tensors and HEAD in tensors:
        tensors[TABLE] = tensors[HEAD]
    check_tensors(wanted, tensors)
    return tensors, source


def check_alike(wanted: DecoderConfig, files: Mapping[str, Stored]) -> None:
    """Raise `NotCovered` where some parts of what is computed at once are of few bits and some are not."""
    for layer in range(len(wanted.layers)):
        for parts in wanted.projections(layer).values():
            few = [name for name, _ in parts if files[f"{name}.weight"].kind == FEW_BITS]
            others = [name for name, _ in parts if name not in few]
            if few and others:
                raise NotCovered(
                    f"{', '.join(few)} are of few bits and {', '.join(others)} are not, and they are computed at once; "
                    "quantize 'int8' rounds those, too"
                )


def check_tensors(wanted: DecoderConfig, files: Mapping[str, Stored]) -> None:
    """Raise `NotCovered` unless these files hold the tensors of this decoder."""
    if not files:
        raise NotCovered("it has no weights in safetensors")
    for name, shape in wanted.tensor_shapes().items():
        if name not in files:
            raise NotCovered(f"its checkpoint lacks {name}")
        found = files[name].shape
        if found != shape:
            raise NotCovered(f"{name} has the shape {list(found)} instead of {list(shape)}")
    both = wanted.tied_head and HEAD in files and files[HEAD] is not files[TABLE]
    if both and not torch.equal(files[TABLE].tensor(), files[HEAD].tensor()):
        raise NotCovered("its configuration ties the head to the embeddings, and its checkpoint does not")


def is_bfloat16(wanted: DecoderConfig, files: Mapping[str, Stored]) -> bool:
    """Whether all matrices that are not of few bits are in bfloat16: then they stay in it, whatever the arithmetic, for
    the same numbers."""
    matrices = [name for name, shape in wanted.tensor_shapes().items() if len(shape) == 2]
    return all(files[name].kind in ("BF16", FEW_BITS) for name in matrices)
