"""Tables and a picture of all figures."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks.harness.report import spread, table
from benchmarks.rivals.figures import BOTH, CHAINS, TREES, Best, Figures
from benchmarks.rivals.kinds import KINDS
from benchmarks.rivals.rows import NATIVE, PLAIN
from blockdraft.errors import counted

QUICK = "QUICK RUN: tiny budgets, one seed. It shows that all works; its figures say nothing about the drafters."
EXPECTED = "DFlash and DSpark before EAGLE-3 before Medusa"


def page(found: Figures, budget: int, about: str, quick: bool) -> str:
    """What was found, as Markdown.

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
    return KINDS[kind].title


def _drafters(found: Figures, budget: int) -> str:
    rows = []
    for kind in found.kinds:
        trained = [row for row in found.trained if row.kind == kind]
        cycles = [row for row in found.cycles if (row.kind, row.width, row.running) == (kind, 1, NATIVE)]
        cells = [""] * 6
        if trained:
            one = trained[0]
            share = one.parameters / budget
            cells = [
                f"{one.parameters / 1e6:.2f} M",
                f"{share:.0%}" + ("" if 0.85 <= share <= 1.15 else " (its shape allows none nearer)"),
                f"{len(trained)}",
                f"{mean(row.tokens for row in trained) / 1e6:.2f} M",
                spread([row.seconds / 60 for row in trained], 1, middle=mean),
                f"{max(row.peak_bytes for row in trained) / 2**30:.2f}",
            ]
        memory = ["", ""]
        if cycles:
            memory = [f"{cycles[0].weight_bytes / 1e6:.1f}", f"{cycles[0].state_bytes}"]
        how = "" if not cycles else "compiled" if found.is_compiled(kind) else "torch's operations"
        rows.append([_title(kind), *cells, *memory, how])
    header = ["drafter", "weights", "of the budget", "seeds", "tokens", "training, minutes", "its memory, GiB"]
    text = (
        f"Weights of their own; the budget is {budget / 1e6:.2f} M, and the target has "
        f"{found.target_weights / 1e6:.2f} M. Training is that of a seed, the mean (and range) of the seeds, the "
        "target's part in it included; its memory is that of the process. What the drafter takes when it decodes are "
        "its weights and, for each token of the text, its state.\n\n"
    )
    return text + table([*header, "weights, MB", "state, bytes a token", "runs"], rows)


def _taus(found: Figures, temperature: float) -> str:
    rows, most = [], 0
    for kind in found.kinds:
        chains, trees = found.ways(kind, False), found.ways(kind, True)
        cells = []
        for name in found.sets:
            for ways in (chains, trees):
                taus = found.tau(kind, temperature, ways[-1], name).values() if ways else ()
                cells.append(spread(taus, middle=mean))
        shares = found.shares(kind, temperature, chains[-1]) if chains else []
        most = max(most, len(shares))
        label = ", ".join(ways[-1] for ways in (chains, trees) if ways)
        rows.append([_title(kind), label, *cells, *(f"{share:.2f}" for share in shares)])
    header = ["drafter", "ways"]
    header += [f"{name}: {shape}" for name in found.sets for shape in ("chain", "tree")]
    header += [f"S_{i + 1}" for i in range(most)]
    rows = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    left_out = {(row.set, row.looping) for row in found.answers if row.temperature == temperature and row.kind == PLAIN}
    text = "Mean of the seeds (and range), the longest chain and the largest tree; S_i of the chain, all sets."
    told = ", ".join(f"{count} of {name}" for name, count in sorted(left_out) if count)
    return f"{text}{f' Left out, since the plain answer loops: {told}.' if told else ''}\n\n" + table(header, rows)


def _costs(found: Figures) -> str:
    batches = sorted({row.batch for row in found.cycles if row.running == NATIVE})
    rows = []
    for width in found.widths:
        for kind in found.kinds:
            for ways in (found.ways(kind, False), found.ways(kind, True)):
                if not ways:
                    continue
                way = ways[-1]
                draft = found.draft_seconds(kind, width, NATIVE, 1, way)
                if draft is None:
                    continue
                ratios = [found.ratio(kind, width, NATIVE, batch, way) for batch in batches]
                shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
                place = found.here_by_weights(width)
                answers = found.of(kind, found.temperatures[0], way)
                costs = [each.ratio for row in answers if (each := place.costs(row)) is not None]
                model = f"{mean(costs):.2f}" if costs else ""
                mark = "" if found.is_compiled(kind) else "*"
                rows.append([f"{width}", _title(kind) + mark, way, f"{1000 * draft:.2f}", *shown, model])
    text = (
        "Behind arbitrary text; R is the time of a cycle over that of a plain one with as many rows. The last column "
        "says what R of one row would be if draft passes took the time of the target's, weight for weight. Width is "
        "how many times as wide both were made; of wider drafters only the shape is measured."
        + _uncompiled(found)
        + "\n\n"
    )
    header = ["width", "drafter", "way", "draft, ms", *(f"R, {counted(batch, 'row')}" for batch in batches)]
    return text + table([*header, "R, 1 row, by weights"], rows)


def _uncompiled(found: Figures) -> str:
    if all(found.is_compiled(row.kind) for row in found.cycles):
        return ""
    return " With a * the drafter is not compiled, and runs by torch's operations beside a compiled target."


def _best(best: Best | None) -> str:
    return "" if best is None else f"{spread(best.speedups.values(), middle=mean)}, {best.way}"


def _speedups(found: Figures, temperature: float) -> str:
    header = ["drafter", "16 tokens cost " + f"{found.cost_of_16:g}"]
    for width in found.widths:
        header += [f"this CPU, width {width}", f"this CPU, width {width}, by weights"]
    rows = []
    for kind in found.kinds:
        mark = "*" if KINDS[kind].trained and not found.is_compiled(kind) else ""
        cells = [_best(found.best(kind, temperature, found.regime))]
        for width in found.widths:
            cells.append(_best(found.best(kind, temperature, found.here(width))))
            cells.append(_best(found.best(kind, temperature, found.here_by_weights(width))))
        rows.append([_title(kind) + mark, *cells])
    text = (
        "tau / R of the fastest way of each drafter, the mean of seeds and sets (and the range of the seeds). On this "
        "CPU R is measured, or reckoned by weights; prompt lookup is judged so alone, as what it finds hangs on the "
        "text, and its own time on the host is left out (Real answers have it). A wider pair says the same words, so "
        "tau is that of width 1." + _uncompiled(found) + "\n\n"
    )
    return text + table(header, rows)


def _speeds(found: Figures) -> str:
    sets = list(dict.fromkeys(row.set for row in found.speeds))
    rows = []
    for kind, way in dict.fromkeys((row.kind, row.way) for row in found.speeds):
        cells = []
        for name in sets:
            own = [row for row in found.speeds if (row.kind, row.way, row.set) == (kind, way, name)]
            cells += [f"{one.speedup:.2f} ({one.lowest:.2f} to {one.highest:.2f}), tau {one.tau:.2f}" for one in own]
            cells += [""] * (not own)
        rows.append([PLAIN if kind == PLAIN else _title(kind), way, *cells])
    text = (
        "The target as it is, greedy answers one after the other, seed 0, the fastest chain and tree of each drafter: "
        "tokens a second over those of plain decoding, the median of the repeats and their range.\n\n"
    )
    return text + table(["drafter", "way", *sets], rows)


def _headline(found: Figures) -> str:
    rows = []
    for place in found.places:
        for temperature in found.temperatures:
            for shape in (CHAINS, TREES, BOTH):
                both = found.headline(temperature, place, shape)
                if both is not None:
                    ours, theirs, ratios = both
                    told = spread(ratios, middle=mean)
                    shown = f"**{told}**" if place is found.regime and shape == BOTH else told
                    rows.append([place.name, f"{temperature:g}", shape, _best(ours), _best(theirs), shown])
    text = (
        "Speed-ups over plain decoding, each at its fastest among chains, among trees, and among both; the ratio is "
        "taken seed by seed. Where the cost of a forward is given, its time over n tokens lies on a line through 1 "
        "token and 16, and the host takes no time. By weights, a draft pass over n tokens takes the time of the "
        "target's forward over n, times its share of the target's weights.\n\n"
    )
    return text + table(["where", "temperature", "ways", "DFlash", "EAGLE-3", "DFlash / EAGLE-3"], rows)


def _order(found: Figures) -> str:
    lines = [f"The literature leads to expect at an equal budget: {EXPECTED}.", ""]
    for place in found.places:
        for temperature in found.temperatures:
            order = found.order(temperature, place)
            told = ", ".join(f"{_title(kind)} {best.speedup:.2f}" for kind, best in order)
            if told:
                lines.append(f"- {place.name}, temperature {temperature:g}: {told}.")
    return "\n".join(lines)


def draw(found: Figures, path: Path, quick: bool) -> None:
    """tau against what drafting costs, a point for each drafter's fastest chain and tree, and lines of equal
    speed-up: in the regime that is simulated, and on this CPU at the largest width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    temperature = found.temperatures[0]
    places = [found.regime] + ([found.here(max(found.widths))] if found.widths else [])
    figure, panels = plt.subplots(1, len(places), figsize=(7 * len(places), 6), layout="constrained", squeeze=False)
    colours = {kind: f"C{i}" for i, kind in enumerate(KINDS)}
    shapes = {CHAINS: "o", TREES: "^"}
    for axes, place in zip(panels[0], places, strict=True):
        points = []
        for kind in found.kinds:
            for shape, marker in shapes.items():
                best = found.best(kind, temperature, place, shape)
                if best is None:
                    continue
                taus = list(found.tau(kind, temperature, best.way).values())
                x = best.ratio - 1
                points.append((x, best.tau))
                spread = [[best.tau - min(taus)], [max(taus) - best.tau]]
                axes.errorbar(x, best.tau, spread, fmt=marker, color=colours[kind], markersize=8, capsize=3)
                axes.annotate(best.way.partition(":")[2], (x, best.tau), (6, 4), textcoords="offset points", fontsize=8)
        right = 1.15 * max((x for x, _ in points), default=1.0) + 0.05
        top = max(1.1 * max((tau for _, tau in points), default=0.0), 2.0)
        for speedup in (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6):
            if speedup < top:
                end = min(right, top / speedup - 1)
                axes.plot([0, end], [speedup, speedup * (1 + end)], color="grey", linewidth=0.8, zorder=0)
                axes.annotate(
                    f"{speedup:g}x", (end, speedup * (1 + end)), (-2, -2), textcoords="offset points", ha="right",
                    va="top", fontsize=8, color="grey",
                )  # fmt: skip
        axes.set(xlim=(0, right), ylim=(0.9, top), title=place.name)
        axes.set_xlabel("what drafting adds to a cycle, in plain cycles (R - 1)")
        axes.set_ylabel(f"tau, mean of the prompt sets, temperature {temperature:g}")
    legend = [Line2D([], [], color=colours[kind], marker="s", linestyle="", label=_title(kind)) for kind in found.kinds]
    legend += [
        Line2D([], [], color="black", marker=marker, linestyle="", label=f"{shape}; the number: guesses")
        for shape, marker in shapes.items()
    ]
    legend.append(Line2D([], [], color="grey", label="equal speed-up"))
    figure.legend(handles=legend, loc="outside right upper", frameon=False)
    if quick:
        figure.suptitle(QUICK, color="red")
    figure.savefig(path, dpi=130)
    plt.close(figure)
