"""`blockdraft export`: a drafter in the format of another engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import Adapter, Revision, TargetBackend, TargetFolder
from blockdraft.types import DEFAULT_BACKEND


def export(
    drafter: Annotated[
        str, typer.Argument(metavar="DRAFTER", help="The folder of a drafter, in any format that `generate` reads.")
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Where to write; new, empty or a draft model's folder.")],
    target: TargetFolder = None,
    adapter: Adapter = None,
    revision: Revision = None,
    to_format: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help="What to write: zlab, speculators, or others of docs/export.md."),
    ] = "zlab",
    target_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For speculators: hub name or folder under which engines find the target; by default as in --target.",
        ),
    ] = None,
    backend: TargetBackend = DEFAULT_BACKEND,
) -> None:
    """Write a drafter in the format that another engine reads.

    The folder appears whole or not at all. Weights keep their dtype; the speculators format adds copies of the target's
    embedding and head.
    """
    from blockdraft.formats import find_layout
    from blockdraft.training.export import convert, format_for

    find_layout(to_format)
    loaded = loading.load(target, device="cpu", backend=backend, adapter=adapter, revision=revision)
    convert(drafter, out, format_for(to_format, loaded, target, target_name, revision), loaded)
    size = sum(file.stat().st_size for file in Path(out).iterdir())
    print(f"{out}: {size / 1e6:,.1f} MB in the {to_format} format", file=sys.stderr)
