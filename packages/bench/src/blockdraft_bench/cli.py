"""`blockdraft bench` and `bench server`: speed of decoding methods, and of servers."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, Strict

from blockdraft.cli import display
from blockdraft.cli.display import exit_on_interrupt, standard
from blockdraft.cli.options import DRAFTING, MEASURE, OUTPUT, SAMPLING, CommandSpec, Only
from blockdraft.cli.target import (
    DRAFT_VOCAB,
    AsJson,
    DecodingTarget,
    DraftVocab,
    Files,
    Overwrite,
    tell_unused,
)
from blockdraft.errors import UsageError
from blockdraft.prompt_sets import read_prompt_sets
from blockdraft.settings import Flag, settings
from blockdraft.types import Drafting, SamplingParams
from blockdraft_bench.methods import CHAIN, PLAIN, SAMPLED, TREE, Method, parse_methods
from blockdraft_bench.settings import SERVER_KEY, LoadSettings, MeasureSettings

DISCARDED = "Interrupted; the measurements are discarded, and nothing was written."
PROMPTS = (
    'Prompt set, named after the file: one {"turns": ["text", ...]}, of which the first turn counts, or {"prompt": '
    '"text"} per line. Repeat the option for several sets.'
)
METHODS = (
    f"Methods to compare: {PLAIN}, plain decoding, which is always included; {CHAIN}, the drafter's chains, or "
    f"{CHAIN}:8, in blocks of 8; {SAMPLED}, chains of sampled draft tokens; {TREE}, its trees, or {TREE}:64, of at "
    "most 64 draft tokens; any other drafter by folder or name, with or without a block size; "
    f"lookup+{CHAIN} or lookup+{TREE}:64, both drafters together."
)
Sampled = Annotated[SamplingParams, Only("max_new_tokens temperature top_k top_p seed", SAMPLING)]
FixedDrafting = Annotated[Drafting, Only("block_size draft_window draft_passes", DRAFTING)]
FIXED = Drafting(None)  # `bench` measures blocks of the trained size unless "auto" is asked for
Temperatures = Annotated[tuple[float, ...], Strict(False), Field(min_length=1), Flag(metavar="T,...", panel=SAMPLING)]
TEMPERATURES = "Temperatures, measured one after the other; 0 is greedy."
Results = Annotated[Path | None, Flag(metavar="DIR", panel=OUTPUT)]


@settings
class BenchSettings:
    """What `blockdraft bench` measures and writes."""

    methods: Annotated[str, Flag(metavar="NAME,...")] = Field(f"{PLAIN},{CHAIN},{TREE}", description=METHODS)
    drafter: Annotated[str | None, Flag(metavar="DIR|NAME", panel=DRAFTING)] = Field(
        None, description=f"Drafter of {CHAIN}, {SAMPLED} and {TREE}; by default the bundled one, else lookup."
    )
    draft_vocab: DraftVocab = Field(None, description=DRAFT_VOCAB)
    prompts: Files = Field((), description=PROMPTS)
    out: Results = Field(None, description="Folder for results.json and results.png.")
    profile: Annotated[bool, Flag(panel=OUTPUT)] = Field(
        False, description="Decode once more, and show where the time of a step goes."
    )


def bench(
    *,
    model: DecodingTarget,
    options: BenchSettings,
    measurement: MeasureSettings,
    sampling: Sampled,
    drafting: FixedDrafting = FIXED,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Compare decoding methods on the same prompts: speed, acceptance, and whether answers stay the same.

    The methods are interleaved on each prompt, so that a slow moment of the machine affects all of them. Progress goes
    to standard error. Without --seed, the first prompt of a set has a random one, and each later prompt the next.

    `blockdraft bench server URL` measures a running server of any engine.
    """
    params = replace(sampling, seed=secrets.randbits(32)) if sampling.seed is None else sampling
    extent = drafting.block_size, measurement.tree_budget, drafting.draft_window, drafting.draft_passes
    methods = parse_methods(options.methods, options.drafter, *extent)
    tell_unused(params, [params.temperature], _sampled(methods))
    sets = read_prompt_sets(list(options.prompts), measurement.limit)

    from blockdraft.cli import answers
    from blockdraft.folders import check_overwrite
    from blockdraft_bench import report, speed
    from blockdraft_bench.results import results

    if options.out is not None:
        check_overwrite(options.out, [report.RESULTS], overwrite)
    speed.check_methods(methods)
    target = model.load_for(None, options.draft_vocab)
    target.compile_at_once()
    engines = speed.load_methods(methods, target, measurement.batch_size, options.draft_vocab)
    with exit_on_interrupt(DISCARDED), display.progress("answers") as progress:
        trials = speed.measure(engines, sets, params, measurement, progress)
        profiles = speed.profiles(engines, sets, params, measurement, trials, progress) if options.profile else None

    arguments = {
        **asdict(model),
        **asdict(measurement),
        **_picked(params, "max_new_tokens temperature top_k top_p seed"),
        **_picked(drafting, "block_size draft_window draft_passes"),
        **_picked(target, "backend running vocab_size"),
        "methods": [method.name for method in methods],
        "prompts": [str(path) for path in options.prompts],
        **_picked(options, "drafter draft_vocab"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "kinds": {name: engine.drafter.kind for name, engine in engines.items()},
        "draft_vocabs": {name: answers.draft_vocab(engine) for name, engine in engines.items()},
        "drafter_notes": {name: answers.drafter_note(engine) for name, engine in engines.items()},
        "drafter_bits": {name: answers.drafter_bits(engine.drafter) for name, engine in engines.items()},
    }
    measured = results(trials, arguments, target.device, profiles, _sampled(methods))
    try:
        if options.out is not None:
            report.write(options.out, measured)
    finally:  # also if the disk is full
        if as_json:
            print(measured.as_json(), end="")
        else:
            report.show(standard(), measured)
        sys.stdout.flush()  # a closed pipe still ends the command quietly here


@settings
class ServerBenchSettings:
    """Servers that `blockdraft bench server` measures, and what it sends and writes."""

    against: Annotated[str | None, Flag(metavar="URL")] = Field(
        None,
        description="Server of the same model with drafting off. Both are measured, interleaved, and their greedy "
        "answers compared.",
    )
    model: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Name of the model on the server; by default the first that it lists."
    )
    raw: bool = Field(False, description="Send prompts as they are, to /v1/completions, instead of as chats.")
    prompts: Files = Field((), description=PROMPTS)
    temperature: Temperatures = Field((SamplingParams.temperature,), description=TEMPERATURES)
    out: Results = Field(None, description="Folder for server.json.")


def bench_server(
    *,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Server with OpenAI's API, such as http://localhost:8000. If it needs a key, that is read from "
            f"{SERVER_KEY}.",
        ),
    ],
    options: ServerBenchSettings,
    measurement: Annotated[MeasureSettings, Only("limit")],
    load: LoadSettings,
    sampling: Annotated[SamplingParams, Only("max_new_tokens top_k top_p seed", SAMPLING)],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure a running server of any engine under load: throughput, latency and acceptance.

    The exit code is 1 if requests fail.
    """
    sampling = replace(sampling, seed=secrets.randbits(32)) if sampling.seed is None else sampling
    params = [replace(sampling, temperature=temperature) for temperature in options.temperature]
    tell_unused(sampling, options.temperature)
    sets = read_prompt_sets(list(options.prompts), measurement.limit)
    arguments = {
        "url": url,
        **_picked(options, "against model raw"),
        "prompts": [str(path) for path in options.prompts],
        "limit": measurement.limit,
        "temperatures": ",".join(f"{temperature:g}" for temperature in options.temperature),
        **_picked(sampling, "max_new_tokens top_k top_p seed"),
        **asdict(load),
    }

    from blockdraft.folders import check_overwrite
    from blockdraft_bench.servers import report
    from blockdraft_bench.servers.client import Client
    from blockdraft_bench.servers.measure import measure

    key = os.environ.get(SERVER_KEY)
    places = [place for place in (url, options.against) if place is not None]
    clients = [Client(place, options.model, key, options.raw, load.silence) for place in places]
    if options.out is not None:
        check_overwrite(options.out, [report.JSON], overwrite)
    with exit_on_interrupt(DISCARDED), display.progress("requests") as progress:
        measured = measure(clients, sets, params, load, progress)
    try:
        if options.out is not None:
            report.write(options.out, measured, arguments)
    finally:  # also if the disk is full
        if as_json:
            print(report.as_json(measured, arguments), end="")
        else:
            report.show(standard(), measured)
        sys.stdout.flush()
    if measured.stopped:  # a server died or hung after the first level
        place = "printed" if options.out is None else f"printed and in {options.out}"
        raise UsageError(f"{measured.stopped} What was measured before is {place}.")
    if any(level.failed for level in measured.levels):
        raise typer.Exit(1)


def _sampled(methods: Sequence[Method]) -> set[str]:
    """Return the names of the methods that sample draft tokens."""
    return {method.name for method in methods if method.drafting.sampled}


def _picked(values: object, names: str) -> dict[str, Any]:
    return {name: getattr(values, name) for name in names.split()}


BENCH = CommandSpec(
    bench, MEASURE, common="target drafter prompts limit methods max_new_tokens temperature repeats out profile"
)
BENCH_SERVER = CommandSpec(
    bench_server, MEASURE, common="against prompts limit concurrency max_new_tokens temperature out"
)
