"""`blockdraft launch`: starts another engine with a pair and measures it."""

from __future__ import annotations

import secrets
import shlex
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from blockdraft.cli import loading
from blockdraft.cli.bench import (
    AsJson,
    LoadOptions,
    Overwrite,
    ServerResults,
    Temperatures,
    measure_servers,
    temperatures,
)
from blockdraft.cli.options import option
from blockdraft.errors import UsageError, counted
from blockdraft.evaluation.prompts import SAMPLES, read_prompt_sets
from blockdraft.evaluation.settings import Settings
from blockdraft.tools.deploy.settings import LaunchSettings
from blockdraft.types import SamplingParams


def launch(
    *,
    engine: Annotated[
        str, typer.Argument(metavar="vllm|sglang|trtllm", help="Engine to start; it must be installed here.")
    ],
    target: Annotated[str, typer.Option(metavar="DIR", help="Target: a Hugging Face model folder or hub name.")],
    drafter: Annotated[str, typer.Option(metavar="DIR", help="Folder of a drafter, or bundled.")],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options for the engine, after --.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the engine's command and start nothing.")] = False,
    settings: LaunchSettings,
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on serving, with the engine's own prefix caching, until Ctrl-C.")
    ] = False,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prompts to measure with, as for `bench`; by default a few questions."),
    ] = None,
    limit: Annotated[int | None, option(Settings, "limit")] = Settings.limit,
    load: LoadOptions,
    max_new_tokens: Annotated[int, option(SamplingParams, "max_new_tokens")] = SamplingParams.max_new_tokens,
    temperature: Temperatures = str(SamplingParams.temperature),
    out: ServerResults = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Start vLLM, SGLang or TensorRT-LLM with a pair, and measure it as `blockdraft bench server` does.

    Target and drafter are checked against each other first. The engine ends after the measurement, unless --keep is
    given.
    """
    measured = load.settings(allow_prefix_cache=keep)
    seed = secrets.randbits(32)
    sampling = [SamplingParams(max_new_tokens, each, seed=seed) for each in temperatures(temperature)]
    sets = read_prompt_sets(prompts, limit) if prompts else [SAMPLES]

    from blockdraft.data.folder import check_overwrite
    from blockdraft.evaluation.servers import report
    from blockdraft.evaluation.servers.measure import Server
    from blockdraft.tools.deploy.installed import installed
    from blockdraft.tools.deploy.launch import Running, command, new_log

    loading.quiet()
    found = command(engine, target, drafter, settings.port, keep, more or (), loading.tell)
    if dry_run:
        print(found.shell())
        return
    if out is not None:
        check_overwrite(out, (report.JSON, report.CSV), overwrite)
    try:
        with ExitStack() as stack:
            line = found.placed(Path(stack.enter_context(TemporaryDirectory())))
            here = installed(line, settings.environment, loading.tell)
            log = new_log(engine) if settings.log is None else settings.log
            loading.tell(f"{shlex.join(here.line)}\nIt starts, which takes a minute or more. Its log: {log}")
            running = stack.enter_context(Running(here.line, settings.port, settings.patience, log, here.variables))
            if keep:
                loading.tell(f"Serving at {running.url}; Ctrl-C ends it. It is measured first.")
            try:
                failed = measure_servers(
                    [Server(running.url)],
                    sets,
                    sampling,
                    measured,
                    arguments={
                        "command": here.line,
                        "max_new_tokens": max_new_tokens,
                        "temperatures": temperature,
                        "seed": seed,
                    },
                    out=out,
                    overwrite=overwrite,
                    as_json=as_json,
                )
                trouble = f"{counted(failed, 'request')} failed"
            except UsageError as error:
                if not keep:
                    raise UsageError(f"{error} {running.last_words()}") from error
                failed, trouble = 1, str(error)
            if keep:
                if failed:
                    loading.tell(f"The measurement went wrong: {trouble}")
                status = running.wait()
                loading.tell(f"The engine ended with status {status}. {running.last_words()}")
                raise typer.Exit(status or 1)  # vLLM's server ends with 0 where its core was killed
            raise typer.Exit(1 if failed else 0)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
