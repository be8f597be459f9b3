"""Targets: language models whose output must not change."""

from __future__ import annotations

from pathlib import Path

import torch

from blockdraft.targets import hf
from blockdraft.targets.base import Cache, Target, TargetOutput

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
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Device {device!r} is not usable here: {str(error).splitlines()[0]}") from error
    if isinstance(dtype, str):
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype) or not named.is_floating_point:
            raise ValueError(f"dtype is {dtype!r}; use float32, bfloat16 or float16.")
        dtype = named
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return hf.load(BUNDLED if path is None else path, dtype, device)


__all__ = ["Cache", "Target", "TargetOutput", "load_target"]
