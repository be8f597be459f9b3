"""One process or many: what Accelerate is told."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from blockdraft.errors import UsageError
from blockdraft.machine import multiplies_bfloat16
from blockdraft.targets import device_and_dtype


class DeviceRecipe(Protocol):
    """What of a recipe concerns devices and trackers."""

    @property
    def dtype(self) -> str: ...

    @property
    def trackers(self) -> Sequence[str]: ...


def make_accelerator(recipe: DeviceRecipe, folder: Path, device: str | None = None) -> Accelerator:
    """The accelerator of this process, which knows its device and its fellows.

    Args:
        folder: Where trackers write.
        device: "cpu" uses no GPU even where there is one; None is the first GPU, or the CPU where there is none.

    Raises:
        UsageError: There is no such device, training cannot use it, or a tracker is unknown or not installed.
    """
    if device is not None:
        _check_device(device)
    cpu = device == "cpu" or not torch.cuda.is_available()
    if cpu:
        keep_freed_memory()
    bfloat16 = recipe.dtype == "bfloat16" or (recipe.dtype == "auto" and (not cpu or multiplies_bfloat16()))
    precision = "bf16" if bfloat16 else "no"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # else a process could train in one arithmetic alone
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")
    # The context's keys and values read all layers' weights at once, so the network is sharded and gathered as a whole.
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if sharded else None
    found = Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        fsdp_plugin=plugin,
        log_with=list(recipe.trackers) or None,
        project_dir=str(folder),
    )
    if plugin is not None and found.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate shards on GPUs only and would leave it at that; torch shards on CPUs too.
        found.state.distributed_type, found.state.fsdp_plugin = DistributedType.FSDP, plugin
    missing = {*recipe.trackers} - {str(getattr(tracker, "value", tracker)) for tracker in found.log_with}
    if missing:
        raise UsageError(
            f"The trackers {sorted(missing)} are unknown or not installed; run pip install 'blockdraft[train]' for "
            "tensorboard, or name others with --trackers (none with --trackers '')."
        )
    return found


def _check_device(device: str) -> None:
    placed, _ = device_and_dtype(device, None)
    if placed.type not in ("cpu", "cuda") or placed.index:
        raise UsageError(
            f"device is {device}; training takes the CPU or the first NVIDIA GPU that it sees. Give cpu, or choose a "
            f"GPU by the environment variable CUDA_VISIBLE_DEVICES={placed.index or 0}."
        )


def keep_freed_memory() -> bool:
    """Have glibc reuse large blocks of memory rather than return them to the system and ask for them anew.

    The system clears every page that it hands out, which takes a third of a training step on a CPU.

    Returns:
        Whether it was done; other C libraries have no such switch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    trim_threshold, mmap_max = -1, -4  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
    return bool(mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))
