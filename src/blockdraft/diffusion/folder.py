"""The folder of a block-diffusion model, written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from blockdraft.denoisers.folder import load_model
from blockdraft.denoisers.model import DiffusionModel
from blockdraft.errors import UsageError
from blockdraft.quantize.folder import ModelWriter

__all__ = ["load_model", "write_model"]


def write_model(model: DiffusionModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model with these weights, whole or not at all, to a folder that is replaced if it is there.

    Raises:
        UsageError: The disk is full, or the like. What was there stays.
    """
    assert model.text.tokenizer is not None
    folder = folder.absolute()
    # Hidden, so that nobody's copy with such a name is taken for what a killed process left.
    partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    raw = {**model.raw, **asdict(model.config), "dtype": str(next(iter(tensors.values())).dtype).split(".")[1]}
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        if old.exists() and folder.exists():
            shutil.rmtree(old)
        partial.mkdir(parents=True)
        writer = ModelWriter(partial)
        writer.take(tensors.items())
        model.text.tokenizer.save_pretrained(partial)
        for name, content in model.files.items():
            (partial / name).write_bytes(content)
        writer.finish(raw, ())
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise UsageError(f"{folder} cannot be written ({error}); free space or choose another --out.") from error
