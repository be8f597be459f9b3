"""Targets: language models whose output must not change."""

from __future__ import annotations

from pathlib import Path

import torch

from blockdraft.targets import hf
from blockdraft.targets.base import Cache, Target, TargetOutput, TargetText, embedding_and_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUNDLED = Path(__file__).parents[1] / "pair" / "target"


def load_target(
    path: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Target:
    """Load a target.

    Args:
        path: A Hugging Face model folder or hub name; None is the bundled model.
        dtype: Of weights and arithmetic, such as `torch.bfloat16` or "bfloat16"; None is float32 on a CPU, where
            greedy output is exact, and bfloat16 elsewhere.
        device: None is the first GPU if there is one, else the CPU.

    Raises:
        ValueError: Unknown folder, unreadable weights, unknown dtype or device, a model that is no decoder-only LM.
    """
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
    return hf.load(BUNDLED if path is None else path, DTYPES[name], placed)


def load_target_text(path: str | Path | None = None) -> TargetText:
    """Load what is known of a target without its weights. For `path`, and for errors, see `load_target`."""
    return hf.load_text(BUNDLED if path is None else path)


__all__ = ["Cache", "Target", "TargetOutput", "TargetText", "embedding_and_head", "load_target", "load_target_text"]
