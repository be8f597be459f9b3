"""Checkpoints that our own decoder reads and writes, by the names and shapes of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from blockdraft.cpu.build import Build, build
from blockdraft.cpu.compiled import why_not
from blockdraft.cuda.rounded import round_weights, why_not_rounded
from blockdraft.errors import UsageError
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.quantized import QuantizedWeight, best_group, round_to_nearest
from blockdraft.targets.adapter import load_model
from blockdraft.targets.base import LoadOptions
from blockdraft.targets.checkpoint import checked_folder, load_generation_config, load_tokenizer, loading
from blockdraft.targets.families import NotCovered, decoder_config
from blockdraft.targets.fingerprint import weights_fingerprint

BITS = {"int8": 8, "int4": 4}
TABLE_BITS = 8  # of embedding and head, in which fewer cost the most and save the least
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


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, on disk or in memory.

    Attributes:
        read: Gives it, on the CPU.
    """

    shape: tuple[int, ...]
    is_bfloat16: bool
    read: Callable[[], Tensor]


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
    folder, rounded, source = checked_folder(path, options.revision), None, None
    with loading(path):
        config = AutoConfig.from_pretrained(path, revision=options.revision)
    if quantize == "fp8" or (quantize and device.type == "cuda"):
        refused = why_not_rounded(quantize, device, dtype)
        if refused is not None:
            raise UsageError(f"quantize is {quantize!r}: {refused}.")
        rounded, quantize = quantize, None
    wanted = decoder_config(config)
    on_gpu = device.type == "cuda"
    reason = "it was not asked for" if compile == "off" else UNMEASURED if on_gpu else why_not(wanted, dtype, device)
    with ExitStack() as opened:
        if options.adapter is not None:
            model, source = load_model(path, options)
            tensors = {name: stored(tensor) for name, tensor in model.state_dict().items()}
        else:
            with loading(path):
                tensors = open_tensors(weight_files(path, options.revision), opened)
        if wanted.tied_head and TABLE not in tensors and HEAD in tensors:
            tensors[TABLE] = tensors[HEAD]
        check_tensors(wanted, tensors)
        kind = torch.bfloat16 if is_bfloat16(wanted, tensors) else dtype
        store = torch.int8 if options.kv_dtype == "int8" else dtype
        library = None if reason is not None else build(kind, store, wanted.head_dim, quantize is not None)

        def read(name: str) -> Tensor | QuantizedWeight:
            tensor = read_tensor(tensors, name).to(device, dtype)
            return tensor if quantize is None or tensor.ndim < 2 else rounded_weight(name, tensor, BITS[quantize])

        with loading(path):
            tokenizer = load_tokenizer(path, options.revision)
        with loading(path, device), torch.no_grad():
            if source is None and quantize:
                own = ((name, read_tensor(tensors, name).to(dtype)) for name in wanted.tensor_shapes())
                source = weights_fingerprint(own) if dtype != torch.float16 else ""
            decoder = Decoder(wanted, read)
            if source is None and rounded:
                source = weights_fingerprint(decoder.named_weights()) if dtype != torch.float16 else ""
            if rounded:
                round_weights(decoder, rounded)
    known = folder if folder.exists() else None
    generation_config = load_generation_config(path, options.revision)
    return Checkpoint(decoder, config, tokenizer, generation_config, known, library, reason, source)


def rounded_weight(name: str, weight: Tensor, bits: int) -> QuantizedWeight:
    """A matrix of a checkpoint in few bits; embedding and head never get fewer than 8."""
    bits = max(bits, TABLE_BITS) if name in (TABLE, HEAD) else bits
    return round_to_nearest(weight, bits, best_group(weight.size(1)))


def weight_files(path: str | Path, revision: str | None = None) -> list[str]:
    optional: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "revision": revision}
    whole = cached_file(path, "model.safetensors", **optional)
    if whole is not None:
        return [whole]
    index = cached_file(path, "model.safetensors.index.json", **optional)
    return [] if index is None else list(get_checkpoint_shard_files(path, index, revision=revision)[0])


def open_tensors(files: Sequence[str], opened: ExitStack) -> dict[str, Stored]:
    """The tensors of safetensors files, which stay open as long as `opened`."""
    found = {}
    for file in files:
        shard = opened.enter_context(safe_open(file, "pt"))
        for name in shard.keys():  # noqa: SIM118 (no dictionary)
            header = shard.get_slice(name)
            found[name] = Stored(
                tuple(header.get_shape()), header.get_dtype() == "BF16", partial(shard.get_tensor, name)
            )
    return found


def stored(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), tensor.dtype == torch.bfloat16, lambda: tensor)


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
    if both and not torch.equal(files[TABLE].read(), files[HEAD].read()):
        raise NotCovered("its configuration ties the head to the embeddings, and its checkpoint does not")


def is_bfloat16(wanted: DecoderConfig, files: Mapping[str, Stored]) -> bool:
    """Whether all matrices are in bfloat16: then they stay in it, whatever the arithmetic, for the same numbers."""
    matrices = [name for name, shape in wanted.tensor_shapes().items() if len(shape) == 2]
    return all(files[name].is_bfloat16 for name in matrices)


def read_tensor(files: Mapping[str, Stored], name: str) -> Tensor:
    return files[name].read()
