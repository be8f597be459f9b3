"""`blockdraft launch`: another engine with a pair, started and measured."""

from __future__ import annotations

import secrets
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.bench_server import ServerOptions, measure_servers, temperatures
from blockdraft.cli.options import option
from blockdraft.errors import UsageError, counted
from blockdraft.evaluation.methods import Settings
from blockdraft.evaluation.prompts import SAMPLES, read_prompt_sets
from blockdraft.evaluation.servers.settings import LoadSettings
from blockdraft.tools.deploy.settings import LaunchSettings
from blockdraft.types import SamplingParams


def launch(
    engine: Annotated[
        str, typer.Argument(metavar="vllm|sglang|trtllm", help="What to start; it must be installed here.")
    ],
    target: Annotated[str, typer.Option(metavar="DIR", help="Target: a Hugging Face model folder or hub name.")],
    drafter: Annotated[str, typer.Option(metavar="DIR", help="The folder of a drafter.")],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options for the engine, behind --.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the engine's command and start nothing.")] = False,
    port: Annotated[int, option(LaunchSettings, "port")] = LaunchSettings.port,
    patience: Annotated[float, option(LaunchSettings, "patience")] = LaunchSettings.patience,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Go on serving, with the engine's own prefix caching, until Ctrl-C."),
    ] = False,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="What to measure with, as for `blockdraft bench`; by default a few questions."
        ),
    ] = None,
    limit: Annotated[int | None, option(Settings, "limit")] = Settings.limit,
    concurrency: Annotated[str, option(LoadSettings, "concurrency", metavar="N,...")] = ServerOptions.concurrency,
    requests: Annotated[int | None, option(LoadSettings, "requests")] = LoadSettings.requests,
    silence: Annotated[float, option(LoadSettings, "silence")] = LoadSettings.silence,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SamplingParams.max_new_tokens,
    temperature: Annotated[str, option(SamplingParams, "temperature", metavar="T,...")] = str(
        SamplingParams.temperature
    ),
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write server.json and server.csv into this folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results that the folder holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of tables.")] = False,
) -> None:
    """Start vLLM, SGLang or TensorRT-LLM with a pair, and measure it as `blockdraft bench --url` does.

    Whether the two go together is checked first. The engine ends when it is measured, unless --keep is given.
    """
    settings = LaunchSettings(port=port, patience=patience)
    chosen = ServerOptions(
        concurrency=concurrency, requests=requests, allow_prefix_cache=keep, silence=silence
    ).settings()
    seed = secrets.randbits(32)
    sampling = [SamplingParams(max_new_tokens, each, seed=seed) for each in temperatures(temperature)]
    sets = read_prompt_sets(prompts, limit) if prompts else [SAMPLES]

    from blockdraft.evaluation.servers import report
    from blockdraft.evaluation.servers.measure import Place
    from blockdraft.tools.deploy.launch import Running, command

    loading.quiet()
    found = command(engine, target, drafter, settings.port, keep, more or (), loading.tell)
    if dry_run:
        print(found.shell())
        return
    if out is not None:
        report.check_folder(out, overwrite)
    try:
        with ExitStack() as stack:
            line = found.placed(Path(stack.enter_context(TemporaryDirectory())))
            print(shlex.join(line), file=sys.stderr, flush=True)
            running = stack.enter_context(Running(line, settings.port, settings.patience))
            arguments = {"command": line, "max_new_tokens": max_new_tokens, "temperatures": temperature, "seed": seed}
            how = [Place(running.url)], sets, sampling, chosen, arguments, out, overwrite, as_json
            try:
                failed = measure_servers(*how)
                trouble = f"{counted(failed, 'request')} failed"
            except UsageError as error:
                if not keep:
                    raise
                failed, trouble = 1, str(error)
            if keep:
                if failed:
                    loading.tell(f"The measurement went wrong: {trouble}")
                print(f"Serving at {running.url}; Ctrl-C ends it.", file=sys.stderr, flush=True)
                raise typer.Exit(running.wait())
            raise typer.Exit(1 if failed else 0)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
