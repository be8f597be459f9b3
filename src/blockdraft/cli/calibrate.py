"""`blockdraft calibrate`: what cycles cost on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.options import (
    CompileForward,
    Device,
    Dtype,
    Exact,
    Quantize,
    TargetBackend,
    TargetFolder,
    Threads,
    extent,
    option,
)
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import Settings
from blockdraft.types import DEFAULT_BACKEND, DEFAULT_COMPILE


def calibrate(
    target: TargetFolder = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DIR|NAME", help="Drafter, as for generate; by default the bundled one."),
    ] = None,
    batch_size: Annotated[int, option(Settings, "batch_size")] = 16,
    dtype: Dtype = None,
    device: Device = None,
    backend: TargetBackend = DEFAULT_BACKEND,
    threads: Threads = "auto",
    compile: CompileForward = DEFAULT_COMPILE,
    quantize: Quantize = None,
    exact: Exact = False,
    anew: Annotated[bool, typer.Option("--anew", help="Measure again, even if there is a measurement.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure what cycles cost on this machine, or show what was measured before.

    Block sizes and tree budgets of "auto" decide by these figures. They are measured when first needed and kept in
    ~/.cache/blockdraft, or in the folder that BLOCKDRAFT_CACHE names. Measure while nothing else runs.
    """
    if target is not None and drafter is None:
        raise UsageError(f"No drafter is known for {target}; add --drafter DIR, or --drafter prompt_lookup.")

    from blockdraft.cli import display
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine, load_or_measure

    loaded = loading.load(
        target,
        dtype,
        device,
        backend,
        threads=extent("threads", threads),
        compile=compile,
        quantize=quantize,
        exact=exact,
    )
    engine = Engine(loaded, load_drafter(drafter, target=loaded), max_batch_size=batch_size)
    costs = load_or_measure(engine, lambda line: print(line, file=sys.stderr, flush=True), anew)
    if as_json:
        print(json.dumps({**asdict(costs), "backend": loaded.backend, "running": loaded.running}))
    else:
        console = display.terminal() if sys.stdout.isatty() else display.plain()
        display.show_costs(console, costs, engine.drafter.block_size, loaded.running)
