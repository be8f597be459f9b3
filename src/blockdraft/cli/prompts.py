"""`blockdraft prompts`: prompts for a target to answer, from data or written by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import (
    Adapter,
    Device,
    Dtype,
    Revision,
    RowOptions,
    TargetBackend,
    TargetFolder,
    option,
    with_options,
)
from blockdraft.data.settings import DataSettings
from blockdraft.errors import Complaints, counted
from blockdraft.tools.fit.settings import PromptSettings
from blockdraft.types import DEFAULT_BACKEND


@with_options
def prompts(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for prompts.jsonl and held-out.jsonl.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="Data as for `blockdraft data`; without any the target writes prompts of the kind it was trained on.",
            show_default=False,
        ),
    ] = None,
    target: TargetFolder = None,
    adapter: Adapter = None,
    revision: Revision = None,
    settings: PromptSettings,
    chosen: RowOptions,
    batch_size: Annotated[int, option(DataSettings, "batch_size")] = DataSettings.batch_size,
    dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
) -> None:
    """Choose prompts for a target to answer, each once and in random order, and keep some apart to measure on.

    Plain texts give their beginnings, at the start and at paragraphs further on. `blockdraft data --regenerate` has
    them answered.
    """
    from blockdraft.cli import display
    from blockdraft.data.folder import check_writable
    from blockdraft.data.rows import check_sources
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.targets import load_target_text
    from blockdraft.tools.fit.prompts import read_prompts, store, write_prompts

    loading.quiet()
    rows = chosen.rows(settings.pool)
    complaints = Complaints()
    with complaints.noting():
        check_writable(out)
    with complaints.noting():
        check_sources(sources or (), rows)
    complaints.check()
    if sources:
        found = read_prompts(sources, rows, load_target_text(target, revision), settings)
    else:
        loaded = loading.load(target, dtype, device, backend, adapter=adapter, revision=revision)
        with (
            display.progress("prompts") as progress,
            Engine(loaded, load_drafter("none", target=loaded), batch_size) as engine,
        ):
            found = write_prompts(engine, settings, progress)
    store(out, found)
    of = "" if found.available is None else f"{len(found.rows)} of "
    told = of + counted(found.available or len(found.rows), "prompt")
    print(f"{out}: {told}, {len(found.held_out)} held out", file=sys.stderr)
