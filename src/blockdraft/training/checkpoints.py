"""The state of a run on disk, one file a checkpoint. A file appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from blockdraft.errors import UsageError


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write a checkpoint, then delete all but the `keep` newest.

    Raises:
        ValueError: The disk is full, or the like. Older checkpoints stay.
    """
    path = folder / f"step-{step:08}.pt"
    partial = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch turns some of the former into the latter
        partial.unlink(missing_ok=True)
        kept = [one.name for one in _checkpoints(folder)[-1:]]
        raise UsageError(
            f"{path} cannot be written ({error}). The newest checkpoint is {kept[0] if kept else 'none'}; free space "
            "and run the command again to go on from it."
        ) from error
    for old in [*_checkpoints(folder)[:-keep], *folder.glob("*.partial")]:  # the latter of killed processes
        old.unlink()


def newest(folder: Path) -> dict[str, Any] | None:
    """The state of the newest checkpoint, on the CPU; None where there is none.

    Raises:
        ValueError: It cannot be read.
    """
    for path in reversed(_checkpoints(folder)):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle, zip and torch each have their own
            told = str(error).splitlines()[0]
            raise UsageError(
                f"{path} cannot be read ({told}); delete it to go on from the one before, if there is one."
            ) from error
        return state
    return None


def after_interruption(folder: Path) -> str:
    """What the same command will do now, as a sentence."""
    steps = [int(path.stem.removeprefix("step-")) for path in _checkpoints(folder)]
    if not steps:
        return "Interrupted before the first checkpoint (--save-every), so the same command begins anew."
    return f"Interrupted; the same command goes on from step {steps[-1]}, the newest checkpoint (--save-every)."


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))
