"""`blockdraft export`: a drafter for other engines."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import Field

from blockdraft.cli.display import tell
from blockdraft.cli.options import MAKE, MODEL, CommandSpec, Only
from blockdraft.cli.target import Folder, TargetSettings, load, quiet
from blockdraft.errors import UsageError
from blockdraft.settings import Flag, settings
from blockdraft.types import DEFAULT_BACKEND
from blockdraft_tools.gguf import DEFAULT_MATRIX_TYPE, MatrixType

GGUF = "gguf"


@settings
class ExportSettings:
    """Format of an exported drafter."""

    out: Folder = Field(description="Folder to write: new, empty, or an earlier export.")
    format: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None,
        description="Format: zlab, speculators, gguf, or another of docs/export.md. By default zlab, or the own format "
        "of other kinds of drafters.",
    )
    type: MatrixType | None = Field(
        None,
        description=f"Number format of the matrices in GGUF files; by default {DEFAULT_MATRIX_TYPE}, which keeps a "
        "model in bfloat16 as it is.",
    )
    tokenizer: bool = Field(
        True, description="Copy the target's tokenizer into the GGUF file of a drafter; --no-tokenizer saves its size."
    )
    target_name: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None,
        description="Hub name or folder of the target to write into the speculators format; by default --target.",
    )


def export(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="Drafter in any format that `generate` reads, as a folder, GGUF file or hub name; bundled is the "
            "target's bundled one.",
        ),
    ],
    *,
    options: ExportSettings,
    model: Annotated[TargetSettings, Only("target adapter revision backend", MODEL)],
) -> None:
    """Write a drafter in the format that another engine reads.

    Weights keep their dtype. The speculators format adds copies of the target's embedding and head; gguf writes two
    files for llama.cpp, drafter-TYPE.gguf and target-TYPE.gguf. The folder appears whole or not at all.
    """
    from blockdraft.drafters import drafter_files
    from blockdraft.formats import find_layout
    from blockdraft_tools.export import convert, format_for, usual_format

    drafter = str(drafter_files(drafter, model.target))
    if options.format == GGUF:
        backend = model.backend if model.backend != DEFAULT_BACKEND else None
        for name, value in (("target-name", options.target_name), ("backend", backend)):
            if value is not None:
                raise UsageError(f"--{name} is {value}, which does not go with --format {GGUF}; leave it out.")
        _write_gguf(drafter, options, model)
        return
    if options.type is not None:
        raise UsageError(
            f"--type {options.type} goes with --format {GGUF}; leave it out, since weights keep their dtype."
        )
    if not options.tokenizer:
        raise UsageError(f"--no-tokenizer goes with --format {GGUF}; leave it out, since other formats hold none.")
    layout = options.format or usual_format(drafter)
    find_layout(layout)
    place = model.target or "bundled"
    target = load(place, device="cpu", backend=model.backend, adapter=model.adapter, revision=model.revision)
    convert(drafter, options.out, format_for(layout, target, model.target, options.target_name, model.revision), target)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    tell(f"{options.out}: {size / 1e6:,.1f} MB in the {layout} format")


def _write_gguf(drafter: str, options: ExportSettings, model: TargetSettings) -> None:
    from blockdraft.targets import BUNDLED
    from blockdraft_tools.export import export_gguf

    quiet()
    weights = options.type or DEFAULT_MATRIX_TYPE
    place, with_tokenizer = model.target or BUNDLED, options.tokenizer
    done = export_gguf(drafter, options.out, place, weights, model.revision, model.adapter, with_tokenizer)
    for note in done.notes:
        tell(f"Note: {note}")
    for file in (done.target, done.drafter):
        tell(f"{file}: {file.stat().st_size / 1e6:,.1f} MB")
    if done.line is not None:
        tell(f"To use them: {done.line}")


EXPORT = CommandSpec(export, MAKE, common="out target format type")
