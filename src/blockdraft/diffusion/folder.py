"""Block-diffusion models on disk: the folder of a causal language model, with a few more keys in its config.json.

`model_type` is `a2d-` and the family, as in dllm, so that nobody takes the folder for a causal language model. SDAR's
folders (`model_type` sdar) are read as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig

from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.settings import DiffusionConfig
from blockdraft.errors import UsageError
from blockdraft.formats.folder import check_tensors
from blockdraft.formats.stored import open_tensors
from blockdraft.nn.denoiser import CausalDenoiser, why_not_denoiser
from blockdraft.quantize.folder import ModelWriter
from blockdraft.targets import FAMILIES, HEAD, NotCovered, TargetText, decoder_config, load_text_with

PREFIX = "a2d-"
FAMILY_OF = {"sdar": "qwen3"} | {f"{PREFIX}{family}": family for family in FAMILIES}


def load_model(
    path: str | Path, device: str | None = None, dtype: str | None = None, block_size: int | None = None
) -> DiffusionModel:
    """Load a block-diffusion model from its folder.

    Args:
        device: None is the first GPU, else the CPU.
        dtype: "float32", "bfloat16" or "float16"; None is float32 on a CPU and bfloat16 elsewhere.
        block_size: None is what the folder says.

    Raises:
        UsageError: There is no such folder, it holds another kind of model, or not just the weights that belong there.
    """
    folder = Path(path)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family = FAMILY_OF.get(raw["model_type"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{folder} has no config.json of a model ({error}); give a block-diffusion model.") from error
    if family is None:
        raise UsageError(
            f"{folder} holds a model of the type {raw['model_type']!r}, which is no block-diffusion model; make one of "
            "it by blockdraft diffusion convert."
        )
    network, text = _network(raw, family, folder)
    placed = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or ("float32" if placed.type == "cpu" else "bfloat16")
    network.to(placed, getattr(torch, kind)).eval()
    given = {**raw, "token_shift": raw.get("token_shift", False)}  # which dllm and SDAR do not write
    given["block_size"] = block_size or raw.get("block_size")
    given.setdefault("mask_token_id", text.tokenizer.mask_token_id if text.tokenizer else None)
    for name, remedy in (("block_size", "give it by --block-size"), ("mask_token_id", "write it there")):
        if given[name] is None:
            raise UsageError(f"{folder / 'config.json'} lacks {name}; {remedy}.")
    config = DiffusionConfig(**{name: given[name] for name in DiffusionConfig.__annotations__})
    if config.mask_token_id >= network.vocab_size:
        raise UsageError(
            f"mask_token_id is {config.mask_token_id} in {folder}, and the model has {network.vocab_size} tokens; "
            "use the config.json that belongs to these weights."
        )
    files = tuple(file for file in [folder / "generation_config.json"] if file.is_file())
    return DiffusionModel(network, config, text, raw, files)


def _network(raw: Mapping[str, Any], family: str, folder: Path) -> tuple[CausalDenoiser, TargetText]:
    config = AutoConfig.for_model(family, **{key: value for key, value in raw.items() if key != "model_type"})
    text = load_text_with(config, folder)
    if text.tokenizer is None:
        raise UsageError(f"{folder} has no tokenizer; copy that of the model it was made of there.")
    try:
        wanted = decoder_config(config)
    except NotCovered as refused:
        raise UsageError(f"{folder} cannot be loaded: {refused}.") from refused
    if refused_too := why_not_denoiser(wanted):
        raise UsageError(f"{folder} cannot be loaded: {refused_too}.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} has no *.safetensors; copy the model's weights there.")
    try:
        tensors = {name: each.tensor() for name, each in open_tensors(list(map(str, files))).items()}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"The weights in {folder} are corrupt or cut short ({error}); copy them again.") from error
    if wanted.tied_head:
        tensors.pop(HEAD, None)
    check_tensors(wanted.tensor_shapes(), tensors)
    with torch.device("meta"):
        network = CausalDenoiser(wanted)
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return network.requires_grad_(False), text


def write_model(model: DiffusionModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model with these weights, whole or not at all, to a folder that is replaced if it is there.

    Raises:
        UsageError: The disk is full, or the like. What was there stays.
    """
    assert model.text.tokenizer is not None
    folder = folder.absolute()
    partial, old = (folder.with_name(f"{folder.name}.{kind}") for kind in ("partial", "old"))
    raw = {**model.raw, **asdict(model.config), "dtype": str(next(iter(tensors.values())).dtype).split(".")[1]}
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        if old.exists() and folder.exists():
            shutil.rmtree(old)
        partial.mkdir(parents=True)
        writer = ModelWriter(partial)
        writer.take(tensors.items())
        model.text.tokenizer.save_pretrained(partial)
        writer.finish(raw, model.files)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise UsageError(f"{folder} cannot be written ({error}); free space or choose another --out.") from error
