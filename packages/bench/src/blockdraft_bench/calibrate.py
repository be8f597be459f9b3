"""`blockdraft calibrate`: step times of this machine, from which `auto` starts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeAlias

from pydantic import Field

from blockdraft.cli.display import new_table, standard, tell
from blockdraft.cli.options import MEASURE, CommandSpec
from blockdraft.cli.target import AsJson, DecodingTarget, DrafterSettings
from blockdraft.decode.step_time import CONTEXT, Costs, Points
from blockdraft.errors import UsageError
from blockdraft.settings import Count, settings

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CHAIN_DRAFT_TOKENS = (1, 2, 3, 4, 5, 7, 11, 15)
TREE_DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_DRAFT_TOKENS = 512  # draft tokens of a whole batch; larger trees are extrapolated
REPEATS = 7
LIMIT_SECONDS = 25.0  # larger batches are not measured after this time

# Runs `count` steps of a fresh batch: (batch size, context, draft tokens, whether a tree, count). Returns the draft
# tokens per sequence and the seconds of each step.
RunSteps: TypeAlias = Callable[[int, int, int, bool, int], list[tuple[int, float]]]


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
        costs = measure(probe, loaded.block_size, options.batch_size, target.max_context, tell)
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


def measure(
    run_steps: RunSteps,
    block_size: int,
    max_batch_size: int,
    max_context: int,
    report: Callable[[str], None] = lambda line: None,
) -> Costs:
    """Measure the steps of a pair on this machine, up to its largest batch, in little more than `LIMIT_SECONDS`.

    Args:
        run_steps: A `Probe`.
        block_size: The drafter's; 1 for a drafter without draft tokens.
        max_context: Most tokens of a sequence. Sizes that do not fit are extrapolated.
        report: Called with lines of progress.

    Raises:
        UsageError: The context is too short even for steps of one draft token.
    """
    began = time.perf_counter()
    context = max(min(CONTEXT, max_context // 4), 1)

    def fits(size: int) -> bool:
        """Return whether every step may commit a whole path, and the last one still has room for its nodes."""
        return context + REPEATS * min(size + 1, block_size) + size + 1 < max_context

    def points(batch_size: int, sizes: Sequence[int], tree: bool) -> Points:
        times: dict[int, list[float]] = {}
        for size in sizes:
            if fits(size) and (batch_size * size <= MAX_DRAFT_TOKENS or size == sizes[0]):
                count, seconds = _median(run_steps(batch_size, context, size, tree, REPEATS + 1))
                times.setdefault(count, []).append(seconds)
        return tuple((count, statistics.median(times[count])) for count in sorted(times))

    longest = block_size - 1
    if not fits(min(1, longest)):
        raise UsageError(
            f"The target's context of {max_context} tokens is too short to measure step times: {REPEATS + 1} steps of "
            f"one draft token need {context + 2 * REPEATS + 3}. Use a fixed block size and tree budget."
        )
    chains = sorted({min(size, longest) for size in CHAIN_DRAFT_TOKENS}) if longest else []
    known: dict[int, tuple[float, Points, Points]] = {}
    for batch_size in [size for size in BATCH_SIZES if size < max_batch_size] + [max_batch_size]:
        if known and time.perf_counter() - began > LIMIT_SECONDS:
            break
        _, plain = _median(run_steps(batch_size, context, 0, False, REPEATS + 1))
        chain = points(batch_size, chains, False)
        tree = points(batch_size, TREE_DRAFT_TOKENS if longest else (), True)
        known[batch_size] = plain, chain, tree
        drafted = (
            f"{name} of {p[-1][0]} {1000 * p[-1][1]:.2f} ms" for name, p in (("chain", chain), ("tree", tree)) if p
        )
        report(", ".join([f"batch size {batch_size}: plain step {1000 * plain:.2f} ms", *drafted]))
    return Costs.of(known, time.time())


def _median(steps: list[tuple[int, float]]) -> tuple[int, float]:
    """Return the median draft tokens and seconds of all steps but the first, which warms up."""
    counts, seconds = zip(*steps[1:], strict=True)
    return int(statistics.median(counts)), statistics.median(seconds)


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
