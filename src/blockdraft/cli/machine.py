"""`blockdraft env` and `cache`: this machine, and the files kept on it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from blockdraft.cli.display import new_table, standard
from blockdraft.cli.options import add
from blockdraft.cli.target import AsJson
from blockdraft.errors import UsageError, counted
from blockdraft.plugins import packages

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "accelerate", "torchao")
VARIABLES = (
    "BLOCKDRAFT_CACHE",
    "BLOCKDRAFT_CACHE_WEIGHTS",
    "CC",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
)

MAX_GIGABYTES = 1_000_000
RECENT_SECONDS = 3600.0  # in which a partial file may still be written
cache = typer.Typer(help="List or delete the files that blockdraft keeps on this machine.", no_args_is_help=True)


def env() -> None:
    """Print what a bug report should contain: versions, processor, GPUs, and whether the compiled decoder works."""
    for name, value in facts():
        print(f"{name:18}{value}", flush=True)


def facts() -> Iterator[tuple[str, str]]:
    """Yield names and values, first those that need no torch. This compiles the decoder if necessary."""
    import psutil

    from blockdraft.machine import cache_folder, processor_name

    yield "blockdraft", version("blockdraft")
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "packages", ", ".join(packages()) or "none but this one"
    yield "processor", processor_name()
    yield "cores", str(psutil.cpu_count(logical=False))
    yield "cache", str(cache_folder())
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]

    import torch

    from blockdraft.kernels.cpu.build import build
    from blockdraft.kernels.cpu.threads import thread_choice
    from blockdraft.machine import free_bytes

    yield "threads", f"{thread_choice()} (each target has its own number)"
    total, free = psutil.virtual_memory().total, free_bytes(torch.device("cpu"))
    yield "memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free for us"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "GPU", "none that torch sees"
    built = build(torch.float32, torch.float32)
    works = built.library() is not None
    origin = f"came with the package, for {built.level}" if built.level else "compiled here"
    yield "compiled decoder", f"works, {origin}" if works else f"none, since {built.reason}"


def list_(as_json: AsJson = False) -> None:
    """List the files that blockdraft keeps: their kind, size and date.

    Their folder is ~/.cache/blockdraft, or what BLOCKDRAFT_CACHE names.
    """
    from blockdraft.machine import CACHED, cache_folder, weights_limit

    kinds = {kind: _summary(_files(kind)) for kind in CACHED}
    if as_json:
        print(json.dumps({"folder": str(cache_folder()), "kinds": kinds, "weights_limit": weights_limit()}))
        return
    console = standard()
    table = new_table(console, "kind", ">files", ">size", "newest", "what")
    for kind, summary in kinds.items():
        newest = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary["newest"])) if summary["newest"] else "-"
        table.add_row(kind, str(summary["files"]), _size(summary["bytes"]), newest, CACHED[kind])
    console.print(str(cache_folder()), soft_wrap=True)
    console.print(table)
    console.print(f"{_limits()}; `blockdraft cache limit GB` sets another limit", soft_wrap=True)


def limit(
    gigabytes: Annotated[str | None, typer.Argument(metavar="[GB]", help="New limit; 0 keeps none.")] = None,
) -> None:
    """Show or set the size limit of packed weights. Stored prefixes may take a fifth of it.

    The least recently used ones are deleted when new ones are added. By default the limit is 20 GB, or a tenth of the
    disk where that is less.
    """
    from blockdraft.machine import set_weights_limit

    if gigabytes is not None:
        number = None
        with suppress(ValueError):
            number = float(gigabytes)
        if number is None or not 0 <= number <= MAX_GIGABYTES:
            raise UsageError(f"GB must be a number from 0 to {MAX_GIGABYTES}, got {gigabytes!r}.")
        set_weights_limit(round(number * 1e9))
    print(_limits())


def _limits() -> str:
    from blockdraft.machine import prefixes_limit, weights_limit

    return f"weights: at most {weights_limit() / 1e9:.1f} GB, prefixes: {prefixes_limit() / 1e9:.1f} GB"


def clear(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help="Kinds of files, as `blockdraft cache list` shows them; by default all but models.",
        ),
    ] = None,
) -> None:
    """Delete the files that blockdraft keeps.

    They are made again when they are needed; models have to be pulled again.
    """
    from blockdraft.machine import CACHED, MODELS, cache_folder

    unknown = [kind for kind in kinds or () if kind not in CACHED]
    if unknown:
        raise UsageError(f"KIND must be one of {', '.join(CACHED)}, got {unknown[0]!r}.")
    for kind in kinds or [kind for kind in CACHED if kind != MODELS]:
        files = _files(kind)
        size = _summary(files)["bytes"]
        for file in files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise UsageError(f"{file} cannot be deleted ({error.strerror}); its owner can delete it.") from error
        for folder in sorted((path for path in (cache_folder() / kind).rglob("*") if path.is_dir()), reverse=True):
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        print(f"{kind}: {counted(len(files), 'file')}, {_size(size)} deleted")


def _files(kind: str) -> dict[Path, os.stat_result]:
    """Return the files of a kind, without locks and files that another process may still be writing."""
    from blockdraft.diskcache import is_partial
    from blockdraft.machine import cache_folder

    folder, files = cache_folder() / kind, {}
    for file in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # another process has deleted it
            stat = file.stat()
            is_recent = time.time() - stat.st_mtime < RECENT_SECONDS
            if file.is_file() and file.suffix != ".lock" and not (is_partial(file.relative_to(folder)) and is_recent):
                files[file] = stat
    return files


def _summary(files: dict[Path, os.stat_result]) -> dict[str, Any]:
    newest = max((stat.st_mtime for stat in files.values()), default=None)
    return {"files": len(files), "bytes": sum(stat.st_size for stat in files.values()), "newest": newest}


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


add(cache, list_, "list")
add(cache, limit)
add(cache, clear)
