"""Checkpoints that our own decoder reads and writes, by the names and shapes of their tensors."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from blockdraft.cpu.build import Build, build
from blockdraft.cpu.compiled import CompiledDecoder, why_not
from blockdraft.cuda.graphs import CudaRecorder
from blockdraft.cuda.rounded import round_weights, why_not_rounded
from blockdraft.errors import UsageError
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.packed import PackedLinear, int8_rows
from blockdraft.targets.checkpoint import checked_folder, load_generation_config, load_tokenizer, loading
from blockdraft.targets.families import NotCovered, decoder_config
from blockdraft.targets.native import NativeTarget
from blockdraft.types import DEFAULT_COMPILE, Compile, Quantize

QUANT_METHOD = "blockdraft-int8"  # in a checkpoint's configuration
SCALE = "_scale"  # of an int8 tensor, behind its name
UNMEASURED = "on a GPU, CUDA graphs are captured where compile is on only: nobody has measured them yet"


def load(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    compile: Compile = DEFAULT_COMPILE,
    quantize: Quantize | None = None,
) -> NativeTarget:
    """Load a checkpoint in safetensors and, where there is one, its tokenizer, from a local folder or by hub name.

    Matrices in bfloat16 are kept in it where the forward is compiled, though its dtype be float32: no number changes.

    The compiler, where one is needed, runs while the weights are read, and is waited for, however long it takes.

    Raises:
        NotCovered: The family or one of its settings is none that the decoder knows, or the weights are not there under
            the usual names and shapes.
        ValueError: No such folder or hub name, or files that cannot be read.
    """
    folder, rounded = checked_folder(path), None
    with loading(path):
        config = AutoConfig.from_pretrained(path)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == QUANT_METHOD:
        quantize = "int8"
        del config.quantization_config
    elif quantize == "fp8" or (quantize and device.type == "cuda"):
        refused = why_not_rounded(quantize, device, dtype)
        if refused is not None:
            raise UsageError(f"quantize is {quantize!r}: {refused}.")
        rounded, quantize = quantize, None
    wanted = decoder_config(config)
    on_gpu = device.type == "cuda"
    reason = "it was not asked for" if compile == "off" else UNMEASURED if on_gpu else why_not(wanted, dtype, device)
    with loading(path):
        files = weight_files(path)
    with ExitStack() as opened:
        with loading(path):
            shards = [opened.enter_context(safe_open(file, "pt")) for file in files]
            tensors = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118 (no dictionary)
        check_tensors(wanted, tensors)
        kind = torch.int8 if quantize else torch.bfloat16 if is_bfloat16(wanted, tensors) else dtype
        library = None if reason is not None else build(kind, dtype, wanted.head_dim)
        with loading(path):
            tokenizer = load_tokenizer(path)
        with loading(path, device), torch.no_grad():
            decoder = Decoder(wanted, lambda name: read_tensor(tensors, name).to(device, dtype))
            if quantize:
                for layer in decoder.modules():
                    if isinstance(layer, PackedLinear):
                        layer.quantize()
            if rounded:
                round_weights(decoder, rounded)
    known = folder if folder.exists() else None
    if quantize and dtype != torch.float32:
        raise UsageError(f"int8 weights are for float32 arithmetic; dtype is {str(dtype).removeprefix('torch.')}.")
    target = NativeTarget(decoder, config, tokenizer, known, load_generation_config(path))
    if on_gpu and compile == "on":
        target.capture(CudaRecorder(device))
        return target
    target.compile_reason = reason if library is None else _compile(target, library, compile)
    if compile == "on" and target.compiled is None:
        raise UsageError(f"{path} has no compiled forward: {target.compile_reason}. Use compile auto or off.")
    return target


def save_quantized(target: NativeTarget, folder: Path) -> None:
    """Write a target that was loaded with int8 weights, for `load_target` to read again with the same bits.

    Raises:
        ValueError: The folder exists, or the target has no int8 weights.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already; name a folder that does not.")
    if not target.is_int8:
        raise UsageError('The target has no int8 weights of a CPU; load it there with quantize="int8".')
    tensors: dict[str, Tensor] = {}
    for name, weight in target.named_weights():
        if weight.ndim == 2:
            tensors[name], tensors[name + SCALE] = int8_rows(weight)
        else:
            tensors[name] = weight.contiguous()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = target.architecture | {"quantization_config": {"quant_method": QUANT_METHOD}}
    (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(target.eos_token_ids)}))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(partial)
    partial.rename(folder)


def weight_files(path: str | Path) -> list[str]:
    optional = {"_raise_exceptions_for_missing_entries": False}
    whole = cached_file(path, "model.safetensors", **optional)
    if whole is not None:
        return [whole]
    index = cached_file(path, "model.safetensors.index.json", **optional)
    return [] if index is None else list(get_checkpoint_shard_files(path, index)[0])


def check_tensors(wanted: DecoderConfig, files: dict[str, Any]) -> None:
    """Raise `NotCovered` unless these files hold the tensors of this decoder."""
    if not files:
        raise NotCovered("it has no weights in safetensors")
    for name, shape in wanted.tensor_shapes().items():
        if name not in files:
            raise NotCovered(f"its checkpoint lacks {name}")
        found = tuple(files[name].get_slice(name).get_shape())
        if found != shape:
            raise NotCovered(f"{name} has the shape {list(found)} instead of {list(shape)}")
    if wanted.tied_head and "lm_head.weight" in files:
        table, head = (files[name].get_tensor(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
        if not torch.equal(table, head):
            raise NotCovered("its configuration ties the head to the embeddings, and its checkpoint does not")


def is_bfloat16(wanted: DecoderConfig, files: dict[str, Any]) -> bool:
    """Whether all matrices are in bfloat16: then they stay in it, whatever the arithmetic, for the same numbers."""
    matrices = [name for name, shape in wanted.tensor_shapes().items() if len(shape) == 2]
    return all(files[name].get_slice(name).get_dtype() == "BF16" for name in matrices)


def read_tensor(files: dict[str, Any], name: str) -> Tensor:
    tensor: Tensor = files[name].get_tensor(name)
    if tensor.dtype != torch.int8:
        return tensor
    scale: Tensor = files[name + SCALE].get_tensor(name + SCALE)
    return tensor * scale.unsqueeze(-1)


def _compile(target: NativeTarget, library: Build, compile: Compile) -> str | None:
    """Let the target use this library. Returns why it does not."""
    found = library.library()
    if found is None:
        if compile == "auto":
            logging.getLogger(__name__).warning("The target runs uncompiled, which is slower: %s.", library.reason)
        return library.reason
    target.compiled = CompiledDecoder(target.decoder, found, target.max_context)
    return None
