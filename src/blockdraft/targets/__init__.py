"""Targets: language models whose output must not change."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch

from blockdraft.targets import hf, native
from blockdraft.targets.base import Cache, Target, TargetOutput, TargetText, embedding_and_head
from blockdraft.targets.checkpoint import load_text
from blockdraft.targets.families import NotCovered
from blockdraft.types import DEFAULT_BACKEND, Backend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUNDLED = Path(__file__).parents[1] / "pair" / "target"


def load_target(
    path: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    backend: Backend = DEFAULT_BACKEND,
) -> Target:
    """Load a target.

    Args:
        path: A Hugging Face model folder or hub name; None is the bundled model.
        dtype: Of weights and arithmetic, such as `torch.bfloat16` or "bfloat16"; None is float32 on a CPU, where
            greedy output is exact, and bfloat16 elsewhere.
        device: None is the first GPU if there is one, else the CPU.
        backend: "native" is our own decoder, for the families that it knows; "hf" is transformers; "auto" is the
            former where it knows the model, else the latter. `Target.backend` says which it is.

    Raises:
        ValueError: Unknown folder, unreadable weights, unknown dtype or device, a model that is no decoder-only LM, or
            none that the native decoder knows where that was asked for.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; use one of {sorted(get_args(Backend))}.")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        placed = torch.empty(0, device=device).device
        if placed.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Device {device} is not usable here: {str(error).splitlines()[0]}") from error
    if dtype is None:
        dtype = torch.float32 if placed.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; use one of {sorted(DTYPES)}.")
    path = BUNDLED if path is None else path
    if backend == "hf":
        return hf.load(path, DTYPES[name], placed)
    try:
        return native.load(path, DTYPES[name], placed)
    except NotCovered as reason:
        if backend == "native":
            raise ValueError(f"The native decoder cannot run {path}: {reason}. Use the backend hf or auto.") from reason
        target = hf.load(path, DTYPES[name], placed)
        target.backend_reason = str(reason)
        return target


def load_target_text(path: str | Path | None = None) -> TargetText:
    """Load what is known of a target without its weights. For `path`, and for errors, see `load_target`."""
    return load_text(BUNDLED if path is None else path)


__all__ = [
    "Cache",
    "Target",
    "TargetOutput",
    "TargetText",
    "embedding_and_head",
    "load_target",
    "load_target_text",
]
