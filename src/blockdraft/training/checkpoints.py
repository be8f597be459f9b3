"""State of a run on disk, one file a checkpoint; and the state of weights and optimizers that is written there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from blockdraft.errors import UsageError
from blockdraft.folders import FULL

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write a checkpoint, then delete all but the `keep` newest. A file appears whole or not at all.

    Raises:
        UsageError: The file cannot be written, for instance because the disk is full. Older checkpoints stay.
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
    except (OSError, RuntimeError) as error:  # torch turns some OSErrors into RuntimeErrors
        partial.unlink(missing_ok=True)
        kept = [one.name for one in _checkpoints(folder)[-1:]]
        raise UsageError(
            f"{path} cannot be written ({error}). The newest checkpoint is {kept[0] if kept else 'none'}; free disk "
            "space and run the command again to resume from it."
        ) from error
    for old in [*_checkpoints(folder)[:-keep], *folder.glob("*.partial")]:  # killed processes leave the latter
        old.unlink()


def newest(folder: Path) -> dict[str, Any] | None:
    """State in the newest checkpoint, on the CPU; None if there is no checkpoint.

    Raises:
        UsageError: The checkpoint cannot be read.
    """
    for path in reversed(_checkpoints(folder)):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle, zip and torch each raise their own kinds
            told = str(error).splitlines()[0]
            raise UsageError(
                f"{path} cannot be read ({told}); delete it to resume from the checkpoint before it, if there is one."
            ) from error
        return state
    return None


def after_interruption(folder: Path) -> str:
    """Sentence on what the same command will do after an interruption."""
    steps = [int(path.stem.removeprefix("step-")) for path in _checkpoints(folder)]
    if not steps:
        return "Interrupted before the first checkpoint; the same command starts over."
    return f"Interrupted; the same command resumes from step {steps[-1]}, the newest checkpoint."


@contextmanager
def named_when_full(folder: Path) -> Iterator[None]:
    """Context in which a full disk raises a `UsageError` that names the newest checkpoint of the run in `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        kept = _checkpoints(folder / "checkpoints")
        raise UsageError(
            f"{folder} cannot be written ({error}). The newest checkpoint is {kept[-1].name if kept else 'none'}; free "
            "disk space and run the command again to resume from it."
        ) from error


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


def gather_weights(module: nn.Module) -> dict[str, Tensor]:
    """Tensors by name, on the CPU of the main process, also where processes hold shards. All processes must call it."""
    return cast(dict[str, Tensor], get_model_state_dict(module, options=WHOLE))


def gather_state(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    """Weights and optimizer states for `restore_state`, on the CPU of the main process. All processes must call it."""
    weights, moments = get_state_dict(module, optimizers, options=WHOLE)
    return {"network": weights, "optimizers": moments}


def restore_state(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer], state: Mapping[str, Any]) -> None:
    """Load what `gather_state` returned; further keys of `state` are ignored."""
    set_state_dict(
        module,
        optimizers,
        model_state_dict=state["network"],
        optim_state_dict=state["optimizers"],
        options=StateDictOptions(full_state_dict=True),
    )
