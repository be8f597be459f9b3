"""`blockdraft bench`, `bench server` and `bench suite`: how fast methods and servers are, and on a paper's prompts."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import consoles, loading
from blockdraft.cli.options import (
    BlockSize,
    DrafterOptions,
    DraftPasses,
    DraftWindow,
    TargetOptions,
    extent,
    need_drafter,
    option,
    tell_unused,
)
from blockdraft.data.settings import SERVER_KEY
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import CHAIN, PLAIN, SAMPLED, TREE, Method, parse_methods
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.evaluation.settings import LoadSettings, Settings, SuiteSettings
from blockdraft.evaluation.suite.paper import SUITES
from blockdraft.settings import from_text
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from blockdraft.evaluation.prompts import PromptSet
    from blockdraft.evaluation.servers.measure import Server

DISCARDED = "Interrupted; what was measured is discarded, and nothing was written."

Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help='Prompt set, named after the file: lines of {"turns": ["text", ...]}, of which the first turn is used, or '
        'of {"prompt": "text"}. Repeat the option for several sets.',
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help=f"What to compare: {PLAIN}, plain decoding, which is always included; {CHAIN}, the drafter's chains, or "
        f"{CHAIN}:8, in blocks of 8; {SAMPLED}, chains of sampled guesses; {TREE}, its trees, or {TREE}:64, of at most "
        "64 guesses; any other drafter by folder or name, with or without a block size; "
        f"prompt_lookup+{CHAIN} or prompt_lookup+{TREE}:64, both drafters together.",
    ),
]
MethodsDrafter = Annotated[
    str | None,
    typer.Option(metavar="DIR|NAME", help=f"Drafter of {CHAIN}, {SAMPLED} and {TREE}; by default the bundled one."),
]
Temperatures = Annotated[
    str,
    typer.Option("--temperature", metavar="T,...", help="Temperatures, measured one after the other; 0 is greedy."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results that the folder holds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ServerResults = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for server.json and server.csv.")]
FirstSeed = Annotated[
    int | None,
    typer.Option(help="Seed of a set's first prompt; each prompt behind has the next one. By default a random one."),
]


def bench(
    *,
    run: TargetOptions,
    prompts: Prompts = None,
    methods: Methods = f"{PLAIN},{CHAIN},{TREE}",
    drafter: MethodsDrafter = None,
    model: DrafterOptions,
    limit: Annotated[int | None, option(Settings, "limit")] = Settings.limit,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SamplingParams.max_new_tokens,
    temperature: Annotated[float, option(SamplingParams, "temperature", metavar="T")] = SamplingParams.temperature,
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SamplingParams.top_k,
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SamplingParams.top_p,
    seed: FirstSeed = None,
    batch_size: Annotated[int, option(Settings, "batch_size")] = Settings.batch_size,
    repeats: Annotated[int, option(Settings, "repeats")] = Settings.repeats,
    block_size: BlockSize = None,
    tree_budget: Annotated[str, option(Settings, "tree_budget", metavar="N|auto")] = str(Settings.tree_budget),
    draft_window: DraftWindow = None,
    draft_passes: DraftPasses = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for results.json, and pictures of acceptance, tau and speed-up."),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Decode once more and show where a cycle's time goes; with --out also in profile.png."
        ),
    ] = False,
    pictures: Annotated[
        bool, typer.Option(help="Draw pictures, which needs matplotlib (the extra `bench` of this package).")
    ] = True,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure methods of decoding on the same prompts: speed, acceptance, and whether answers stay the same.

    Methods take turns on each prompt, so that a slow moment of the machine slows all. Progress goes to standard error.

    `blockdraft bench server URL` measures a running server of any engine, and `blockdraft bench suite` the prompt sets
    of the DFlash paper.
    """
    prompts = prompts or []
    seed = secrets.randbits(32) if seed is None else seed
    params = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed)
    settings = Settings(limit, batch_size, repeats, extent("tree_budget", tree_budget))
    size = extent("block_size", block_size)
    chosen = parse_methods(methods, drafter, size, settings.tree_budget, draft_window, draft_passes)
    tell_unused([temperature], _sampled(chosen), top_k=top_k, top_p=top_p)
    if any(method.drafter is None for method in chosen):
        need_drafter(run.target, drafter, "name other methods")
    sets = read_prompt_sets(prompts, limit)

    from blockdraft.cli import display
    from blockdraft.data.folder import check_overwrite
    from blockdraft.evaluation import report, speed
    from blockdraft.evaluation.pictures import require_pictures
    from blockdraft.evaluation.results import results

    if out is not None:
        check_overwrite(out, [report.RESULTS], overwrite)
        if pictures:
            require_pictures()
    speed.check_methods(chosen)
    loaded = run.load()
    engines = speed.load_methods(chosen, loaded, batch_size, model)
    try:
        with display.progress("answers") as progress:
            trials = speed.measure(engines, sets, params, settings, progress)
            profiles = speed.profiles(engines, sets, params, settings, trials, progress) if profile else None
    except KeyboardInterrupt:
        loading.tell(DISCARDED)
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
        "block_size": size,
        "tree_budget": settings.tree_budget,
        "draft_window": draft_window,
        "draft_passes": draft_passes,
        **asdict(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "backend": loaded.backend,
        "running": loaded.running,
        "kinds": {name: engine.drafter.kind for name, engine in engines.items()},
        "vocab_size": loaded.vocab_size,
        "draft_vocabs": {name: display.draft_vocab(engine) for name, engine in engines.items()},
        "drafter_notes": {name: display.drafter_note(engine) for name, engine in engines.items()},
        "drafter_bits": {name: display.drafter_bits(engine.drafter) for name, engine in engines.items()},
    }
    found = results(trials, arguments, loaded.device, profiles, _sampled(chosen))
    try:
        if out is not None:
            report.write(out, found, pictures)
    finally:  # also if the disk is full
        if as_json:
            print(found.as_json(), end="")
        else:
            report.show(consoles.standard(), found)
        for note in {display.ahead_note(engine.drafter) for engine in engines.values()} - {None}:
            loading.tell(str(note))
        sys.stdout.flush()  # here a closed pipe still ends the command quietly


@dataclass(frozen=True)
class LoadOptions:
    """Load that a server is put under."""

    concurrency: Annotated[str, option(LoadSettings, "concurrency", metavar="N,...")] = ",".join(
        map(str, LoadSettings.concurrency)
    )
    requests: Annotated[int | None, option(LoadSettings, "requests")] = LoadSettings.requests
    silence: Annotated[float, option(LoadSettings, "silence")] = LoadSettings.silence

    def settings(self, allow_prefix_cache: bool) -> LoadSettings:
        levels = from_text(LoadSettings, "concurrency", self.concurrency)
        return LoadSettings(
            concurrency=levels, requests=self.requests, silence=self.silence, allow_prefix_cache=allow_prefix_cache
        )


def bench_server(
    *,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Server with OpenAI's API, such as http://localhost:8000. If it asks for a key, that is read from "
            f"{SERVER_KEY}.",
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server of the same model with drafting off. Both are measured in turns, and their greedy answers "
            "compared.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name there; by default the first that it lists.")
    ] = None,
    prompts: Prompts = None,
    limit: Annotated[int | None, option(Settings, "limit")] = Settings.limit,
    load: LoadOptions,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send prompts as they are, to /v1/completions, not as chats.")
    ] = False,
    allow_prefix_cache: Annotated[bool, option(LoadSettings, "allow_prefix_cache")] = LoadSettings.allow_prefix_cache,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SamplingParams.max_new_tokens,
    temperature: Temperatures = str(SamplingParams.temperature),
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SamplingParams.top_k,
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SamplingParams.top_p,
    seed: FirstSeed = None,
    out: ServerResults = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure a running server of any engine under load: throughput, latency and acceptance.

    The exit code is 1 if requests fail.
    """
    prompts = prompts or []
    seed = secrets.randbits(32) if seed is None else seed
    sampling = [SamplingParams(max_new_tokens, each, top_k, top_p, seed=seed) for each in temperatures(temperature)]
    tell_unused(temperatures(temperature), top_k=top_k, top_p=top_p)
    sets = read_prompt_sets(prompts, limit)
    settings = load.settings(allow_prefix_cache)
    arguments = {
        "url": url,
        "against": against,
        "model": model,
        "raw": raw,
        "prompts": [str(path) for path in prompts],
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "temperatures": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }

    from blockdraft.evaluation.servers.measure import Server

    key = os.environ.get(SERVER_KEY)
    servers = [Server(each, model, key, raw) for each in (url, against) if each is not None]
    if measure_servers(
        servers, sets, sampling, settings, arguments=arguments, out=out, overwrite=overwrite, as_json=as_json
    ):
        raise typer.Exit(1)


def temperatures(text: str) -> list[float]:
    """The temperatures that an option's text names."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"temperature is {text!r}; it must be a number, or several as in 0,1.") from None


def measure_servers(
    servers: Sequence[Server],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    *,
    arguments: dict[str, Any],
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Measure, write and print.

    Returns:
        The number of requests that failed.

    Raises:
        UsageError: As `measure` raises it; or a server died or hung after the first level, and what was measured before
            is written and printed.
    """
    from blockdraft.cli import display
    from blockdraft.data.folder import check_overwrite
    from blockdraft.evaluation.servers import report
    from blockdraft.evaluation.servers.measure import measure

    if out is not None:
        check_overwrite(out, (report.JSON, report.CSV), overwrite)
    try:
        with display.progress("requests") as progress:
            found = measure(servers, sets, params, settings, progress)
    except KeyboardInterrupt:
        loading.tell(DISCARDED)
        raise typer.Exit(130) from None
    arguments = {**arguments, **asdict(settings)}
    try:
        if out is not None:
            report.write(out, found, arguments)
    finally:  # also if the disk is full
        if as_json:
            print(report.as_json(found, arguments), end="")
        else:
            report.show(consoles.standard(), found)
        sys.stdout.flush()
    if found.stopped:
        kept = "printed" if out is None else f"printed and in {out}"
        raise UsageError(f"{found.stopped} What was measured before is {kept}.")
    return sum(level.failed for level in found.levels)


def bench_suite(
    *,
    suite: Annotated[
        str, typer.Argument(metavar=f"[{'|'.join(SUITES)}]", help="The suite; there is one, the DFlash paper's.")
    ] = "paper",
    run: TargetOptions,
    methods: Methods = f"{PLAIN},{CHAIN}",
    drafter: MethodsDrafter = None,
    model: DrafterOptions,
    settings: SuiteSettings,
    temperature: Temperatures = str(SamplingParams.temperature),
    top_k: Annotated[int, option(SamplingParams, "top_k")] = SamplingParams.top_k,
    top_p: Annotated[float, option(SamplingParams, "top_p")] = SamplingParams.top_p,
    block_size: BlockSize = None,
    tree_budget: Annotated[str, option(Settings, "tree_budget", metavar="N|auto")] = str(Settings.tree_budget),
    draft_window: DraftWindow = None,
    draft_passes: DraftPasses = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for suite.json and suite.csv, written set by set. The same command goes on with what they "
            "lack.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure the prompt sets of the DFlash paper (arXiv 2602.06036), and print its figures beside yours."""
    sizes = extent("block_size", block_size), extent("tree_budget", tree_budget)
    chosen = parse_methods(methods, drafter, *sizes, draft_window, draft_passes)
    tell_unused(temperatures(temperature), _sampled(chosen), top_k=top_k, top_p=top_p)
    if any(method.drafter is None for method in chosen):
        need_drafter(run.target, drafter, "name other methods")
    sampling = [
        SamplingParams(settings.max_new_tokens, each, top_k, top_p, seed=settings.seed)
        for each in temperatures(temperature)
    ]

    from blockdraft.cli import display
    from blockdraft.evaluation.results import hardware
    from blockdraft.evaluation.speed import check_methods, load_methods
    from blockdraft.evaluation.suite import measure, results
    from blockdraft.evaluation.suite.paper import model_of
    from blockdraft.evaluation.suite.reading import chosen_tasks, read_tasks
    from blockdraft.folders import held

    tasks = chosen_tasks(suite, settings.tasks)
    prompts = read_tasks(tasks, settings.suite_data, settings.limit)
    check_methods(chosen)
    target = run.load()
    machine = hardware(target.device)
    asked: dict[str, Any] = {
        "suite": suite,
        "drafter": drafter,
        **{name: value for name, value in asdict(model).items() if value},
        "methods": {method.name: asdict(method.drafting) for method in chosen},
        **{name: getattr(settings, name) for name in ("limit", "max_new_tokens", "seed")},
        "top_k": top_k,
        "top_p": top_p,
        **asdict(run),
        "dtype": str(target.dtype).removeprefix("torch."),
        "running": target.running,
        "machine": machine["gpu"] or machine["cpu"],
    }
    about = {name: asked[name] for name in ("dtype", "running", "machine")}
    about |= {"hardware": machine, "blockdraft": version("blockdraft")}
    new = results.Results(asked, about, settings.paper_model or model_of(target.architecture))
    with held(out, "blockdraft bench suite") if out is not None else nullcontext():
        found = new if out is None else results.resumed(new, out, overwrite)
        left = [
            (task, params) for params in sampling for task in tasks if not found.settled(task.name, params.temperature)
        ]
        if left:
            measure.check_prompts(target, prompts, sampling[0])
        engines = load_methods(chosen, target, 1, model) if left else {}
        try:
            with display.progress("prompts") as progress:
                for task, params in left:
                    trials = measure.decode_task(engines, task, prompts[task.name], params, progress)
                    found = found.plus(measure.rows_of(task.name, params.temperature, trials, _sampled(chosen)))
                    if out is not None:
                        results.write(out, found)
        except KeyboardInterrupt:
            kept = "nothing was written" if out is None else f"the same command goes on with what {out} lacks"
            loading.tell(f"Interrupted; {kept}.")
            raise typer.Exit(130) from None
    found = found.only([task.name for task in tasks], [params.temperature for params in sampling])
    if as_json:
        print(found.as_json(), end="")
    else:
        results.show(consoles.standard(), found, tasks)
    sys.stdout.flush()


def _sampled(methods: Sequence[Method]) -> set[str]:
    """Names of the methods whose guesses are sampled at random."""
    return {method.name for method in methods if method.drafting.sampled}
