"""The trackers that a run reports to, such as TensorBoard."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from blockdraft.training.recipe import Recipe


def begin_trackers(accelerator: Accelerator, name: str, folder: Path, recipe: Recipe) -> None:
    """Open the trackers of a run of this name, and tell them its recipe."""
    own = {"wandb": {"name": name, "dir": str(folder)}}
    accelerator.init_trackers("blockdraft", init_kwargs=own)
    told = {
        name: value if isinstance(value, int | float | str) else str(value) for name, value in asdict(recipe).items()
    }
    for tracker in accelerator.trackers:
        if tracker.name != "tensorboard":  # which would make a run of its own of it
            tracker.store_init_configuration(told)


def track(accelerator: Accelerator, figures: dict[str, Any]) -> None:
    """Tell them the figures of a step, those of a list by their position."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
    for name, values in figures.items():
        if isinstance(values, list):
            numbers |= {f"{name}/{k}": value for k, value in enumerate(values, 1) if value is not None}
    accelerator.log(numbers, step=figures["step"])
