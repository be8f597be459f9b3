"""`blockdraft calibrate`: step times of this machine, from which `auto` starts."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import Field

from blockdraft.cli.display import new_table, standard, tell
from blockdraft.cli.options import MEASURE, CommandSpec
from blockdraft.cli.target import AsJson, DecodingTarget, DrafterSettings
from blockdraft.settings import Count, settings

if TYPE_CHECKING:
    from blockdraft.engine import Costs


@settings
class CalibrateSettings:
    """What `blockdraft calibrate` measures."""

    batch_size: Count = Field(16, description="Number of prompts decoded together.")
    anew: bool = Field(False, description="Measure again, even if stored times exist.")


def calibrate(
    *,
    model: DecodingTarget,
    drafter: DrafterSettings,
    options: CalibrateSettings,
    as_json: AsJson = False,
) -> None:
    """Measure the times of decoding steps on this machine, or show the stored ones.

    The block size and tree budget "auto" begin with these times, and learn from the steps that run. Measure while
    nothing else runs.
    """
    from blockdraft.drafters import default_drafter, load_drafter
    from blockdraft.engine.adaptive import costs as stored_costs
    from blockdraft.engine.adaptive.costs import Probe
    from blockdraft.machine import OtherWork

    target = model.load_for(drafter.drafter, drafter.draft_vocab)
    target.compile_at_once()
    # Each member of a hybrid drafter has costs of its own, and lookup has none.
    chosen = drafter.drafter or default_drafter(target.path, alone=True)
    loaded = load_drafter(chosen, target=target, draft_vocab=drafter.draft_vocab)
    file = stored_costs.path(target, loaded)
    costs = None if options.anew else stored_costs.load(file)
    if costs is None:
        probe, others = Probe(target, loaded), OtherWork()
        costs = stored_costs.measure(probe, loaded.block_size, options.batch_size, target.max_context, tell)
        if used := others.disturbing_cores():
            tell(
                f"Not stored, since other programs used {used:.1f} cores meanwhile; calibrate while nothing else runs."
            )
        else:
            stored_costs.store(file, costs, stored_costs.pair_of(target, loaded))
    else:
        tell(f"From {file}; --anew measures again.")
    if as_json:
        print(json.dumps({**asdict(costs), "backend": target.backend, "running": target.running}))
    else:
        show_costs(costs, loaded.block_size, target.running)


def show_costs(costs: Costs, block_size: int, running: str) -> None:
    """Print a table of step times. R is the time of a drafted step over that of a plain one."""
    console = standard()
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(costs.date))
    chains = [n for n in (3, 7, 15) if n < block_size] if costs.knows(tree=False) else []
    trees = [16, 32, 64] if costs.knows(tree=True) else []
    headers = *(f">R, chain of {n}" for n in chains), *(f">R, tree of {n}" for n in trees)
    table = new_table(console, ">batch size", ">plain ms", *headers)
    for batch_size, plain in zip(costs.batch_sizes, costs.plain, strict=True):
        times = [
            costs.drafted_steps(batch_size, n, tree)[n]
            for tree, sizes in ((False, chains), (True, trees))
            for n in sizes
        ]
        table.add_row(str(batch_size), f"{1000 * plain:.2f}", *(f"{seconds / plain:.2f}" for seconds in times))
    # A title or caption of the table would break at its width, which may be small.
    console.print(f"Steps, {running}, {when}")
    console.print(table)
    if chains or trees:
        console.print("R: a drafted step over a plain one; drafting pays off where tau > R")


CALIBRATE = CommandSpec(calibrate, MEASURE, common="target drafter batch_size anew as_json")
