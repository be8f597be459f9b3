"""Block-diffusion models on disk.

A converted model has the folder of its causal language model, with a few more keys in config.json. As in dllm, its
`model_type` begins with `a2d-`, so that nothing loads it as a causal language model. SDAR's folders (`model_type` sdar)
and the paper's own models (`model_type` bd3lm) are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.folders import clear_remains, replaced
from blockdraft.formats.folder import check_tensors, open_folder
from blockdraft.formats.stored import check_floats
from blockdraft.targets import (
    FAMILIES,
    HEAD,
    AnyConfig,
    ModelConfig,
    NotCovered,
    decoder_config,
    device_and_dtype,
    load_text_with,
    make_config,
)
from blockdraft.text_files import read_json
from blockdraft_diffusion.denoiser import CausalDenoiser, Denoiser, why_not_denoiser
from blockdraft_diffusion.dit import DiT, DiTConfig
from blockdraft_diffusion.model import DiffusionConfig, DiffusionModel
from blockdraft_tools.model_folder import ModelWriter

PREFIX, PAPER = "a2d-", "bd3lm"
FAMILY_OF = {PAPER: PAPER, "sdar": "qwen3"} | {f"{PREFIX}{family}": family for family in FAMILIES}


def load_model(
    path: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    block_size: int | None = None,
) -> DiffusionModel:
    """Load a block-diffusion model from its folder.

    Args:
        device, dtype: As for `load_target`.
        block_size: Tokens of a block; None uses the size in config.json.

    Raises:
        UsageError: There is no such folder, it has another kind of model, weights are missing or unknown, or device or
            dtype are invalid.
    """
    folder = Path(path)
    try:
        raw = read_json(folder / "config.json")
        family = FAMILY_OF.get(raw["model_type"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{folder} has no config.json of a model ({error}); give a block-diffusion model.") from error
    if family is None:
        raise UsageError(
            f"{folder} has a model of type {raw['model_type']!r}, which is not a block-diffusion model; convert it "
            "with blockdraft diffusion convert."
        )
    device, dtype = device_and_dtype(device, dtype)
    network, model_config = _paper(raw, folder) if family == PAPER else _converted(raw, family, folder)
    text = load_text_with(model_config, folder)
    if text.tokenizer is None:
        origin = "GPT-2" if family == PAPER else "the model it was converted from"
        raise UsageError(f"{folder} has no tokenizer; copy the tokenizer of {origin} there.")
    values = {**raw, "block_size": raw.get("block_size") if block_size is None else block_size}
    values.setdefault("token_shift", False)  # other projects do not write it
    values.setdefault("mask_token_id", network.vocab_size - 1 if family == PAPER else text.tokenizer.mask_token_id)
    for name, remedy in (("block_size", "write it there, or give --block-size"), ("mask_token_id", "write it there")):
        if values[name] is None:
            raise UsageError(f"{folder / 'config.json'} lacks {name}; {remedy}.")
    config = DiffusionConfig(**{field.name: values[field.name] for field in fields(DiffusionConfig)})
    if config.mask_token_id >= network.vocab_size:
        raise UsageError(
            f"mask_token_id is {config.mask_token_id} in {folder}, and the model has {network.vocab_size} tokens; "
            "use the config.json that belongs to these weights."
        )
    _load_weights(network, folder)
    network.to(device, dtype).eval().requires_grad_(False)
    return DiffusionModel(network, config, text, raw, other_files(folder))


def other_files(folder: Path) -> dict[str, bytes]:
    """Return `DiffusionModel.files` of a folder, empty if there is no such folder."""
    return {file.name: file.read_bytes() for file in [folder / "generation_config.json"] if file.is_file()}


def _converted(raw: Mapping[str, Any], family: str, folder: Path) -> tuple[Denoiser, AnyConfig]:
    try:
        config = make_config({**raw, "model_type": family})
    except Exception as error:  # transformers raises many kinds
        reason = " ".join(str(error).split())
        raise UsageError(f"{folder / 'config.json'} is invalid: {reason}; use the one of these weights.") from error
    try:
        decoder = decoder_config(config)
        if unsupported := why_not_denoiser(decoder):
            raise NotCovered(unsupported)
    except NotCovered as error:
        raise UsageError(f"{folder} cannot be loaded: {error}.") from error
    with torch.device("meta"):
        return CausalDenoiser(decoder), config


def _paper(raw: Mapping[str, Any], folder: Path) -> tuple[Denoiser, AnyConfig]:
    supported = {"time_conditioning": False, "causal": False, "adaln": True}
    if wrong := [name for name, value in supported.items() if raw.get(name, value) != value]:
        raise UsageError(f"{folder} cannot be loaded: {wrong[0]} is {raw[wrong[0]]}, which is not supported.")
    config = DiTConfig(**{field.name: raw[field.name] for field in fields(DiTConfig) if field.name in raw})
    with torch.device("meta"):
        network = DiT(config)
    return network, ModelConfig(max_position_embeddings=config.model_length)


def _load_weights(network: Denoiser, folder: Path) -> None:
    """Load a network's weights. Raise a UsageError if some are missing or unknown."""
    stored = open_folder(folder).tensors
    if not stored:
        raise UsageError(f"{folder} has no *.safetensors; copy the model's weights there.")
    check_floats(stored)
    # Copied, so that the model does not change when its files are overwritten.
    tensors = {name: entry.tensor().to(torch.float32, copy=True) for name, entry in stored.items()}
    shapes = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    if HEAD not in shapes:
        tensors.pop(HEAD, None)  # some files have it although it is tied to the embedding
    check_tensors(shapes, tensors)
    network.load_state_dict(tensors, assign=True)


def write_model(model: DiffusionModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model with these weights to a folder, atomically, and replace the folder if it exists.

    Raises:
        UsageError: The folder cannot be written. Its old content stays.
    """
    assert model.text.tokenizer is not None
    folder = folder.absolute()
    raw = {**model.raw, **asdict(model.config), "dtype": str(next(iter(tensors.values())).dtype).split(".")[1]}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_remains(folder)
        with replaced(folder) as new:
            writer = ModelWriter(new)
            writer.take(tensors.items())
            model.text.tokenizer.save_pretrained(new)
            for name, content in model.files.items():
                (new / name).write_bytes(content)
            writer.finish(raw, ())
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be written ({error}); free space or choose another --out.") from error
