"""`blockdraft env`, `cache` and `calibrate`: the machine, the files kept on it, and its cycle times."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from blockdraft.cli import consoles
from blockdraft.cli.help import add
from blockdraft.cli.options import DrafterPlace, TargetOptions, need_drafter, option
from blockdraft.errors import UsageError, counted
from blockdraft.evaluation.settings import Settings

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "accelerate", "torchao")
VARIABLES = (
    "BLOCKDRAFT_CACHE",
    "BLOCKDRAFT_CACHE_WEIGHTS",
    "CC",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
)

PARTIAL_SECONDS = 3600.0  # age at which a partial file counts as left behind by a process that is gone
cache = typer.Typer(help="List or delete the files that blockdraft keeps on this machine.", no_args_is_help=True)


def env() -> None:
    """Print what a bug report should contain: versions, processor, GPUs, and whether the compiled decoder works."""
    for name, value in facts():
        print(f"{name:18}{value}", flush=True)


def facts() -> Iterator[tuple[str, str]]:
    """Names and values, first those that need no torch. The decoder is compiled if it has not been yet."""
    import psutil

    from blockdraft.machine import cache_folder, processor_name

    yield "blockdraft", version("blockdraft")
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for name in PACKAGES:
        yield name, _version(name)
    yield "processor", processor_name()
    yield "cores", str(psutil.cpu_count(logical=False))
    yield "cache", str(cache_folder())
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]

    import torch

    from blockdraft.kernels.cpu.build import build
    from blockdraft.machine import free_bytes

    yield "threads", f"{torch.get_num_threads()} of torch"
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def list_(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """List the files that blockdraft keeps: their kind, size and date.

    Their folder is ~/.cache/blockdraft, or what BLOCKDRAFT_CACHE names.
    """
    from rich.table import Table

    from blockdraft.machine import CACHED, cache_folder

    found = {kind: _summary(_files(kind)) for kind in CACHED}
    if as_json:
        print(json.dumps({"folder": str(cache_folder()), "kinds": found}))
        return
    table = Table(box=None, pad_edge=False)
    for header in ("kind", "files", "size", "newest", "what"):
        table.add_column(header, justify="right" if header in ("files", "size") else "left")
    for kind, one in found.items():
        newest = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["newest"])) if one["newest"] else "-"
        table.add_row(kind, str(one["files"]), _size(one["bytes"]), newest, CACHED[kind])
    console = consoles.standard()
    console.print(str(cache_folder()), soft_wrap=True)
    console.print(table)


def clear(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help="Kinds of files, as `blockdraft cache list` shows them; by default all but models.",
        ),
    ] = None,
) -> None:
    """Delete the files that blockdraft keeps. They are made again when they are needed; models have to be pulled
    again."""
    from blockdraft.machine import CACHED, MODELS, cache_folder

    unknown = [kind for kind in kinds or () if kind not in CACHED]
    if unknown:
        raise UsageError(f"kind is {unknown[0]!r}; it must be one of {', '.join(CACHED)}.")
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


def _files(kind: str) -> list[Path]:
    from blockdraft.machine import cache_folder

    folder = cache_folder() / kind
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file for file in found if file.suffix != ".lock" and not (_is_partial(file, folder) and _is_young(file))]


def _is_partial(file: Path, folder: Path) -> bool:
    return any(part.endswith(".partial") for part in file.relative_to(folder).parts)


def _is_young(file: Path) -> bool:
    """Whether another process may still be writing it."""
    with suppress(FileNotFoundError):
        return time.time() - file.stat().st_mtime < PARTIAL_SECONDS
    return True


def _summary(files: list[Path]) -> dict[str, Any]:
    stats = []
    for file in files:
        with suppress(FileNotFoundError):  # another process has cleared it
            stats.append(file.stat())
    newest = max((one.st_mtime for one in stats), default=None)
    return {"files": len(files), "bytes": sum(one.st_size for one in stats), "newest": newest}


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def calibrate(
    run: TargetOptions,
    drafter: DrafterPlace = None,
    batch_size: Annotated[int, option(Settings, "batch_size")] = 16,
    anew: Annotated[bool, typer.Option("--anew", help="Measure again, even if stored times exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure the times of decoding cycles on this machine, or show the stored ones.

    The block size and tree budget "auto" begin with these times, and learn from the cycles that run. Measure while
    nothing else runs.
    """
    Settings(batch_size=batch_size)
    need_drafter(run.target, drafter, "--drafter prompt_lookup")

    from blockdraft.cli import display
    from blockdraft.drafters import load_drafter
    from blockdraft.engine.adaptive import costs as stored_costs
    from blockdraft.engine.adaptive.costs import Probe

    loaded = run.load(drafter)
    loaded_drafter = load_drafter(drafter, target=loaded)
    file = stored_costs.path(loaded, loaded_drafter)
    known = None if anew else stored_costs.load(file)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if known is None:
        known = stored_costs.measure(
            Probe(loaded, loaded_drafter), loaded_drafter.block_size, batch_size, loaded.max_context, report
        )
        stored_costs.store(file, known, stored_costs.pair_of(loaded, loaded_drafter))
    else:
        report(f"From {file}; --anew measures again.")
    if as_json:
        print(json.dumps({**asdict(known), "backend": loaded.backend, "running": loaded.running}))
    else:
        console = consoles.standard()
        display.show_costs(console, known, loaded_drafter.block_size, loaded.running)


add(cache, list_, "list")
add(cache, clear)
