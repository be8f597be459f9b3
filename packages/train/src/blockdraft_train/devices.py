"""Devices, processes and trackers of a run, through Accelerate."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.nn  # if imported later, it would keep the process group alive as a default argument
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from blockdraft.errors import UsageError
from blockdraft.machine import multiplies_bfloat16
from blockdraft.targets import device_and_dtype


class DeviceRecipe(Protocol):
    """Recipe fields that concern devices and trackers."""

    @property
    def dtype(self) -> str: ...

    @property
    def trackers(self) -> Sequence[str]: ...


def make_accelerator(recipe: DeviceRecipe, folder: Path, device: str | None = None) -> Accelerator:
    """Return the accelerator of this process, which knows its device and the other processes.

    Args:
        folder: Folder that trackers write to.
        device: "cpu" uses no GPU even if there is one; None is the first GPU, or the CPU if there is no GPU.

    Raises:
        UsageError: The device does not exist or cannot train, or a tracker is unknown or not installed.
    """
    if device is not None:
        _check_device(device)
    cpu = device == "cpu" or not torch.cuda.is_available()
    if cpu:
        keep_freed_memory()
    bfloat16 = recipe.dtype == "bfloat16" or (recipe.dtype == "auto" and (not cpu or multiplies_bfloat16()))
    precision = "bf16" if bfloat16 else "no"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # otherwise a process could train with one precision only
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")
    # The context's keys and values read all layers' weights at once, so the network is sharded and gathered as a whole.
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if sharded else None
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        fsdp_plugin=plugin,
        log_with=list(recipe.trackers) or None,
        project_dir=str(folder),
    )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate shards on GPUs only and would not shard here; torch shards on CPUs too.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    missing = {*recipe.trackers} - {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    if missing:
        raise UsageError(
            f"The trackers {sorted(missing)} are unknown or not installed; run pip install tensorboard, or "
            "name others with --trackers (none with --trackers '')."
        )
    return accelerator


def _check_device(device: str) -> None:
    placed, _ = device_and_dtype(device, None)
    if placed.type not in ("cpu", "cuda") or placed.index:
        raise UsageError(
            f"device is {device}; training takes the CPU or the first NVIDIA GPU that it sees. Give cpu, or choose a "
            f"GPU by the environment variable CUDA_VISIBLE_DEVICES={placed.index or 0}."
        )


def keep_freed_memory() -> bool:
    """Make glibc reuse large freed blocks of memory instead of returning them to the operating system.

    The operating system clears every page that it hands out, which takes a third of a training step on a CPU.

    Returns:
        Whether glibc accepted the setting; other C libraries lack it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    trim_threshold, mmap_max = -1, -4  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
    return bool(mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))


def end_processes(accelerator: Accelerator, meshes: Iterable[object] = ()) -> None:
    """Close the trackers and, once all processes are here, the process group with its threads.

    The threads end with the last reference to the group. Threads that remain when the interpreter ends can abort the
    process. So the caller must have dropped what was wrapped: network and optimizers.

    Args:
        meshes: Device meshes of sharded parameters, which caches of torch keep.
    """
    accelerator.wait_for_everyone()
    several = accelerator.num_processes > 1
    if several:
        accelerator.free_memory()
    for mesh in meshes:
        getattr(mesh, "_pg_registry", {}).clear()
    accelerator.end_training()
    if several:
        gc.collect()


def begin_trackers(accelerator: Accelerator, name: str, folder: Path, recipe: Any) -> None:
    """Open the trackers of a run of this name, and send them its recipe."""
    accelerator.init_trackers("blockdraft", init_kwargs={"wandb": {"name": name, "dir": str(folder)}})
    config = {
        name: value if isinstance(value, int | float | str) else str(value) for name, value in asdict(recipe).items()
    }
    for tracker in accelerator.trackers:
        if tracker.name != "tensorboard":  # TensorBoard would make a separate run of it
            tracker.store_init_configuration(config)


def track(accelerator: Accelerator, metrics: dict[str, Any]) -> None:
    """Send the trackers the metrics of a step. Item k of a list, counted from 1, is sent as `name/k`."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
    for name, values in metrics.items():
        if isinstance(values, list):
            numbers |= {f"{name}/{k}": value for k, value in enumerate(values, 1) if value is not None}
    accelerator.log(numbers, step=metrics["step"])
