"""`blockdraft radar`: what fits a device, and how fast it would be, before anything is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from blockdraft.cli.display import new_table, print_facts, standard, tell
from blockdraft.cli.options import MACHINE, CommandSpec
from blockdraft.cli.target import AsJson
from blockdraft.errors import UsageError
from blockdraft.settings import Flag, settings

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft_radar.devices import Machine
    from blockdraft_radar.project import Interval, Projection
    from blockdraft_radar.shape import Shape

WIDTH = 140  # characters of a table in a file or pipe
CONTEXT = 4096  # tokens, unless a context is given
DETAILED = 6  # rows up to which named models are shown in detail
Names = tuple[str, ...]


@settings
class RadarSettings:
    """What `blockdraft radar` projects, and for which devices."""

    device: Annotated[Names, Flag(metavar="NAME", repeat=True)] = Field(
        (),
        description='Device, such as "RTX 4090" or "8x H100 SXM"; repeat the option for more. By default this machine, '
        "which is also called here.",
    )
    model: Annotated[Names, Flag(metavar="NAME|DIR|FILE", repeat=True)] = Field(
        (),
        description="Model: a name of `blockdraft models` or of the hub, a folder, a config.json, or a GGUF file; "
        "repeat the option for more. By default the whole catalogue.",
    )
    weights: Annotated[Names, Flag(metavar="KIND", repeat=True)] = Field(
        (),
        description="Weights, such as bf16, fp8, int8, int4 or Q4_K_M; repeat the option for more. By default those of "
        "a GGUF file, or bf16, Q8_0 and Q4_K_M, of which the list shows the finest that fit.",
    )
    context: int | None = Field(
        None, description="Sequence length in tokens. By default 4096, or a named model's context if that is shorter."
    )
    batch: int = Field(1, description="Number of sequences decoded together.")
    task: Annotated[str, Flag(metavar="NAME")] = Field("mean", description="Task: math, code, chat, mean, or a set.")
    ram: Annotated[float | None, Flag(metavar="GB")] = Field(
        None, description="Memory of a CPU, or of a chip that shares it."
    )
    least_speed: float = Field(0.0, description="Show only models that decode at least X tokens per second.")
    devices: bool = Field(False, description="List the devices that have names.")
    train: bool = Field(False, description="Show what training a drafter would cost instead.")
    export: Annotated[Path | None, Flag(metavar="DIR")] = Field(
        None, description="Write the list as a page, which any web server can offer, to a folder."
    )


def radar(*, options: RadarSettings, as_json: AsJson = False) -> None:
    """Show which models fit a device, and how fast they are there, plain and drafted, without a download.

    Speeds are intervals, from the device's bandwidth and arithmetic and from published tau. Where drafting is slower,
    that is shown. `blockdraft serve` offers the same as a page at /radar.
    """
    console = standard(WIDTH)
    if options.devices:
        show_devices(console, as_json)
        return
    from blockdraft_radar.drafting import checked_task
    from blockdraft_radar.rows import fastest, with_commands
    from blockdraft_radar.shape import known_shapes, read_shape

    checked_task(options.task)
    shapes = [read_shape(name) for name in options.model] if options.model else list(known_shapes())
    machines = list(_machines(options.device or ("here",), options.ram))
    if options.train:
        if not options.model:
            raise UsageError("--train takes one --model or more; name the target that the drafter is for.")
        show_training(console, shapes, machines, options, as_json)
        return
    rows = [row for machine in machines for shape in shapes for row in _rows(shape, machine, options)]
    slow = [row for row in rows if fastest(row) < options.least_speed]
    rows = [row for row in rows if fastest(row) >= options.least_speed]
    if options.export is not None:
        from blockdraft_radar.page import export_page

        print(export_page(options.export, machines, rows))
    elif as_json:
        print(json.dumps({"rows": [with_commands(row) for row in rows]}))
    elif options.model and len(rows) + len(slow) <= DETAILED:
        for row in [*rows, *slow]:
            show_row(console, row)
            if row in slow:
                console.print(f"  {needed(row, options, shapes, machines)}", soft_wrap=True)
    else:
        show_rows(console, rows, options)


def _machines(names: Sequence[str], ram: float | None) -> Iterator[Machine]:
    from blockdraft_radar.devices import find, machine_of
    from blockdraft_radar.machine import HERE, here

    for name in names:
        if name.lower() == HERE:
            yield from here(tell, ram)
            continue
        several = re.fullmatch(r"(\d+)\s*[x×]\s+(.+)", name.strip())
        count, device = (int(several[1]), several[2]) if several else (1, name)
        yield machine_of(find(device), count, ram)


def _rows(shape: Shape, machine: Machine, options: RadarSettings) -> Iterator[Projection]:
    """Yield projections with each kind of weights. Unnamed models are left out if their context is too short."""
    from blockdraft_radar.rows import rows_of

    context = CONTEXT if options.context is None else options.context
    if shape.context and context > shape.context:
        if not options.model:
            return
        context = shape.context if options.context is None else context
    yield from rows_of(shape, machine, options.weights, context, options.batch, options.task)


def needed(row: Projection, options: RadarSettings, shapes: list[Shape], machines: list[Machine]) -> str:
    """Say what a speed would take that a row does not reach."""
    from blockdraft_radar.project import batch_for
    from blockdraft_radar.rows import fastest

    speed = options.least_speed
    shape = next(shape for shape in shapes if shape.name == row.model)
    machine = next(machine for machine in machines if machine.name == row.device)
    if not row.fits:
        return f"It does not fit, so {speed:,.0f} tokens/s are out of reach here."
    batch = batch_for(speed, shape, machine, weights=row.weights, context=row.context, task=options.task)
    reached = f"{row.batch} at once reach about {fastest(row):,.0f} tokens/s"
    if batch is None:
        return f"{reached}; {speed:,.0f} tokens/s need more memory or devices than this."
    return f"{reached}; {speed:,.0f} tokens/s are a batch of {batch}, about {speed / batch:,.0f} per sequence."


def show_rows(console: Console, rows: list[Projection], options: RadarSettings) -> None:
    """Print the list: models that fit, the largest first."""
    from blockdraft_radar.rows import finest, largest_first

    if not options.weights:
        rows = finest(rows)
    fitting = [row for row in largest_first(rows) if row.fits]
    several = len({row.device for row in rows}) != 1
    columns: dict[str, Callable[[Projection], str]] = {
        "device": lambda row: row.device,
        "model": lambda row: row.model,
        "weights": lambda row: row.weights,
        ">memory": lambda row: gigabytes(row.memory_bytes),
        ">first token": lambda row: seconds(row.first_token_seconds),
        ">plain": lambda row: interval(row.plain),
        ">drafted": lambda row: interval(row.drafted),
        ">block": lambda row: str(row.block_size) if row.drafted else "",
        "drafting": gain,
        "confidence": lambda row: row.confidence,
    }
    if not several:
        del columns["device"]
    table = new_table(console, *columns)
    for column in table.columns:
        column.no_wrap = column.header != "device"
    for row in fitting:
        table.add_row(*(cell(row) for cell in columns.values()))
    console.print(table)
    if rows:
        first = rows[0]
        name = "" if several else f"{first.device}, "
        note = f" ({first.why['note']})" if first.why["note"] and not several else ""
        console.print(f"{name}context {first.context}, batch {first.batch}, task {first.task}{note}.", soft_wrap=True)
    console.print("Tokens per second: likely value (interval). Largest models that fit first.", soft_wrap=True)
    if len(fitting) < len(rows):
        console.print(f"{len(rows) - len(fitting)} more do not fit.", soft_wrap=True)


def show_row(console: Console, row: Projection) -> None:
    """Print a projection with its reasons."""
    why = row.why
    from blockdraft_radar.rows import commands

    parts = {"weights": "weight", "drafter": "drafter", "caches": "cache", "workspace": "workspace"}
    sizes = ", ".join(f"{name} {gigabytes(why[f'{key}_bytes'])}" for name, key in parts.items())
    facts = [
        ("asked", f"context {row.context}, batch {row.batch}, task {row.task}"),
        ("memory", f"{gigabytes(row.memory_bytes)}: {sizes}"),
        ("first token", seconds(row.first_token_seconds)),
        (
            "plain",
            f"{interval(row.plain)} tokens/s; a step of {1e3 * why['step_seconds']:.3g} ms reads "
            f"{gigabytes(why['read_bytes'])} and is bound by {why['bound']}",
        ),
    ]
    if row.drafted:
        tau = why["tau"]
        facts += [
            (
                "drafted",
                f"{interval(row.drafted)} tokens/s with blocks of {row.block_size}; a step of "
                f"{1e3 * why['drafted_step_seconds']:.3g} ms is bound by {why['block_bound']}: {gain(row)}",
            ),
            ("tau", f"{tau['mid']:.2f} ({tau['low']:.2f} to {tau['high']:.2f}), {why['tau_source']}"),
            ("loses below", f"tau {why['least_tau']:.2f}, which is what a block costs in plain steps"),
            ("drafter", why["drafter"] or "none is published; `blockdraft fit` makes one"),
        ]
    if why["experts_read"]:
        token, block = why["experts_read"]
        facts.append(
            ("experts", f"a layer reads {token:g} for a token, {block:g} for a block if tokens choose at random")
        )
    facts += [("confidence", row.confidence), ("machine", why["note"])]
    facts += [("" if number else "run", command) for number, command in enumerate(commands(row))]
    fits = "fits" if row.fits else "does not fit"
    console.print(f"{row.model}, {row.weights}, on {row.device}: {fits}", soft_wrap=True)
    print_facts(console, facts, 14, "  ")


def gain(row: Projection) -> str:
    """Return what drafting gains, in words; "" if the row has no drafted speed."""
    if not row.drafted:
        return ""
    speedup = row.why["speedup"]
    return {"loses": f"loses here ({speedup:.2f}x)", "neither": "as fast"}.get(row.why["drafting"], f"{speedup:.1f}x")


def interval(speed: Interval | None) -> str:
    """Return an interval as `mid (low to high)`."""
    if speed is None:
        return ""
    return f"{_number(speed.mid)} ({_number(speed.low)} to {_number(speed.high)})"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def show_devices(console: Console, as_json: bool) -> None:
    from blockdraft_radar.devices import devices

    if as_json:
        print(json.dumps([device.model_dump(by_alias=True, exclude_none=True) for device in devices()]))
        return
    table = new_table(console, "device", "class", ">year", ">memory", ">GB/s", ">TFLOPS bf16")
    for column in table.columns:
        column.no_wrap = True
    for device in devices():
        memory = f"{device.memory_gb:g} GB" if device.memory_gb else ""
        rate = device.bf16 or device.fp32 or 0.0
        table.add_row(device.name, device.kind, str(device.year), memory, f"{device.bandwidth_gbs:g}", f"{rate:.4g}")
    console.print(table)


def show_training(
    console: Console, shapes: list[Shape], machines: list[Machine], options: RadarSettings, as_json: bool
) -> None:
    """Print what it costs to train a drafter for each model."""
    from blockdraft_radar.train import TrainPlan, train_cost

    plan, [kind] = TrainPlan(), options.weights or ("bf16",)
    costs = [train_cost(shape, machine, plan, kind) for machine in machines for shape in shapes]
    if as_json:
        print(json.dumps({"rows": [cost.as_dict() for cost in costs]}))
        return
    for cost in costs:
        target, trainer = gigabytes(cost.target_bytes), gigabytes(cost.training_bytes)
        facts = [
            ("samples", f"{plan.samples:,} of {plan.tokens:,} tokens, {plan.epochs} epochs"),
            ("responses", f"{hours(cost.response_hours)} of the target"),
            ("hidden states", f"{hours(cost.hidden_state_hours)}, {gigabytes(cost.hidden_state_bytes)} if stored"),
            ("training", f"{hours(cost.training_hours)}, {cost.samples_per_second:.3g} samples/s"),
            ("all", hours(cost.hours)),
            ("trained", f"{cost.trained / 1e6:,.0f} M weights, {cost.flops:.2e} operations"),
            ("memory", f"target {target}, trainer {trainer} per device"),
            ("fits", "yes" if cost.fits else f"no; the target takes {cost.devices_needed} of these devices"),
        ]
        console.print(f"A DFlash drafter for {cost.model}, on {cost.device}", soft_wrap=True)
        print_facts(console, facts, 14, "  ")


def hours(value: float) -> str:
    """Return hours, or minutes below one, or days from two on."""
    if value >= 48:
        return f"{value / 24:,.1f} days"
    return f"{value:.1f} hours" if value >= 1 else f"{60 * value:.0f} minutes"


RADAR = CommandSpec(radar, MACHINE, common="device model weights context batch task ram as_json")
