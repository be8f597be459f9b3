"""The files of checkpoints that our own decoder reads and writes, by the names and shapes of their tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.packed import int8_rows
from blockdraft.targets.families import NotCovered

if TYPE_CHECKING:
    from blockdraft.targets.native import NativeTarget

QUANT_METHOD = "blockdraft-int8"  # in a checkpoint's configuration
SCALE = "_scale"  # of an int8 tensor, behind its name


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


def save_quantized(target: NativeTarget, folder: Path) -> None:
    """Write a target that was loaded with int8 weights, for `load_target` to read again with the same bits.

    Raises:
        ValueError: The folder exists, or the target has no int8 weights.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; name a folder that does not.")
    if not target.is_int8:
        raise ValueError('The target has no int8 weights of a CPU; load it there with quantize="int8".')
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
