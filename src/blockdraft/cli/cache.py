"""`blockdraft cache`: what is kept on this machine."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from blockdraft.errors import UsageError, counted

PARTIAL_SECONDS = 3600.0  # after which a file that is being written was left by a process that is gone

cache = typer.Typer(help="List or clear what is kept on this machine.", no_args_is_help=True)


@cache.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """Show what is kept, how large it is, and when it was last written.

    It lies in ~/.cache/blockdraft, or in the folder that BLOCKDRAFT_CACHE names.
    """
    from rich.table import Table

    from blockdraft.cli import display
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
    console = display.terminal() if sys.stdout.isatty() else display.plain()
    console.print(str(cache_folder()), soft_wrap=True)
    console.print(table)


@cache.command()
def clear(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help="What to clear, as in `blockdraft cache list`.")
    ] = None,
) -> None:
    """Delete what is kept, all of it or some kinds. It is made again when it is needed."""
    from blockdraft.machine import CACHED

    unknown = [kind for kind in kinds or () if kind not in CACHED]
    if unknown:
        raise UsageError(f"kind is {unknown[0]!r}; it must be one of {', '.join(CACHED)}.")
    for kind in kinds or CACHED:
        files = _files(kind)
        size = _summary(files)["bytes"]
        for file in files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise UsageError(f"{file} cannot be deleted ({error.strerror}); its owner can.") from error
        print(f"{kind}: {counted(len(files), 'file')}, {_size(size)} deleted")


def _files(kind: str) -> list[Path]:
    from blockdraft.machine import cache_folder

    folder = cache_folder() / kind
    found = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    return [file for file in found if file.suffix != ".lock" and not (file.suffix == ".partial" and _is_young(file))]


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
