"""`blockdraft bench --url`: servers with OpenAI's API under load."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import option
from blockdraft.data.settings import SERVER_KEY
from blockdraft.errors import UsageError
from blockdraft.evaluation.servers.settings import LoadSettings
from blockdraft.settings import from_text
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from blockdraft.evaluation.prompts import PromptSet
    from blockdraft.evaluation.servers.measure import Place

PANEL = "A server"


@dataclass(frozen=True)
class ServerOptions:
    """Which servers are measured, and how."""

    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure this server instead: one with OpenAI's API, such as http://localhost:8000. A key is read "
            f"from {SERVER_KEY}. --temperature 0,1 measures at both.",
            rich_help_panel=PANEL,
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A server of the same model with drafting off: measured in turns with the first, and asked whether it "
            "says the same greedily.",
            rich_help_panel=PANEL,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model's name there; by default the first listed.", rich_help_panel=PANEL
        ),
    ] = None
    concurrency: Annotated[str, option(LoadSettings, "concurrency", metavar="N,...", rich_help_panel=PANEL)] = ",".join(
        map(str, LoadSettings.concurrency)
    )
    requests: Annotated[int | None, option(LoadSettings, "requests", rich_help_panel=PANEL)] = LoadSettings.requests
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Send prompts as they are, to /v1/completions, not as chats.", rich_help_panel=PANEL
        ),
    ] = False
    allow_prefix_cache: Annotated[bool, option(LoadSettings, "allow_prefix_cache", rich_help_panel=PANEL)] = (
        LoadSettings.allow_prefix_cache
    )
    silence: Annotated[float, option(LoadSettings, "silence", rich_help_panel=PANEL)] = LoadSettings.silence

    def places(self) -> list[Place]:
        from blockdraft.evaluation.servers.measure import Place

        key = os.environ.get(SERVER_KEY)
        return [Place(url, self.model, key, self.raw) for url in (self.url, self.against) if url is not None]

    def settings(self) -> LoadSettings:
        levels = from_text(LoadSettings, "concurrency", self.concurrency)
        return LoadSettings(levels, self.requests, self.allow_prefix_cache, self.silence)


# Options of `bench` that a server heeds too.
SHARED = {"prompts", "limit", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "out", "overwrite", "as_json"}


def check_options(context: typer.Context, of_server: bool) -> None:
    """Raise a UsageError where options were given that do nothing."""
    own = {field.name for field in fields(ServerOptions)}
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        said = "--" + name.replace("_", "-")
        if of_server and name not in own | SHARED:
            raise UsageError(f"{said} says how blockdraft decodes, and --url measures a server; leave it away.")
        if not of_server and name in own:
            raise UsageError(f"{said} is about a server; add --url URL, or leave it away.")


def temperatures(text: str) -> list[float]:
    """The temperatures that a flag names."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"temperature is {text!r}; it must be a number, or several where --url or --suite is given, as in 0,1."
        ) from None


def measure_servers(
    places: Sequence[Place],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    arguments: dict[str, Any],
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Measure, write and print.

    Returns:
        The number of requests that failed.

    Raises:
        UsageError: As `measure` raises it; or a server died or hung behind the first level, and what was measured
            before is written and printed.
    """
    from blockdraft.cli import display
    from blockdraft.evaluation.servers import report
    from blockdraft.evaluation.servers.measure import measure

    if out is not None:
        report.check_folder(out, overwrite)
    try:
        with display.progress("requests") as progress:
            found = measure(places, sets, params, settings, progress)
    except KeyboardInterrupt:
        print("Interrupted; what was measured is discarded, and nothing was written.", file=sys.stderr)
        raise typer.Exit(130) from None
    arguments = {**arguments, **asdict(settings)}
    try:
        if out is not None:
            report.write(out, found, arguments)
    finally:  # also where the disk is full
        if as_json:
            print(report.as_json(found, arguments), end="")
        else:
            report.show(display.terminal() if sys.stdout.isatty() else display.plain(), found)
        sys.stdout.flush()
    if found.stopped:
        kept = "printed" if out is None else f"printed and in {out}"
        raise UsageError(f"{found.stopped} What was measured before is {kept}.")
    return sum(level.failed for level in found.levels)
