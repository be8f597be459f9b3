"""`blockdraft radar`: what fits a device, and the speeds that it brings there, before anything is downloaded."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import consoles
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.models import Drafter
    from blockdraft.radar.devices import Machine
    from blockdraft.radar.project import Interval, Projection
    from blockdraft.radar.shape import Shape

WIDTH = 140  # characters of a table that goes into a file or pipe
USUAL = ("bf16", "Q8_0", "Q4_K_M")  # weights that are tried unless some are named


def radar(
    *,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help='Device, such as "RTX 4090" or "8x H100 SXM", or here for this machine; repeat the option for more. '
            "By default this machine.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|DIR|FILE",
            help="Model: a name of `blockdraft models` or of the hub, a folder, a config.json, or a GGUF file; repeat "
            "the option for more. By default all of the catalogue.",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Weights, such as bf16, fp8, int8, int4 or Q4_K_M; repeat the option for more. By default those of a "
            "GGUF file, or bf16, Q8_0 and Q4_K_M, of which the list shows the finest that fit.",
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text.")] = 4096,
    batch: Annotated[int, typer.Option(help="Texts that are decoded together.")] = 1,
    task: Annotated[str, typer.Option(metavar="NAME", help="What is asked for: math, code, chat, mean, or a set.")] = (
        "mean"
    ),
    drafter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Published drafter; by default the fastest of each model.")
    ] = None,
    ram: Annotated[float | None, typer.Option(metavar="GB", help="Memory of a CPU or a chip that shares it.")] = None,
    licence: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only models whose licence has this in its name.")
    ] = None,
    least_speed: Annotated[float, typer.Option(help="Only models that decode as many tokens per second.")] = 0.0,
    limit: Annotated[int, typer.Option(help="Most rows of the list; 0 shows all.")] = 25,
    devices: Annotated[bool, typer.Option("--devices", help="List the devices that have names.")] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Tell instead what a drafter of one's own costs to make.")
    ] = False,
    samples: Annotated[int | None, typer.Option(help="Prompts of --train.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of --train.")] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the page, which any web server can offer, to a folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Tell which models fit a device, and how fast they are there, plain and drafted, without downloading anything.

    Speeds are intervals, from the device's bandwidth and arithmetic and from published tau; where drafting loses, it
    says so. The same is a page at /radar of `blockdraft serve`.
    """
    from blockdraft.radar.drafting import checked_task
    from blockdraft.radar.shape import known_shapes, read_shape

    console = consoles.standard(WIDTH)
    if devices:
        show_devices(console, as_json)
        return
    if export is not None:
        from blockdraft.radar.page import export_page

        print(export_page(export))
        return
    checked_task(task)
    shapes = [read_shape(name) for name in model] if model else list(known_shapes())
    chosen = None if drafter is None else find_drafter(drafter, shapes)
    if licence is not None:
        shapes = [shape for shape in shapes if licence.lower() in (shape.licence or "").lower()]
        if not shapes:
            raise UsageError(f"No model's licence has {licence!r} in its name; `blockdraft models` tells licences.")
    machines = list(_machines(device or ["here"], ram))
    if train:
        if not model:
            raise UsageError("--train takes one --model or more; name the target that the drafter is for.")
        show_training(console, shapes, machines, samples, epochs, weights, as_json)
        return
    rows: list[Projection] = []
    for machine in machines:
        for shape in shapes:
            rows += _rows(shape, machine, weights, context, batch, task, chosen, strict=bool(model))
    slow = [row for row in rows if fastest(row) < least_speed]
    rows = [row for row in rows if fastest(row) >= least_speed]
    if as_json:
        print(json.dumps({"rows": [with_commands(row) for row in rows]}))
        return
    if model and len(rows) + len(slow) <= 6:
        for row in [*rows, *slow]:
            show_row(console, row)
            if row in slow:
                console.print(f"  {needed(row, least_speed, shapes, machines, task)}", soft_wrap=True)
        return
    show_rows(console, rows, bool(weights), limit)


def find_drafter(name: str, shapes: list[Shape]) -> Drafter:
    """A published drafter of one of the models.

    Raises:
        UsageError: There is none of that name, or it is made for another target.
    """
    from blockdraft.models import catalogue

    wanted = name.lower()
    for shape in shapes:
        for each in shape.drafters:
            if wanted in (each.hub.lower(), each.kind):
                return each
    for model in catalogue():
        if any(each.hub.lower() == wanted for each in model.drafters):
            asked = ", ".join(shape.name for shape in shapes[:3])
            raise UsageError(f"{name} is a drafter of {model.id}, not of {asked}; leave --drafter out, or name it.")
    offered = [each.hub for shape in shapes[:3] for each in shape.drafters][:4]
    told = f"of these models there are {', '.join(offered)}" if offered else "there is none of these models"
    raise UsageError(f"{name!r} is no published drafter; {told}.")


def _machines(names: list[str], ram: float | None) -> Iterator[Machine]:
    from blockdraft.radar.devices import find, machine_of
    from blockdraft.radar.machine import HERE, here

    for name in names:
        if name.lower() == HERE:
            yield from here(lambda line: print(line, file=sys.stderr), ram)
            continue
        several = re.fullmatch(r"(\d+)\s*[x×]\s+(.+)", name.strip())
        count, one = (int(several[1]), several[2]) if several else (1, name)
        yield machine_of(find(one), count, ram)


def _rows(
    shape: Shape,
    machine: Machine,
    weights: list[str] | None,
    context: int,
    batch: int,
    task: str,
    drafter: Drafter | None,
    strict: bool,
) -> Iterator[Projection]:
    """Projections with each kind of weights. Unless `strict`, a model is left out whose context is too short."""
    from blockdraft.radar.calibrated import calibrated
    from blockdraft.radar.project import project

    if drafter is not None and drafter not in shape.drafters:
        return
    if not strict and shape.context and context > shape.context:
        return
    for kind in weights or (["file"] if shape.stored_bytes else USUAL):
        known = calibrated(shape, kind) if machine.measured and drafter is None else None
        costs, of = known or (None, drafter)
        yield project(shape, machine, kind, context, batch, task, drafter=of, costs=costs)


def fastest(row: Projection) -> float:
    """Likely tokens per second, drafted or plain; 0 if it does not fit."""
    if not row.fits:
        return 0.0
    return max(row.plain.mid, row.drafted.mid if row.drafted else 0.0)


def needed(row: Projection, speed: float, shapes: list[Shape], machines: list[Machine], task: str) -> str:
    """What a speed would take that a row does not reach."""
    from blockdraft.radar.project import batch_for

    shape = next(shape for shape in shapes if shape.name == row.model)
    machine = next(machine for machine in machines if machine.name == row.device)
    if not row.fits:
        return f"It does not fit, so {speed:,.0f} tokens/s are out of reach here."
    found = batch_for(speed, shape, machine, weights=row.weights, context=row.context, task=task)
    reached = f"{row.batch} at once reach about {fastest(row):,.0f} tokens/s"
    if found is None:
        return f"{reached}; {speed:,.0f} tokens/s need more memory or devices than this."
    return f"{reached}; {speed:,.0f} tokens/s are a batch of {found}, about {speed / found:,.0f} for each text."


def with_commands(row: Projection) -> dict[str, Any]:
    """A row as `--json` prints it, with the commands that run what it shows."""
    held = row.as_dict()
    held["why"]["commands"] = commands(row)
    return held


def commands(row: Projection) -> list[str]:
    """Commands that run what a row shows, here and in other engines."""
    from blockdraft.models import known
    from blockdraft.models.catalogue import BUNDLED

    model = None
    with suppress(UsageError):
        model = known(row.model)
    name, hub = (model.id, model.hub) if model else (row.model, row.model)
    found = [shlex.join(["blockdraft", "pull", name])] if model else []
    if row.why["drafting"] == "loses" or not row.why["drafter"]:
        drafting = ["--drafter", "none"]
    else:
        drafting = ["--drafter", row.why["drafter"], "--block-size", str(row.block_size)]
    found.append(shlex.join(["blockdraft", "serve", "--target", name, *drafting]))
    if (
        drafting[1] not in ("none", BUNDLED)
        and not row.device.startswith("Apple")
        and row.weights in ("bf16", "fp8", "int8", "int4")
    ):
        found.append(shlex.join(["blockdraft", "inspect", drafting[1], "--target", hub]))
    if row.model.endswith(".gguf"):
        found.append(shlex.join(["llama-server", "-m", row.model, "-c", str(row.context)]))
    return found


def show_rows(console: Console, rows: list[Projection], every: bool, limit: int) -> None:
    """Print the list: models that fit first, the largest of them first."""
    from rich import box
    from rich.table import Table

    from blockdraft.models import known

    def parameters(row: Projection) -> int:
        with suppress(UsageError):
            return known(row.model).parameters or 0
        return 0

    if not every:  # of each model and device the finest weights that fit
        best: dict[tuple[str, str], Projection] = {}
        for row in rows:
            held = best.get((row.model, row.device))
            if held is None or (not held.fits and row.fits):
                best[row.model, row.device] = row
        rows = list(best.values())
    fitting = sorted((row for row in rows if row.fits), key=lambda row: (-parameters(row), -fastest(row)))
    shown = fitting[:limit] if limit else fitting
    several = len({row.device for row in rows}) != 1
    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False)
    right = ("memory", "first token", "plain", "drafted", "block")
    for header in [*(["device"] if several else []), "model", "weights", *right, "drafting", "confidence"]:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=header != "device")
    for row in shown:
        table.add_row(
            *([row.device] if several else []),
            row.model,
            row.weights,
            gigabytes(row.memory_bytes),
            seconds(row.first_token_seconds),
            interval(row.plain),
            interval(row.drafted),
            str(row.block_size) if row.drafted else "",
            told(row),
            row.confidence,
        )
    console.print(table)
    first = rows[0] if rows else None
    if first is not None:
        name = "" if several else f"{first.device}, "
        note = f" ({first.why['note']})" if first.why["note"] and not several else ""
        console.print(f"{name}context {first.context}, batch {first.batch}, task {first.task}{note}.", soft_wrap=True)
    console.print("Tokens per second: likely value (interval). Largest models that fit first.", soft_wrap=True)
    if len(fitting) < len(rows):
        console.print(f"{len(rows) - len(fitting)} more do not fit.", soft_wrap=True)
    if len(shown) < len(fitting):
        console.print(f"{len(fitting) - len(shown)} more fit; --limit 0 shows all.", soft_wrap=True)


def show_row(console: Console, row: Projection) -> None:
    """Print a projection with what it comes from."""
    why = row.why

    def line(name: str, value: str) -> None:
        console.print(f"  {name:14}{value}", soft_wrap=True)

    fits = "fits" if row.fits else "does not fit"
    console.print(f"{row.model}, {row.weights}, on {row.device}: {fits}", soft_wrap=True)
    line("asked", f"context {row.context}, batch {row.batch}, task {row.task}")
    parts = [("weights", "weight"), ("drafter", "drafter"), ("caches", "cache"), ("workspace", "workspace")]
    held = ", ".join(f"{name} {gigabytes(why[f'{key}_bytes'])}" for name, key in parts)
    line("memory", f"{gigabytes(row.memory_bytes)}: {held}")
    line("first token", seconds(row.first_token_seconds))
    line(
        "plain",
        f"{interval(row.plain)} tokens/s; a step of {1e3 * why['step_seconds']:.3g} ms reads "
        f"{gigabytes(why['read_bytes'])} and is bound by {why['bound']}",
    )
    if row.drafted:
        tau = why["tau"]
        line(
            "drafted",
            f"{interval(row.drafted)} tokens/s with blocks of {row.block_size}; a cycle of "
            f"{1e3 * why['cycle_seconds']:.3g} ms is bound by {why['block_bound']}: {told(row)}",
        )
        line("tau", f"{tau['mid']:.2f} ({tau['low']:.2f} to {tau['high']:.2f}), {why['tau_source']}")
        line("drafter", why["drafter"] or "none is published; `blockdraft fit` makes one")
    if why["experts_read"]:
        one, many = why["experts_read"]
        line("experts", f"{one:g} of a layer are read for a token, {many:g} for a block")
    line("confidence", row.confidence)
    if why["note"]:
        line("machine", why["note"])
    for number, command in enumerate(commands(row)):
        line("" if number else "run", command)


def told(row: Projection) -> str:
    """What drafting brings."""
    if not row.drafted:
        return ""
    gain = row.why["speedup"]
    return {"loses": f"loses here ({gain:.2f}x)", "neither": "as fast"}.get(row.why["drafting"], f"{gain:.1f}x")


def interval(speed: Interval | None) -> str:
    """An interval as `mid (low to high)`."""
    if speed is None:
        return ""
    return f"{_number(speed.mid)} ({_number(speed.low)} to {_number(speed.high)})"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def gigabytes(count: float) -> str:
    """Bytes in GB, or MB below one."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{value:,.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def show_devices(console: Console, as_json: bool) -> None:
    """Print the table of devices."""
    from rich import box
    from rich.table import Table

    from blockdraft.radar.devices import devices

    if as_json:
        print(json.dumps([device.model_dump(by_alias=True, exclude_none=True) for device in devices()]))
        return
    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False)
    for header in ("device", "class", "year", "memory", "GB/s", "TFLOPS bf16"):
        table.add_column(header, justify="left" if header in ("device", "class") else "right", no_wrap=True)
    for device in devices():
        memory = f"{device.memory_gb:g} GB" if device.memory_gb else ""
        rate = device.bf16 or device.fp32 or 0.0
        table.add_row(device.name, device.kind, str(device.year), memory, f"{device.bandwidth_gbs:g}", f"{rate:.4g}")
    console.print(table)


def show_training(
    console: Console,
    shapes: list[Shape],
    machines: list[Machine],
    samples: int | None,
    epochs: int | None,
    weights: list[str] | None,
    as_json: bool,
) -> None:
    """Print what drafters of one's own cost."""
    from blockdraft.radar.train import TrainPlan, train_cost

    given = {"samples": samples, "epochs": epochs}
    plan = TrainPlan(**{name: value for name, value in given.items() if value is not None})
    [kind] = weights or ["bf16"]
    costs = [train_cost(shape, machine, plan, kind) for machine in machines for shape in shapes]
    if as_json:
        print(json.dumps({"rows": [cost.as_dict() for cost in costs]}))
        return
    for cost in costs:
        console.print(f"A DFlash drafter for {cost.model}, on {cost.device}", soft_wrap=True)
        for name, value in (
            ("samples", f"{plan.samples:,} of {plan.tokens:,} tokens, {plan.epochs} epochs"),
            ("responses", f"{hours(cost.response_hours)} of the target"),
            (
                "hidden_states",
                f"{hours(cost.hidden_state_hours)}, {gigabytes(cost.hidden_state_bytes)} on disk, or none beside it",
            ),
            ("training", f"{hours(cost.training_hours)}, {cost.samples_per_second:.3g} samples/s"),
            ("all", hours(cost.hours)),
            ("trained", f"{cost.trained / 1e6:,.0f} M weights, {cost.flops:.2e} operations"),
            ("memory", f"target {gigabytes(cost.target_bytes)}, trainer {gigabytes(cost.training_bytes)} a device"),
            ("fits", "yes" if cost.fits else f"no; the target takes {cost.devices_needed} of these devices"),
        ):
            console.print(f"  {name:10}{value}", soft_wrap=True)


def hours(value: float) -> str:
    """Hours, minutes below one, days above two."""
    if value >= 48:
        return f"{value / 24:,.1f} days"
    return f"{value:.1f} hours" if value >= 1 else f"{60 * value:.0f} minutes"
