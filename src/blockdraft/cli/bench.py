"""`blockdraft bench`: methods against each other on prompt sets, or servers under load."""

from __future__ import annotations

import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import bench_suite
from blockdraft.cli.bench_server import ServerOptions, check_options, measure_servers, temperatures
from blockdraft.cli.bench_suite import SuiteOptions, measure_suite
from blockdraft.cli.loading import TargetOptions, takes_target, tell
from blockdraft.cli.options import BlockSize, DraftPasses, DraftWindow, extent, need_drafter, option
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import CHAIN, PLAIN, SAMPLED, TREE, Settings, parse_methods
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.types import DraftModel, SamplingParams


@takes_target
def bench(
    *,
    context: typer.Context,
    run: TargetOptions,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help='A prompt set, named after the file: lines of {"turns": ["text", ...]}, of which the first turn alone '
            'is used, or of {"prompt": "text"}. Repeat the option for several sets.',
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help=f"What to compare: {PLAIN} (plain decoding, always included); {CHAIN} (the drafter's chains) or "
            f"{CHAIN}:8 (in blocks of 8); {SAMPLED} (its guesses sampled); {TREE} (its trees) or {TREE}:64 "
            "(of at most 64 guesses); any other drafter by folder or name, with or without a block size; "
            f"prompt_lookup+{CHAIN} or prompt_lookup+{TREE}:64, both drafters together.",
        ),
    ] = f"{PLAIN},{CHAIN},{TREE}",
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help=f"What {CHAIN} and {TREE} draft with: a checkpoint folder; by default the bundled one.",
        ),
    ] = None,
    model: DraftModel,
    limit: Annotated[int | None, option(Settings, "limit")] = Settings.limit,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SamplingParams.max_new_tokens,
    temperature: Annotated[str, option(SamplingParams, "temperature", metavar="T")] = str(SamplingParams.temperature),
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SamplingParams.top_k,
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SamplingParams.top_p,
    seed: Annotated[
        int | None,
        typer.Option(help="Prompt i of a set, from 0 on, is decoded with this number + i; by default drawn."),
    ] = None,
    batch_size: Annotated[int, option(Settings, "batch_size")] = Settings.batch_size,
    repeats: Annotated[int, option(Settings, "repeats")] = Settings.repeats,
    block_size: BlockSize = None,
    tree_budget: Annotated[str, option(Settings, "tree_budget", metavar="N|auto")] = str(Settings.tree_budget),
    draft_window: DraftWindow = None,
    draft_passes: DraftPasses = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results.json, acceptance.png and speedup.png into this folder; with --suite suite.json and "
            "suite.csv, with --url server.json and server.csv.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Decode once more and say where a cycle's time goes; with --out also as profile.png."
        ),
    ] = False,
    pictures: Annotated[
        bool, typer.Option(help="Draw pictures, which takes matplotlib (the extra `bench` of this package).")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results that the folder holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of tables.")] = False,
    server: ServerOptions,
    suite: SuiteOptions,
) -> None:
    """Measure methods of decoding against each other: speed, acceptance, and whether the output stays the same.

    All methods decode the same prompts in turns. Progress goes to standard error. With --url it measures a running
    server of any engine instead, and writes server.json and server.csv. With --suite it measures the sets of a paper,
    and writes suite.json and suite.csv.
    """
    check_options(context, server.url is not None)
    bench_suite.check_options(context, suite.suite is not None)
    if suite.suite is not None:
        wanted = suite.settings(context)
        names = methods if bench_suite.given(context, "methods") else bench_suite.METHODS
        budget = extent("tree_budget", tree_budget)
        chosen = parse_methods(names, drafter, extent("block_size", block_size), budget, draft_window)
        if any(method.drafter is None for method in chosen):
            need_drafter(run.target, drafter, "name other methods")
        sampling = [
            SamplingParams(wanted.max_new_tokens, each, top_k, top_p, seed=wanted.seed)
            for each in temperatures(temperature)
        ]
        measure_suite(suite.suite, wanted, run, chosen, drafter, model, sampling, out, overwrite, as_json)
        return
    prompts = prompts or []
    seed = secrets.randbits(32) if seed is None else seed
    sampling = [SamplingParams(max_new_tokens, each, top_k, top_p, seed=seed) for each in temperatures(temperature)]
    if server.url is not None:
        given = {**asdict(server), "prompts": [str(path) for path in prompts], "limit": limit, "seed": seed}
        given |= {"max_new_tokens": max_new_tokens, "top_k": top_k, "top_p": top_p, "temperatures": temperature}
        sets = read_prompt_sets(prompts, limit)
        if measure_servers(server.places(), sets, sampling, server.settings(), given, out, overwrite, as_json):
            raise typer.Exit(1)
        return
    if len(sampling) != 1:
        raise UsageError(f"temperature is {temperature!r}; several are for --url and --suite, so give one.")
    [params] = sampling
    settings = Settings(limit, batch_size, repeats, extent("tree_budget", tree_budget))
    sizes = extent("block_size", block_size), settings.tree_budget
    chosen = parse_methods(methods, drafter, *sizes, draft_window, draft_passes)
    if any(method.drafter is None for method in chosen):
        need_drafter(run.target, drafter, "name other methods")
    sets = read_prompt_sets(prompts, limit)

    from blockdraft.cli import display
    from blockdraft.evaluation import folder, report, speed
    from blockdraft.evaluation.pictures import require_pictures
    from blockdraft.evaluation.profile import profiles as speed_profiles
    from blockdraft.evaluation.results import results

    if out is not None:
        folder.check_folder(out, overwrite)
        if pictures:
            require_pictures()
    loaded = run.load()
    engines = speed.load_methods(chosen, loaded, batch_size, model)
    try:
        with display.progress("answers") as progress:
            trials = speed.measure(engines, sets, params, settings, progress)
            profiles = speed_profiles(engines, sets, params, settings, trials, progress) if profile else None
    except KeyboardInterrupt:
        print("Interrupted; what was measured is discarded, and nothing was written.", file=sys.stderr)
        raise typer.Exit(130) from None

    arguments = {
        "methods": [method.name for method in chosen],
        "prompts": [str(path) for path in prompts],
        "target": run.target,
        "adapter": run.adapter,
        "revision": run.revision,
        "drafter": drafter,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": params.seed,
        "batch_size": batch_size,
        "repeats": repeats,
        "block_size": extent("block_size", block_size),
        "tree_budget": settings.tree_budget,
        "draft_window": draft_window,
        "draft_passes": draft_passes,
        **asdict(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "backend": loaded.backend,
        "running": loaded.running,
    }
    sampled = {method.name for method in chosen if method.drafting.sampled}
    found = results(trials, arguments, loaded.device, profiles, sampled)
    try:
        if out is not None:
            folder.write(out, found, pictures)
    finally:  # also where the disk is full
        if as_json:
            print(found.as_json(), end="")
        else:
            report.show(display.terminal() if sys.stdout.isatty() else display.plain(), found)
        for note in {display.ahead_note(engine.drafter) for engine in engines.values()} - {None}:
            tell(str(note))
        sys.stdout.flush()  # here, where a closed pipe still ends the command quietly
