"""What belongs to this machine and not to a model: where measurements and compiled code are kept, and the
way to its GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

CPUINFO = Path("/proc/cpuinfo")
CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
OWN_CGROUP = Path("/proc/self/cgroup")


# What lies there: folders, and what their files are. All of it can be made again.
CACHED = {
    "libraries": "forwards compiled for this processor",
    "weights": "weights of large targets as their compiled forward reads them",
    "costs": "what cycles cost, for each target and drafter",
    "threads": "which number of threads is fastest",
}


def cache_folder() -> Path:
    """The folder that `BLOCKDRAFT_CACHE` names, or else `~/.cache/blockdraft`."""
    return Path(os.environ.get("BLOCKDRAFT_CACHE") or Path.home() / ".cache" / "blockdraft")


def processor() -> str:
    """What says which instructions the processor knows. A cache may be shared by several machines."""
    kept = _cpuinfo("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.node(), platform.machine(), platform.processor(), *kept])


def processor_flags() -> frozenset[str]:
    """Instructions that all processors of this machine know, as Linux calls them; none on other systems."""
    sets = [frozenset(line.partition(":")[2].split()) for line in _cpuinfo("flags", "Features")]
    return frozenset.intersection(*sets) if sets else frozenset()


def multiplies_bfloat16() -> bool:
    """Whether processors of this machine have instructions for products of bfloat16, which torch uses: they are then
    faster than those of float32, and much slower where they are emulated."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(processor_flags())


def _cpuinfo(*beginnings: str) -> list[str]:
    """The lines that begin so, each once: there is one for each core."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return [line for line in dict.fromkeys(lines) if line.startswith(beginnings)]


class PeakMemory:
    """Watches how much memory this process takes at most from now on, beyond what it takes now: what is resident, with
    the pages of files that are mapped. Only Linux tells, and forgets earlier peaks on request."""

    def __init__(self) -> None:
        gc.collect()  # else what is freed meanwhile would hide as much of what is to come
        return_freed()
        self._before: int | None = None
        with suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")
            self._before = _process_memory("VmRSS")

    def bytes(self) -> int | None:
        """None where it cannot be measured."""
        return None if self._before is None else max(_process_memory("VmHWM") - self._before, 0)


def _process_memory(name: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(found)


def return_freed() -> None:
    """Hand memory that was freed back to the system, which the C library else keeps in pieces."""
    with suppress(OSError, AttributeError):  # of other systems, and other C libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU, or of this device already, on a device. A GPU gets them by pinned memory, so that the host
    does not wait until its earlier work is done."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    # Contiguous, since memory cannot be pinned under a tensor whose rows are one row. The memory is not used for
    # anything else until it has been copied; torch sees to it.
    return values.contiguous().pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Memory of a device that this process may still take."""
    if device.type == "cuda":
        # What torch keeps of memory that was freed is free for us.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return min([int(psutil.virtual_memory().available), *_cgroup_bytes()])


def _cgroup_bytes() -> Iterator[int]:
    """What each control group that this process is in, and each above it, leaves free; containers have limits there.

    https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
    """
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.is_file() else []
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if number == "0":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = CGROUPS / "memory"
        else:
            continue
        group = root / name.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, used = ((folder / each).read_text().strip() for each in names[:2])
                pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = dict(pairs).get(names[2], "0")  # files that are given up when memory is asked for
            except OSError:
                continue
            if limit != "max":
                yield max(int(limit) - int(used) + int(cached), 0)
