"""`blockdraft env`: what a report of a fault should say about the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from blockdraft.errors import counted

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "accelerate", "torchao")
VARIABLES = (
    "BLOCKDRAFT_CACHE",
    "BLOCKDRAFT_CACHE_WEIGHTS",
    "CC",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
)


def env() -> None:
    """Print versions, processor, GPUs and whether the compiled decoder works, for a report of a fault."""
    for name, value in facts():
        print(f"{name:18}{value}")


def facts() -> Iterator[tuple[str, str]]:
    """Names and values; the decoder is compiled where it has not been yet."""
    import psutil
    import torch

    from blockdraft.cpu.build import build
    from blockdraft.machine import cache_folder, free_bytes, processor

    yield "blockdraft", version("blockdraft")
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for name in PACKAGES:
        yield name, _version(name)
    models = [line.partition(":")[2].strip() for line in processor().splitlines() if line.startswith("model name")]
    yield "processor", models[0] if models else platform.processor() or platform.machine()
    yield "cores", f"{psutil.cpu_count(logical=False)}, {counted(torch.get_num_threads(), 'thread')} of torch"
    total, free = psutil.virtual_memory().total, free_bytes(torch.device("cpu"))
    yield "memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free for us"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "GPU", "none that torch sees"
    made = build(torch.float32, torch.float32)
    works = made.library() is not None
    origin = f"came with the package, for {made.level}" if made.level else "compiled here"
    yield "compiled decoder", f"works, {origin}" if works else f"none, since {made.reason}"
    yield "cache", str(cache_folder())
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
