"""Tables and a picture of all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness.report import spread, table
from benchmarks.sizes.figures import Figures
from benchmarks.sizes.runs import ANSWERS, Run
from benchmarks.sizes.ways import EXACT, LLAMA, OUR_KINDS, OURS, PLAIN, Way

GB = 2**30


def page(runs: Sequence[Run], missing: Mapping[tuple[str, Way], str]) -> str:
    """What was found, as Markdown."""
    found = Figures(runs)
    parts = [
        "Tokens/s are medians of the repeats, without the prompt's time; ratios are taken within a repeat, with the "
        "range of the repeats in brackets. Where guesses were replaced stands a *.",
        "## Ours: speed-up over plain decoding\n\n" + _speedups(found),
        "## As far as pays\n\nThe speed of chain:auto over that of the fastest chain of a fixed length.\n\n"
        + _auto(found),
        "## Beside llama.cpp\n\nThe fastest way of each side, by bits of a weight.\n\n" + _beside(found, ANSWERS),
    ]
    for name in found.sets:
        if name.startswith("context"):
            tokens = name.removeprefix("context ")
            parts.append(f"## Behind {tokens} tokens\n\n" + _beside(found, name))
    parts.append("## llama.cpp's ways\n\n" + _llama(found))
    parts.append("## Memory and the first token\n\n" + _memory(found))
    parts.append("## Answers\n\n" + _equal(found))
    told: dict[str, list[str]] = {}
    for (size, way), reason in missing.items():
        told.setdefault(reason, []).append(f"{way.side} {way.kind} {way.name} at {size}".replace("  ", " "))
    if told:
        lines = [f"- {reason}: {', '.join(names)}" for reason, names in told.items()]
        parts.append("## Missing\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.0f} M"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"


def _speedups(found: Figures) -> str:
    methods = [way.method for way in found.ways(side=OURS) if way.method != PLAIN]
    names = list(dict.fromkeys(methods))
    rows = []
    for size in found.sizes:
        for plain in found.ways(size, OURS, method=PLAIN):
            speed = found.speed(size, plain, ANSWERS)
            if speed is None:
                continue
            cells = [_speedup(found, size, Way(OURS, plain.kind, name)) for name in names]
            rows.append([_count(found.parameters[size]), plain.kind, _speed(speed), *cells])
    return table(["parameters", "weights", "plain, tokens/s", *names], rows)


def _auto(found: Figures) -> str:
    rows = []
    for size in found.sizes:
        for plain in found.ways(size, OURS, method=PLAIN):
            chains = [
                way for way in found.ways(size, OURS) if way.kind == plain.kind and way.method.startswith("chain:")
            ]
            speeds = {way: speed for way in chains if (speed := found.speed(size, way, ANSWERS)) is not None}
            auto = speeds.pop(Way(OURS, plain.kind, "chain:auto"), None)
            if auto is not None and speeds:
                best = max(speeds, key=lambda way: speeds[way])
                ratios = found.ratios(size, Way(OURS, plain.kind, "chain:auto"), best, ANSWERS)
                rows.append([_count(found.parameters[size]), plain.kind, best.method, spread(ratios)])
    return table(["parameters", "weights", "fastest fixed", "chain:auto over it"], rows) if rows else "Not measured."


def _speedup(found: Figures, size: str, way: Way) -> str:
    ratios = found.ratios(size, way, Way(way.side, way.kind, PLAIN), ANSWERS)
    mark = "*" if found.is_forced(size, ANSWERS) else ""
    return f"{spread(ratios)}, tau {found.tau(size, way, ANSWERS):.2f}{mark}" if ratios else ""


def _beside(found: Figures, name: str) -> str:
    header = ["parameters", "bits", "ours, plain", "ours, fastest", "llama.cpp, plain", "llama.cpp, fastest"]
    rows = []
    for size in found.sizes:
        for bits in found.bits:
            plain = [found.fastest(size, side, bits, name, method=PLAIN) for side in (OURS, LLAMA)]
            best = [found.fastest(size, side, bits, name) for side in (OURS, LLAMA)]
            if not any(best):
                continue
            cells = []
            for pair in zip(plain, best, strict=True):
                for way in pair:
                    speed = way and found.speed(size, way, name)
                    label = way and (way.kind if way.method == PLAIN else f"{way.kind}, {way.name}")
                    cells.append(f"{_speed(speed)} ({label})" if speed else "")
            ratios = []
            for ours, theirs in (plain, best):
                ratios.append(spread(found.ratios(size, ours, theirs, name)) if ours and theirs else "")
            mark = "*" if found.is_forced(size, name) else ""
            rows.append([_count(found.parameters[size]) + mark, str(bits), *cells, *ratios])
    return table([*header, "plain, ours / theirs", "fastest, ours / theirs"], rows)


def _llama(found: Figures) -> str:
    rows = []
    for size in found.sizes:
        for way in found.ways(size, LLAMA):
            speed = found.speed(size, way, ANSWERS)
            if speed is not None:
                own = "" if way.method == PLAIN else _speedup(found, size, way)
                rows.append([_count(found.parameters[size]), way.kind, way.name, _speed(speed), own])
    return table(["parameters", "weights", "way", "tokens/s", "over its plain decoding"], rows)


def _drafting_peak(found: Figures, size: str, way: Way) -> int:
    """Of a process that drafts with weights of this kind: ours hold target and drafter, and of llama.cpp's the one that
    takes least counts."""
    kind = [each for each in found.ways(size, way.side) if each.kind == way.kind and each.method != PLAIN]
    return min((found.peak(size, each) for each in kind), default=found.peak(size, way))


def _memory(found: Figures) -> str:
    firsts = [name for name in found.sets if name.startswith("first")]
    rows = []
    for size in found.sizes:
        for side in (OURS, LLAMA):
            for way in found.ways(size, side, method=PLAIN):
                kind = [each for each in found.ways(size, side) if each.kind == way.kind]
                memory = _drafting_peak(found, size, way) / GB
                cells = []
                for name in firsts:
                    with_drafter = [found.first_seconds(size, each, name) for each in kind if each.method != PLAIN]
                    drafted = min((each for each in with_drafter if each is not None), default=None)
                    plain = found.first_seconds(size, way, name)
                    cells += ["" if each is None else f"{each:.3g}" for each in (plain, drafted)]
                rows.append([_count(found.parameters[size]), side, way.kind, f"{memory:.2f}", *cells])
    columns = [f"{name.removeprefix('first ')} tokens, {how}" for name in firsts for how in ("plain", "drafting")]
    text = (
        "Most memory of a process that drafts, files that are mapped included, with ours Python and torch, and seconds "
        "to the first token.\n\n"
    )
    return text + table(["parameters", "side", "weights", "memory, GiB", *columns], rows)


def _equal(found: Figures) -> str:
    lines = []
    for size in found.sizes:
        ours, theirs = Way(OURS, "bfloat16", PLAIN), Way(LLAMA, EXACT, PLAIN)
        share = found.equal(size, ours, theirs)
        if share is not None:
            lines.append(f"- {_count(found.parameters[size])}: {share:.0%} of our answers in bfloat16 are llama.cpp's.")
        for side in (OURS, LLAMA):
            shares = [found.equal(size, way, Way(side, way.kind, PLAIN)) for way in found.ways(size, side)]
            known = [each for each in shares if each is not None]
            if known and not found.is_forced(size, ANSWERS):
                said = f"drafted answers are those of plain decoding for {min(known):.0%} of the prompts or more."
                lines.append(f"- {_count(found.parameters[size])}, {side}: {said}")
    looping = sorted((found.parameters[size], bits, count) for (size, bits), count in found.looping.items())
    if looping:
        told = ", ".join(f"{count} ({_count(parameters)}, {bits} bits)" for parameters, bits, count in looping)
        lines.append(f"- Prompts that are left out, since their answers run in circles: {told}.")
    return "\n".join(lines) or "None was compared."


def changed(runs: Sequence[Run]) -> list[str]:
    """Our ways whose answers are not those of our plain decoding."""
    found = Figures(runs)
    return [
        f"{way.kind} {way.name} at {size}"
        for size in found.sizes
        for way in found.ways(size, OURS)
        if found.equal(size, way, Way(OURS, way.kind, PLAIN)) not in (None, 1.0)
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Speed-up over our plain decoding, tokens/s, memory, and seconds to the first token, each by size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    found = Figures(runs)

    def measured_and_length(name: str) -> tuple[bool, int]:
        """Whether most sizes have read a prompt, and of how many tokens it is."""
        measured = {run.size for run in runs if run.set == name}
        return 2 * len(measured) > len(found.sizes), int(name.split()[1])

    figure, panels = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    (speedup, speed), (memory, first) = panels
    colours = {bits: f"C{i}" for i, bits in enumerate(found.bits)}
    for kind in dict.fromkeys(way.kind for way in found.ways(side=OURS)):
        points = []
        for size in found.sizes:
            ways = [way for way in found.ways(size, OURS) if way.kind == kind and way.method != PLAIN]
            ratios = [r for way in ways if (r := found.ratios(size, way, Way(OURS, kind, PLAIN), ANSWERS))]
            if ratios:
                points.append((found.parameters[size] / 1e6, max(ratios, key=median)))
        if points:
            middle = [median(each) for _, each in points]
            low = [median(each) - min(each) for _, each in points]
            high = [max(each) - median(each) for _, each in points]
            across = [x for x, _ in points]
            colour, alpha = colours[OUR_KINDS[kind][0]], 0.4 if kind == "float32" else 1.0
            speedup.errorbar(across, middle, (low, high), fmt="o-", color=colour, alpha=alpha, capsize=3, label=kind)
    speedup.axhline(1, color="black", linewidth=1, linestyle=":")
    read = max((name for name in found.sets if name.startswith("first")), key=measured_and_length, default="")
    for bits in found.bits:
        for side, style in ((OURS, "o-"), (LLAMA, "s--")):
            lines: dict[str, list[tuple[float, float]]] = {"fastest": [], "plain": [], "memory": [], "first": []}
            for size in found.sizes:
                x = found.parameters[size] / 1e6
                best = found.fastest(size, side, bits, ANSWERS)
                plain = found.fastest(size, side, bits, ANSWERS, method=PLAIN)
                for name, way in (("fastest", best), ("plain", plain)):
                    value = way and found.speed(size, way, ANSWERS)
                    lines[name] += [(x, value)] if value else []
                if best:
                    lines["memory"].append((x, _drafting_peak(found, size, best) / GB))
                seconds = plain and found.first_seconds(size, plain, read)
                lines["first"] += [(x, seconds)] if seconds else []
            label = f"{side}, {bits} bits"
            for axes, name in ((speed, "fastest"), (memory, "memory"), (first, "first")):
                if lines[name]:
                    axes.plot(*zip(*lines[name], strict=True), style, color=colours[bits], label=label)
            if lines["plain"]:
                speed.plot(*zip(*lines["plain"], strict=True), style[0] + ":", color=colours[bits], alpha=0.4)
    across = sorted({found.parameters[size] / 1e6 for size in found.sizes})
    titles = {
        speedup: "ours: fastest way over plain decoding",
        speed: "tokens/s, fastest way (plain: dotted)",
        memory: "memory, GiB",
        first: f"seconds to the first token ({read.removeprefix('first ')} tokens, plain)",
    }
    for axes, title in titles.items():
        axes.set(xscale="log", xlabel="parameters of the target", title=title)
        axes.set_xticks(across, [f"{x:.0f} M" for x in across])
        if axes is not speedup:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    speedup.set_ylim(bottom=0)
    figure.savefig(path, dpi=130)
    plt.close(figure)
