"""Facts and functions of this machine: its cache folder, processor, memory, and transfers to its GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})  # of processors with instructions for bfloat16 products
CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
OWN_CGROUP = Path("/proc/self/cgroup")


# Folders of the cache folder, and what their files hold. All but models can be made again from what is here.
MODELS = "models"
CACHED = {
    "libraries": "forwards compiled for this processor",
    "weights": "weights of large targets, packed for their compiled forward",
    "costs": "times of steps, for each target and drafter",
    "prefixes": "keys and values of agents' instructions, for each target and drafter",
    "threads": "fastest number of threads, for each target",
    MODELS: "models that `blockdraft pull` got",
}
LIMIT_FILE = "weights-limit"
QUIET_SHARE = 0.15  # of the cores, which other programs may use without spoiling a measurement


def cache_folder() -> Path:
    """Return the folder that `BLOCKDRAFT_CACHE` names, or else `~/.cache/blockdraft`."""
    return Path(os.environ.get("BLOCKDRAFT_CACHE") or Path.home() / ".cache" / "blockdraft")


def weights_limit() -> int:
    """Return the size limit of cached packed weights in bytes.

    It is the one that `set_weights_limit` stored, else 20 GB, or a tenth of the disk where that is less.
    """
    folder = cache_folder()
    with suppress(OSError, ValueError):
        return int((folder / LIMIT_FILE).read_text())
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return min(20 * 10**9, shutil.disk_usage(disk).total // 10)


def prefixes_limit() -> int:
    """Return the size limit of stored prefixes in bytes, a fifth of that of cached packed weights."""
    return weights_limit() // 5


def set_weights_limit(size: int) -> None:
    """Store the size limit of cached packed weights, in bytes."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    (cache_folder() / LIMIT_FILE).write_text(f"{size}\n")


def processor() -> str:
    """Describe this machine's processor and its instructions, for keys of a cache that machines may share."""
    lines = _cpuinfo("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.node(), platform.machine(), platform.processor(), *lines])


def processor_name() -> str:
    """Return the name of this machine's processor."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """Return the flags that Linux lists for all processors of this machine; empty on other systems."""
    sets = [frozenset(line.partition(":")[2].split()) for line in _cpuinfo("flags", "Features")]
    return frozenset.intersection(*sets) if sets else frozenset()


def multiplies_bfloat16() -> bool:
    """Return whether this machine's processors have instructions for bfloat16 products.

    With them, torch multiplies faster than in float32. Without them, it emulates bfloat16, which is much slower.
    """
    return not BFLOAT16_FLAGS.isdisjoint(processor_flags())


def _cpuinfo(*beginnings: str) -> list[str]:
    """Return the distinct lines with these beginnings. Every core repeats them."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return [line for line in dict.fromkeys(lines) if line.startswith(beginnings)]


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude objects made in this block from garbage collection, now and later.

    For imports and loading: nearly all of their objects stay, and collecting them takes a tenth of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def allowed_cores() -> int:
    """Return the number of logical cores that this process may use."""
    return len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1


class OtherWork:
    """Measures how much of the processor other programs use from now on."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), self._seconds()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def disturbing_cores(self) -> float | None:
        """Return how many cores other programs have used on average, or None if too little to slow this process."""
        used = (self._seconds() - self._before) / max(self.seconds, 1e-9)
        allowed = allowed_cores()
        spare = (os.cpu_count() or allowed) - allowed  # cores that this process does not use in any case
        return used - spare if used - spare > QUIET_SHARE * allowed else None

    @staticmethod
    def _seconds() -> float:
        """Return the seconds that all cores have worked for other processes, or for other virtual machines."""
        times, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
        idle = ("idle", "iowait", "guest", "guest_nice")  # those of guests count as user
        return float(sum(value for name, value in times.items() if name not in idle) - own.user - own.system)


class PeakMemory:
    """Peak of this process's memory from now on, beyond its present memory.

    All resident pages count, those of mapped files included. Only Linux can reset the peak.
    """

    def __init__(self) -> None:
        gc.collect()  # memory that is freed later would hide as much new memory
        return_freed()
        self._before: int | None = None
        with suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")
            self._before = _process_memory("VmRSS")

    def bytes(self) -> int | None:
        """Return the peak in bytes, or None where it cannot be measured."""
        return None if self._before is None else max(_process_memory("VmHWM") - self._before, 0)


def _process_memory(name: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(kilobytes)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# `preexec_fn` of a child process that the system ends with its parent, however that ends; only Linux can.
die_with_parent = _die_with_parent if sys.platform == "linux" else None


def return_freed() -> None:
    """Return freed memory to the system, which the C library would keep."""
    with suppress(OSError, AttributeError):  # other systems, and other C libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device. Copies to a GPU use pinned memory, so that the host does not wait for it."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    # Expanded tensors cannot be pinned, so it is made contiguous. Torch keeps the memory until it has been copied.
    return values.contiguous().pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        import torch  # here, since commands that run no model start without it

        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that this process may still take."""
    if device.type == "cuda":
        import torch

        # Torch reuses memory that it has reserved and not allocated.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    return min([int(psutil.virtual_memory().available), *_cgroup_bytes()])


def _cgroup_bytes() -> Iterator[int]:
    """Yield the free bytes of each control group of this process and of the groups above it, as containers set them.

    https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
    """
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.is_file() else []
    for line in lines:
        number, controllers, group_name = line.split(":", 2)
        if number == "0":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = CGROUPS / "memory"
        else:
            continue
        group = root / group_name.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, used = ((folder / name).read_text().strip() for name in names[:2])
                pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = dict(pairs).get(names[2], "0")  # cached files, which the system drops when memory is needed
            except OSError:
                continue
            if limit != "max":
                yield max(int(limit) - int(used) + int(cached), 0)
