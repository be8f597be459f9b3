"""`blockdraft calibrate`: what cycles cost on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from blockdraft.cli.loading import TargetOptions, takes_target
from blockdraft.cli.options import DrafterPlace, need_drafter, option
from blockdraft.evaluation.methods import Settings


@takes_target
def calibrate(
    run: TargetOptions,
    drafter: DrafterPlace = None,
    batch_size: Annotated[int, option(Settings, "batch_size")] = 16,
    anew: Annotated[bool, typer.Option("--anew", help="Measure again, even if there is a measurement.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure what cycles cost on this machine, or show what is known of it.

    Block sizes and tree budgets of "auto" begin with these figures, and learn from the cycles that run. They are kept
    in ~/.cache/blockdraft, or in the folder that BLOCKDRAFT_CACHE names. Measure while nothing else runs.
    """
    need_drafter(run.target, drafter, "--drafter prompt_lookup")

    from blockdraft.cli import display
    from blockdraft.drafters import load_drafter
    from blockdraft.engine.adaptive import stored_costs
    from blockdraft.engine.adaptive.calibrate import Probe

    loaded = run.load()
    guesser = load_drafter(drafter, target=loaded)
    file = stored_costs.path(loaded, guesser)
    known = None if anew else stored_costs.load(file)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if known is None:
        known = stored_costs.measure(Probe(loaded, guesser), guesser.block_size, batch_size, loaded.max_context, report)
        stored_costs.store(file, known)
    else:
        report(f"From {file}; --anew measures again.")
    if as_json:
        print(json.dumps({**asdict(known), "backend": loaded.backend, "running": loaded.running}))
    else:
        console = display.terminal() if sys.stdout.isatty() else display.plain()
        display.show_costs(console, known, guesser.block_size, loaded.running)
