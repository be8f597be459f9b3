"""Tables and a picture of all figures."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.harness.report import number, picture, spread, table
from benchmarks.rivals.figures import BOTH, CHAINS, TREES, Best, Figures
from benchmarks.rivals.kinds import KINDS
from benchmarks.rivals.records import NATIVE, PLAIN
from blockdraft.errors import counted

QUICK = "QUICK RUN: tiny budgets, one seed. It shows that all works; its figures say nothing about the drafters."
EXPECTED = "DFlash and DSpark before EAGLE-3 before Medusa"
MARKS = {CHAINS: "o", TREES: "^"}
LINES = (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6)  # of equal speed-up

_range = partial(spread, middle=mean)


def page(found: Figures, budget: int, about: str, quick: bool) -> str:
    """All figures as Markdown.

    Args:
        budget: Weights that each drafter should have.
        about: What was measured, in a sentence.
    """
    parts = [*([f"**{QUICK}**"] if quick else []), about, "## Drafters\n\n" + _drafters(found, budget)]
    for temperature in found.temperatures:
        parts.append(f"## tau at temperature {temperature:g}\n\n" + _taus(found, temperature))
    parts.append("## Draft time and R\n\n" + _costs(found))
    for temperature in found.temperatures:
        parts.append(f"## Speed-up at temperature {temperature:g}\n\n" + _speedups(found, temperature))
    if found.speeds:
        parts.append("## Real answers\n\n" + _speeds(found))
    parts.append("## DFlash over EAGLE-3\n\n" + _headline(found))
    parts.append("## The order\n\n" + _order(found))
    return "\n\n".join(parts) + "\n"


def _title(kind: str) -> str:
    return PLAIN if kind == PLAIN else KINDS[kind].title


def _uncompiled(found: Figures, kinds: Iterable[str]) -> str:
    if all(found.is_compiled(kind) for kind in kinds):
        return ""
    return " With a * the drafter is not compiled, and runs by torch's operations beside a compiled target."


def _drafters(found: Figures, budget: int) -> str:
    lines = []
    for kind in found.kinds:
        trained = [each for each in found.trained if each.kind == kind]
        cycles = [each for each in found.cycles if (each.kind, each.width, each.running) == (kind, 1, NATIVE)]
        cells, memory, how = [""] * 6, ["", ""], ""
        if trained:
            share = trained[0].parameters / budget
            cells = [
                f"{trained[0].parameters / 1e6:.2f} M",
                f"{share:.0%}" + ("" if 0.85 <= share <= 1.15 else " (its shape allows none nearer)"),
                f"{len(trained)}",
                f"{mean(each.tokens for each in trained) / 1e6:.2f} M",
                _range([each.seconds / 60 for each in trained], 1),
                f"{max(each.peak_bytes for each in trained) / 2**30:.2f}",
            ]
        if cycles:
            memory = [f"{cycles[0].weight_bytes / 1e6:.1f}", f"{cycles[0].state_bytes}"]
            how = "compiled" if found.is_compiled(kind) else "torch's operations"
        lines.append([_title(kind), *cells, *memory, how])
    header = ["drafter", "weights", "of the budget", "seeds", "tokens", "training, minutes", "its memory, GiB"]
    text = (
        f"Weights of their own; the budget is {budget / 1e6:.2f} M, and the target has "
        f"{found.target_weights / 1e6:.2f} M. Training is that of a seed, the mean (and range) of the seeds, the "
        "target's part in it included; its memory is that of the process. What the drafter takes when it decodes are "
        "its weights and, for each token of the text, its state.\n\n"
    )
    return text + table([*header, "weights, MB", "state, bytes a token", "runs"], lines)


def _taus(found: Figures, temperature: float) -> str:
    lines = []
    for kind in found.kinds:
        both = [found.ways(kind, trees) for trees in (False, True)]
        longest = [ways[-1] for ways in both if ways]
        taus = [
            _range(found.tau(kind, temperature, ways[-1], name).values()) if ways else ""
            for name in found.sets
            for ways in both
        ]
        shares = found.shares(kind, temperature, both[0][-1]) if both[0] else []
        lines.append([_title(kind), ", ".join(longest), *taus, *(f"{share:.2f}" for share in shares)])
    header = ["drafter", "ways", *(f"{name}: {shape}" for name in found.sets for shape in ("chain", "tree"))]
    width = max(map(len, lines), default=len(header))
    header += [f"S_{i + 1}" for i in range(width - len(header))]
    plain = [each for each in found.answers if each.temperature == temperature and each.kind == PLAIN]
    left_out = sorted({(each.set, each.looping) for each in plain if each.looping})
    text = "Mean of the seeds (and range), the longest chain and the largest tree; S_i of the chain, all sets."
    if left_out:
        text += f" Left out, since the plain answer loops: {', '.join(f'{n} of {name}' for name, n in left_out)}."
    return text + "\n\n" + table(header, [line + [""] * (width - len(line)) for line in lines])


def _costs(found: Figures) -> str:
    batches = sorted({each.batch for each in found.cycles if each.running == NATIVE})
    lines = []
    for width in found.widths:
        place = found.here_by_weights(width)
        for kind in found.kinds:
            for way in (ways[-1] for trees in (False, True) if (ways := found.ways(kind, trees))):
                draft = found.draft_seconds(kind, width, NATIVE, 1, way)
                if draft is None:
                    continue
                ratios = [number(found.ratio(kind, width, NATIVE, batch, way)) for batch in batches]
                answers = found.of(kind, found.temperatures[0], way)
                costs = [each.ratio for one in answers if (each := place.costs(one)) is not None]
                mark = "" if found.is_compiled(kind) else "*"
                model = f"{mean(costs):.2f}" if costs else ""
                lines.append([f"{width}", _title(kind) + mark, way, f"{1000 * draft:.2f}", *ratios, model])
    text = (
        "Behind arbitrary text; R is the time of a cycle over that of a plain one with as many rows. The last column "
        "says what R of one row would be if draft passes took the time of the target's, weight for weight. Width is "
        "how many times as wide both were made; of wider drafters only the shape is measured."
        + _uncompiled(found, (each.kind for each in found.cycles))
        + "\n\n"
    )
    header = ["width", "drafter", "way", "draft, ms", *(f"R, {counted(batch, 'row')}" for batch in batches)]
    return text + table([*header, "R, 1 row, by weights"], lines)


def _best(best: Best | None) -> str:
    return "" if best is None else f"{_range(best.speedups.values())}, {best.way}"


def _speedups(found: Figures, temperature: float) -> str:
    places = {f"16 tokens cost {found.cost_of_16:g}": found.regime}
    for width in found.widths:
        places[f"this CPU, width {width}"] = found.here(width)
        places[f"this CPU, width {width}, by weights"] = found.here_by_weights(width)
    lines = []
    for kind in found.kinds:
        mark = "*" if KINDS[kind].trained and not found.is_compiled(kind) else ""
        cells = (_best(found.best(kind, temperature, place)) for place in places.values())
        lines.append([_title(kind) + mark, *cells])
    text = (
        "tau / R of the fastest way of each drafter, the mean of seeds and sets (and the range of the seeds). On this "
        "CPU R is measured, or reckoned by weights; prompt lookup is judged so alone, as what it finds hangs on the "
        "text, and its own time on the host is left out (Real answers have it). A wider pair says the same words, so "
        "tau is that of width 1." + _uncompiled(found, (each.kind for each in found.cycles)) + "\n\n"
    )
    return text + table(["drafter", *places], lines)


def _speeds(found: Figures) -> str:
    sets = list(dict.fromkeys(each.set for each in found.speeds))
    known = {(each.kind, each.way, each.set): each for each in found.speeds}
    lines = []
    for kind, way in dict.fromkeys((each.kind, each.way) for each in found.speeds):
        own = [known.get((kind, way, name)) for name in sets]
        cells = (
            one and f"{one.speedup:.2f} ({one.lowest:.2f} to {one.highest:.2f}), tau {one.tau:.2f}" or "" for one in own
        )
        lines.append([_title(kind), way, *cells])
    text = (
        "The target as it is, greedy answers one after the other, seed 0, the fastest chain and tree of each drafter: "
        "tokens a second over those of plain decoding, the median of the repeats and their range.\n\n"
    )
    return text + table(["drafter", "way", *sets], lines)


def _headline(found: Figures) -> str:
    lines = []
    for i, place in enumerate(found.places):
        for temperature in found.temperatures:
            for shape in (CHAINS, TREES, BOTH):
                both = found.headline(temperature, place, shape)
                if both is not None:
                    ours, theirs, ratios = both
                    told = f"**{_range(ratios)}**" if i == 0 and shape == BOTH else _range(ratios)
                    lines.append([place.name, f"{temperature:g}", shape, _best(ours), _best(theirs), told])
    text = (
        "Speed-ups over plain decoding, each at its fastest among chains, among trees, and among both; the ratio is "
        "taken seed by seed. Where the cost of a forward is given, its time over n tokens lies on a line through 1 "
        "token and 16, and the host takes no time. By weights, a draft pass over n tokens takes the time of the "
        "target's forward over n, times its share of the target's weights.\n\n"
    )
    return text + table(["where", "temperature", "ways", "DFlash", "EAGLE-3", "DFlash / EAGLE-3"], lines)


def _order(found: Figures) -> str:
    lines = [f"The literature leads to expect at an equal budget: {EXPECTED}.", ""]
    for place in found.places:
        for temperature in found.temperatures:
            order = found.order(temperature, place)
            told = ", ".join(f"{_title(kind)} {best.speedup:.2f}" for kind, best in order)
            lines += [f"- {place.name}, temperature {temperature:g}: {told}."] if told else []
    return "\n".join(lines)


def draw(found: Figures, path: Path, quick: bool) -> None:
    """tau against what drafting costs, a point for each drafter's fastest chain and tree, and lines of equal
    speed-up: in the regime that is simulated, and on this CPU at the largest width."""
    from matplotlib.lines import Line2D

    temperature = found.temperatures[0]
    places = [found.regime] + ([found.here(max(found.widths))] if found.widths else [])
    colours = {kind: f"C{i}" for i, kind in enumerate(KINDS)}
    small = {"textcoords": "offset points", "fontsize": 8}
    with picture(path, 1, len(places), figsize=(7 * len(places), 6)) as (figure, panels):
        for axes, place in zip(panels[0], places, strict=True):
            points = []
            for kind in found.kinds:
                for shape, marker in MARKS.items():
                    best = found.best(kind, temperature, place, shape)
                    if best is not None:
                        taus, x = found.tau(kind, temperature, best.way).values(), best.ratio - 1
                        points.append((x, best.tau))
                        ends = [[best.tau - min(taus)], [max(taus) - best.tau]]
                        axes.errorbar(x, best.tau, ends, fmt=marker, color=colours[kind], markersize=8, capsize=3)
                        axes.annotate(best.way.partition(":")[2], (x, best.tau), (6, 4), **small)
            right = 1.15 * max((x for x, _ in points), default=1.0) + 0.05
            top = max(1.1 * max((tau for _, tau in points), default=0.0), 2.0)
            for speedup in (each for each in LINES if each < top):
                end = min(right, top / speedup - 1)
                high = speedup * (1 + end)
                axes.plot([0, end], [speedup, high], color="grey", linewidth=0.8, zorder=0)
                axes.annotate(f"{speedup:g}x", (end, high), (-2, -2), ha="right", va="top", color="grey", **small)
            axes.set(xlim=(0, right), ylim=(0.9, top), title=place.name)
            axes.set_xlabel("what drafting adds to a cycle, in plain cycles (R - 1)")
            axes.set_ylabel(f"tau, mean of the prompt sets, temperature {temperature:g}")
        form = {"marker": "s", "linestyle": ""}
        legend = [Line2D([], [], color=colours[kind], label=_title(kind), **form) for kind in found.kinds]
        for shape, marker in MARKS.items():
            form = {"marker": marker, "linestyle": "", "color": "black"}
            legend.append(Line2D([], [], label=f"{shape}; the number: guesses", **form))
        legend.append(Line2D([], [], color="grey", label="equal speed-up"))
        figure.legend(handles=legend, loc="outside right upper", frameon=False)
        if quick:
            figure.suptitle(QUICK, color="red")
