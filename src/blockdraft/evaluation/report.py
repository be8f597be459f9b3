"""The results of a benchmark as JSON, as tables and as pictures."""

from __future__ import annotations

import io
import json
import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from blockdraft.errors import UsageError, counted
from blockdraft.evaluation.methods import PLAIN
from blockdraft.evaluation.profile import Profile
from blockdraft.evaluation.speed import Figures, Trial, figures
from blockdraft.timing import PARTS

RESULTS = "results.json"
SHOWN_POSITIONS = 4  # of S_i in the tables; the JSON has all
LABEL_WIDTH = 32  # characters of a method's name in the pictures

NOTES = (
    "tokens/s: tokens after each answer's first, over wall time without prefill; median of {repeats} (slowest "
    "to fastest). speed-up: over none in the same repeat, median. tau: tokens per cycle. R: time of a cycle over that "
    "of none, likewise. S_i: share of cycles in which the first i guesses were accepted. same: answers identical to "
    "those of none, of the same seed when sampling. loops: answers in which a run of 8 tokens occurs 4 times or more. "
    "Prompts whose plain answer loops count in same and loops only."
)
DRAWN_NOTES = (
    "same is ? where guesses are drawn at random and decoding is not greedy: such answers have the target's law, and "
    "which tokens a seed gives depends on the drafter."
)
PROFILE_NOTES = (
    "One more round, means. draft pass, head, context: the drafter's layers, its output projection, and the keys and "
    "values of what was committed; where pass and head are one call, it counts as the pass. guesses: choosing them and "
    "building the tree. observe: the drafter's bookkeeping of what was committed. bookkeeping: planning, answers, "
    "statistics. host: all but target forward, draft pass, head and context."
)


@dataclass(frozen=True)
class SetFigures:
    methods: dict[str, Figures]


@dataclass(frozen=True)
class Results:
    """What results.json holds.

    Attributes:
        methods: Figures by method, over all sets.
        sets: The same for each prompt set.
        arguments: What was asked for.
        versions: Of blockdraft, torch, transformers and python.
        hardware: See `hardware`.
        profiles: Where the time of each method's cycles goes, where that was asked for.
    """

    methods: dict[str, Figures]
    sets: dict[str, SetFigures]
    arguments: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    profiles: dict[str, Profile] | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def results(
    trials: Sequence[Trial],
    arguments: Mapping[str, Any],
    device: torch.device,
    profiles: dict[str, Profile] | None = None,
    drawn: Collection[str] = (),
) -> Results:
    """Everything about one benchmark.

    Args:
        arguments: What was asked for; they say with `temperature` whether it was greedy.
        drawn: Methods whose guesses are drawn at random, where decoding is not greedy.
    """
    incomparable = () if arguments["temperature"] == 0 else drawn
    sets = list(dict.fromkeys(t.prompt_set for t in trials))
    return Results(
        methods=figures(trials, incomparable),
        sets={name: SetFigures(figures([t for t in trials if t.prompt_set == name], incomparable)) for name in sets},
        arguments=dict(arguments),
        versions={
            "blockdraft": version("blockdraft"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        hardware=hardware(device),
        profiles=profiles,
    )


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine: processor, its cores and logical cores, threads that torch uses, memory in bytes, and the GPU's
    name where the device is one."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show(console: Console, found: Results) -> None:
    """Print a table for each prompt set, one for all together where there are several, and what the columns mean."""
    tables = {name: one.methods for name, one in found.sets.items()}
    if len(tables) > 1:
        tables["all sets"] = found.methods
    of = found.arguments
    console.print(f"Target: backend {of['running']}, {of['dtype']}, on {of['device']}\n")
    for name, methods in tables.items():
        console.print(_table(name, methods, box.SIMPLE if console.is_terminal else None))
        console.print()
    console.print(NOTES.format(repeats=counted(found.arguments["repeats"], "repeat")))
    if any(one.identical is None for one in found.methods.values()):
        console.print(DRAWN_NOTES)
    if found.profiles:
        console.print()
        console.print(_profile_table(found.profiles, box.SIMPLE if console.is_terminal else None))
        console.print()
        console.print(PROFILE_NOTES)


def _table(name: str, methods: Mapping[str, Figures], lines: box.Box | None) -> Table:
    plain = methods[PLAIN]
    table = Table(box=lines, pad_edge=False, title_justify="left")
    table.title = f"{name}: {counted(plain.prompts, 'prompt')}, {plain.timed_prompts} timed"
    table.add_column("method", overflow="fold")
    for header in ("tokens/s", "range", "speed-up", "tau", "R", f"S_1..S_{SHOWN_POSITIONS} %", "same %", "loops %"):
        table.add_column(header, justify="right", no_wrap=True)
    for method, one in methods.items():
        slowest, fastest = one.tokens_per_second_range or (None, None)
        table.add_row(
            method,
            _number(one.tokens_per_second, 1),
            f"{_number(slowest, 1)}-{_number(fastest, 1)}",
            _number(one.speedup, 2),
            _number(one.tau, 2),
            _number(one.cycle_cost, 2),
            " ".join(f"{100 * share:.0f}" for share in one.acceptance_by_position[:SHOWN_POSITIONS]),
            _percent(one.identical),
            _percent(one.looping),
        )
    return table


def _profile_table(profiles: Mapping[str, Profile], lines: box.Box | None) -> Table:
    table = Table(box=lines, pad_edge=False, title_justify="left", title="Where the time of a cycle goes: ms (%)")
    table.add_column("part", no_wrap=True)
    for method in profiles:
        table.add_column(method, justify="right", overflow="fold")
    for part in PARTS:
        spent = [(one.seconds[part], one.total) for one in profiles.values()]
        table.add_row(part, *(f"{1000 * seconds:.3f} ({100 * seconds / total:4.1f})" for seconds, total in spent))
    table.add_row("cycle", *(f"{1000 * one.total:.3f} (100.0)" for one in profiles.values()))
    table.add_row("host", *(f"{1000 * one.host * one.total:.3f} ({100 * one.host:4.1f})" for one in profiles.values()))
    return table


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    # Rounded down, so that 100 means all.
    return "?" if share is None else f"{int(1000 * share) / 10:g}"


def require_pictures() -> None:
    """Raise a ValueError unless pictures can be drawn."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(
            f"Pictures take matplotlib, which does not load ({error}); run pip install 'blockdraft[bench]', or leave "
            "them out with --no-pictures."
        ) from error


def _acceptance(found: Results) -> bytes:
    """S_i of each method over all sets, as PNG."""
    figure, axes = _axes(width=5.5, methods=found.methods)
    longest = 1
    for method, one in found.methods.items():
        shares = one.acceptance_by_position
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=_label(method))
            longest = max(longest, len(shares))
    axes.set(
        title="Accepted guesses by position",
        xlabel="Position i in the block",
        ylabel="S_i: share of cycles that accept guesses 1 to i",
        xlim=(0.5, longest + 0.5),
        ylim=(0.0, 1.02),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _png(figure, axes)


def _speedups(found: Results) -> bytes:
    """Speed-ups of each method for each set and for all of them, as PNG."""
    groups = {
        f"{name}\n({counted(one.methods[PLAIN].timed_prompts, 'prompt')})": one.methods
        for name, one in found.sets.items()
    }
    if len(groups) > 1:
        groups[f"all sets\n({counted(found.methods[PLAIN].timed_prompts, 'prompt')})"] = found.methods
    methods = [method for method in found.methods if method != PLAIN]
    width = 0.8 / max(len(methods), 1)
    room = max(1.3, 0.55 * len(methods), *(0.1 * len(name) for name in found.sets))
    figure, axes = _axes(width=max(3.5, 1 + len(groups) * room), methods=found.methods)
    for i, method in enumerate(methods):
        places = [g - 0.4 + (i + 0.5) * width for g in range(len(groups))]
        drawn = [(place, group[method]) for place, group in zip(places, groups.values(), strict=True)]
        drawn = [(place, one) for place, one in drawn if one.speedup is not None]
        if not drawn:
            continue
        heights = [one.speedup or 0.0 for _, one in drawn]
        lows = [height - min(one.speedup_by_repeat) for height, (_, one) in zip(heights, drawn, strict=True)]
        highs = [max(one.speedup_by_repeat) - height for height, (_, one) in zip(heights, drawn, strict=True)]
        axes.bar(
            [place for place, _ in drawn],
            heights,
            0.92 * width,
            yerr=[lows, highs],
            capsize=2,
            error_kw={"linewidth": 0.8},
            label=_label(method),
        )
        for (place, _), height, high in zip(drawn, heights, highs, strict=True):
            axes.annotate(
                f"{height:.2f}", (place, height + high), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axes.set(title="Speed-up over plain decoding", ylabel="Ratio of tokens/s (thin lines: range of the repeats)")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    return _png(figure, axes)


def _profiles(found: Results) -> bytes | None:
    """A bar for each method's cycle, its parts on top of each other, as PNG; None where no one looked."""
    if not found.profiles:
        return None
    figure, axes = _axes(width=2 + 0.9 * len(found.profiles), methods=dict.fromkeys(PARTS))
    colours = import_module("matplotlib").colormaps["tab10"].colors
    names = [_label(method) for method in found.profiles]
    below = [0.0] * len(names)
    for part, colour in zip(PARTS, colours, strict=False):
        heights = [1000 * one.seconds[part] for one in found.profiles.values()]
        axes.bar(names, heights, 0.7, bottom=below, label=part, color=colour)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for name, top, one in zip(names, below, found.profiles.values(), strict=True):
        note = f"host {100 * one.host:.1f}%"
        axes.annotate(note, (name, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="Where the time of a cycle goes", ylabel="ms a cycle")
    axes.tick_params(axis="x", labelrotation=20)
    axes.margins(y=0.1)
    return _png(figure, axes)


PICTURES: dict[str, Callable[[Results], bytes | None]] = {
    "acceptance.png": _acceptance,
    "speedup.png": _speedups,
    "profile.png": _profiles,
}


def _axes(width: float, methods: Mapping[str, object]) -> tuple[Any, Any]:
    """A plot of this width in inches, with room for a legend of these methods beside it."""
    # Without pyplot, hence without windows or a global state; saving as PNG takes the Agg backend by itself.
    legend = 0.6 + 0.09 * max(len(_label(method)) for method in (*methods, "plain decoding"))
    size = (width + legend, 4.5)
    figure = import_module("matplotlib.figure").Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _label(method: str) -> str:
    return method if len(method) <= LABEL_WIDTH else f"...{method[3 - LABEL_WIDTH :]}"


def _png(figure: Any, axes: Any) -> bytes:
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside right upper", frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse, before anything is measured, a folder that results could not or must not be written to.

    Raises:
        ValueError: It holds results already and `overwrite` is False, it is no folder, or it is not writable.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(f"{folder} cannot be written to, since {existing} is no writable folder; choose another one.")
    if (folder / RESULTS).exists() and not overwrite:
        raise UsageError(f"{folder / RESULTS} exists; choose another folder, or add --overwrite.")


def write(folder: Path, found: Results, with_pictures: bool) -> None:
    """Write results.json, and the pictures if wanted, into a folder, which is made if need be.

    Each file is complete or absent, whatever happens. Pictures of earlier results go.

    Raises:
        ValueError: The disk is full, or the like.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in PICTURES:
            (folder / name).unlink(missing_ok=True)
        _write(folder / RESULTS, found.as_json().encode())
        if with_pictures:
            for name, draw in PICTURES.items():
                picture = draw(found)
                if picture is not None:
                    _write(folder / name, picture)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}).") from error


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
