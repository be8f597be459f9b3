"""What belongs to this machine and not to a model: where measurements and compiled code are kept."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cache_folder() -> Path:
    """The folder that `BLOCKDRAFT_CACHE` names, or else `~/.cache/blockdraft`."""
    return Path(os.environ.get("BLOCKDRAFT_CACHE") or Path.home() / ".cache" / "blockdraft")


def processor() -> str:
    """What says which instructions the processor knows. A cache may be shared by several machines."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    kept = [line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.node(), platform.machine(), platform.processor(), *kept])
