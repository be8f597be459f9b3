"""Checkpoints of a run, one file each, and the state of weights and optimizers that they hold."""

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

    Raises UsageError if it cannot be written, for instance because the disk is full. Older checkpoints stay.
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
        raise _disk_full(path, folder, error) from error
    for old in [*_checkpoints(folder)[:-keep], *folder.glob("*.partial")]:  # killed processes leave the latter
        old.unlink()


def newest(folder: Path) -> dict[str, Any] | None:
    """Return the state in the newest checkpoint, on the CPU, or None if there is none. Raise UsageError if broken."""
    paths = _checkpoints(folder)
    if not paths:
        return None
    try:
        state: dict[str, Any] = torch.load(paths[-1], map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise their own kinds
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{paths[-1]} cannot be read ({reason}); delete it to resume from the checkpoint before it, if any."
        ) from error
    return state


def after_interruption(folder: Path) -> str:
    """Return a sentence on what the same command will do after an interruption."""
    steps = [int(path.stem.removeprefix("step-")) for path in _checkpoints(folder)]
    if not steps:
        return "Interrupted before the first checkpoint; the same command starts over."
    return f"Interrupted; the same command resumes from step {steps[-1]}, the newest checkpoint."


@contextmanager
def named_when_full(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into a `UsageError` that names the newest checkpoint of the run in `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _disk_full(folder, folder / "checkpoints", error) from error


def _disk_full(path: Path, checkpoints: Path, error: Exception) -> UsageError:
    newest_name = next((checkpoint.name for checkpoint in reversed(_checkpoints(checkpoints))), "none")
    return UsageError(
        f"{path} cannot be written ({error}). The newest checkpoint is {newest_name}; free disk space and run the "
        "command again to resume from it."
    )


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


def gather_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return tensors by name, on the CPU of the main process, gathered from shards. All processes must call it."""
    return cast(dict[str, Tensor], get_model_state_dict(module, options=WHOLE))


def gather_state(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    """Return weights and optimizer states for `restore_state`, on the CPU of the main process.

    All processes must call it.
    """
    weights, moments = get_state_dict(module, optimizers, options=WHOLE)
    return {"network": weights, "optimizers": moments}


def restore_state(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer], state: Mapping[str, Any]) -> None:
    """Load what `gather_state` returned. Other keys of `state` are ignored."""
    set_state_dict(
        module,
        optimizers,
        model_state_dict=state["network"],
        optim_state_dict=state["optimizers"],
        options=StateDictOptions(full_state_dict=True),
    )
