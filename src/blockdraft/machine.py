"""What belongs to this machine and not to a model: where measurements and compiled code are kept, and the
way to its GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
from torch import Tensor

CPUINFO = Path("/proc/cpuinfo")


def cache_folder() -> Path:
    """The folder that `BLOCKDRAFT_CACHE` names, or else `~/.cache/blockdraft`."""
    return Path(os.environ.get("BLOCKDRAFT_CACHE") or Path.home() / ".cache" / "blockdraft")


def processor() -> str:
    """What says which instructions the processor knows. A cache may be shared by several machines."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    kept = [line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.node(), platform.machine(), platform.processor(), *kept])


def send(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU, or of this device already, on a device. A GPU gets them by pinned memory, so that the host
    does not wait until its earlier work is done."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    # Contiguous, since memory cannot be pinned under a tensor whose rows are one row. The memory is not used for
    # anything else until it has been copied; torch sees to it.
    return values.contiguous().pin_memory().to(device, non_blocking=True)
