"""Speeds, ratios, memory and equality of answers over all runs, as tables and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import interleaving
from benchmarks.harness.report import log_scale, number, picture, spread, table
from benchmarks.sizes.measure import ANSWERS, Run
from benchmarks.sizes.ways import BITS, EXACT, LLAMA, OURS, PLAIN, Way

from blockdraft.engine import loops

GB = 2**30


class Figures:
    """Figures over all runs.

    Prompts whose plain output is repetitive are left out, by number of bits, since such outputs are easy to predict.
    Of each method, only repeats with all prompts count.

    Attributes:
        repetitive: Prompts that are left out, by size and bits.
        parameters: Of the targets, by size, smallest first.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        repetitive = {
            (run.size, run.way.bits, run.set, run.prompt)
            for run in runs
            if run.method == PLAIN and not run.forced and loops([int(token) for token in run.answer.split()])
        }
        self.runs = [run for run in runs if (run.size, run.way.bits, run.set, run.prompt) not in repetitive]
        self.repetitive = Counter((size, bits) for size, bits, name, _ in repetitive if name == ANSWERS)
        self.parameters = {run.size: run.parameters for run in sorted(runs, key=lambda run: run.parameters)}
        self.sizes = list(self.parameters)
        self.sets = list(dict.fromkeys(run.set for run in self.runs))
        self.bits = sorted({run.way.bits for run in self.runs}, reverse=True)

    @cached_property
    def _by_way(self) -> dict[tuple[str, Way, str], list[Run]]:
        return interleaving.groups(self.runs, lambda run: (run.size, run.way, run.set))

    @cached_property
    def _by_bits(self) -> dict[tuple[str, int, str], list[Run]]:
        return interleaving.groups(self.runs, lambda run: (run.size, run.way.bits, run.set))

    def of(self, size: str, way: Way, name: str) -> list[Run]:
        return self._by_way.get((size, way, name), [])

    def ways(
        self, size: str | None = None, side: str | None = None, method: str | None = None, kind: str | None = None
    ) -> list[Way]:
        """Return the measured methods, in the order of measurement."""
        found = dict.fromkeys(run.way for run in self.runs if size in (None, run.size))
        asked = (side, method, kind)
        return [
            way for way in found
            if all(each in (None, own) for each, own in zip(asked, (way.side, way.method, way.kind), strict=True))
        ]  # fmt: skip

    def rates(self, size: str, way: Way, name: str) -> dict[int, float]:
        """Return the tokens per second of each complete repeat, without the first token of a response."""
        prompts = {run.prompt for run in self._by_bits.get((size, way.bits, name), ())}
        return interleaving.rates(self.of(size, way, name), len(prompts))

    def speed(self, size: str, way: Way, name: str) -> float | None:
        """Return the tokens per second, the median of the repeats."""
        return interleaving.median(self.rates(size, way, name).values())

    def ratios(self, size: str, way: Way, other: Way, name: str) -> list[float]:
        return interleaving.ratios(self.rates(size, way, name), self.rates(size, other, name))

    def fastest(self, size: str, ways: Sequence[Way], name: str) -> Way | None:
        speeds = {way: speed for way in ways if (speed := self.speed(size, way, name)) is not None}
        return max(speeds, key=lambda way: speeds[way], default=None)

    def best(self, size: str, side: str, bits: int, name: str, method: str | None = None) -> Way | None:
        """Return the fastest method of a side with weights of this many bits."""
        return self.fastest(size, [way for way in self.ways(size, side, method) if way.bits == bits], name)

    def tau(self, size: str, way: Way, name: str) -> float:
        return interleaving.tau(self.of(size, way, name))

    def first_seconds(self, size: str, way: Way, name: str) -> float | None:
        """Return the seconds to the first token, the median of the runs."""
        return interleaving.median(run.prefill_seconds for run in self.of(size, way, name))

    def peak(self, size: str, way: Way) -> int:
        """Return the peak memory of the process of a method."""
        own = (run.peak_bytes for run in self.runs if run.size == size and run.way.process == way.process)
        return max(own, default=0)

    def drafting_peak(self, size: str, way: Way) -> int:
        """Return the peak memory of a process that drafts with weights of this kind.

        Ours hold target and drafter; of llama.cpp's processes the smallest counts.
        """
        kind = [each for each in self.ways(size, way.side, kind=way.kind) if each.method != PLAIN]
        return min((self.peak(size, each) for each in kind), default=self.peak(size, way))

    def is_forced(self, size: str, name: str) -> bool:
        return any(run.forced for run in self.runs if (run.size, run.set) == (size, name))

    def equal(self, size: str, way: Way, other: Way) -> float | None:
        """Return the share of prompts that two methods answer alike, in all repeats."""
        own, others = (
            interleaving.groups(self.of(size, each, ANSWERS), lambda run: run.prompt) for each in (way, other)
        )
        both = own.keys() & others.keys()
        alike = [len({run.answer for run in [*own[prompt], *others[prompt]]}) == 1 for prompt in both]
        return sum(alike) / len(both) if both else None


def page(runs: Sequence[Run], missing: Mapping[tuple[str, Way], str]) -> str:
    """Return all results as Markdown."""
    found = Figures(runs)
    parts = [
        "Tokens/s are medians of the repeats, without the prompt's time; ratios are taken within a repeat, with the "
        "range of the repeats in brackets. Where draft tokens were replaced stands a *.",
        "## Ours: speed-up over plain decoding\n\n" + _speedups(found),
        "## As far as pays\n\nThe speed of chain:auto over that of the fastest chain of a fixed length.\n\n"
        + _auto(found),
        "## Beside llama.cpp\n\nThe fastest way of each side, by bits of a weight.\n\n" + _beside(found, ANSWERS),
    ]
    for name in found.sets:
        if name.startswith("context"):
            parts.append(f"## Behind {name.removeprefix('context ')} tokens\n\n" + _beside(found, name))
    parts.append("## llama.cpp's ways\n\n" + _llama(found))
    parts.append("## Memory and the first token\n\n" + _memory(found))
    parts.append("## Answers\n\n" + _equal(found))
    if missing:
        lines = []
        for reason, which in interleaving.groups(missing, lambda each: missing[each]).items():
            names = (f"{way.side} {way.kind} {way.name} at {size}".replace("  ", " ") for size, way in which)
            lines.append(f"- {reason}: {', '.join(names)}")
        parts.append("## Missing\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.0f} M"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"


def _speedup(found: Figures, size: str, way: Way) -> str:
    ratios = found.ratios(size, way, way.plain, ANSWERS)
    mark = "*" if found.is_forced(size, ANSWERS) else ""
    return f"{spread(ratios)}, tau {found.tau(size, way, ANSWERS):.2f}{mark}" if ratios else ""


def _speedups(found: Figures) -> str:
    names = list(dict.fromkeys(way.method for way in found.ways(side=OURS) if way.method != PLAIN))
    lines = []
    for size in found.sizes:
        for plain in found.ways(size, OURS, PLAIN):
            speed = found.speed(size, plain, ANSWERS)
            if speed is not None:
                cells = [_speedup(found, size, Way(OURS, plain.kind, name)) for name in names]
                lines.append([_count(found.parameters[size]), plain.kind, _speed(speed), *cells])
    return table(["parameters", "weights", "plain, tokens/s", *names], lines)


def _auto(found: Figures) -> str:
    lines = []
    for size in found.sizes:
        for plain in found.ways(size, OURS, PLAIN):
            auto = Way(OURS, plain.kind, "chain:auto")
            fixed = [way for way in found.ways(size, OURS, kind=plain.kind) if way.method.startswith("chain:")]
            best = found.fastest(size, [way for way in fixed if way != auto], ANSWERS)
            if best is not None and found.speed(size, auto, ANSWERS) is not None:
                ratios = found.ratios(size, auto, best, ANSWERS)
                lines.append([_count(found.parameters[size]), plain.kind, best.method, spread(ratios)])
    return table(["parameters", "weights", "fastest fixed", "chain:auto over it"], lines) if lines else "Not measured."


def _beside(found: Figures, name: str) -> str:
    header = ["parameters", "bits", "ours, plain", "ours, fastest", "llama.cpp, plain", "llama.cpp, fastest"]
    lines = []
    for size in found.sizes:
        for bits in found.bits:
            plain = [found.best(size, side, bits, name, PLAIN) for side in (OURS, LLAMA)]
            best = [found.best(size, side, bits, name) for side in (OURS, LLAMA)]
            if not any(best):
                continue
            cells = []
            for way in (each for pair in zip(plain, best, strict=True) for each in pair):
                speed = way and found.speed(size, way, name)
                label = way and (way.kind if way.method == PLAIN else f"{way.kind}, {way.name}")
                cells.append(f"{_speed(speed)} ({label})" if speed else "")
            pairs = (plain, best)
            cells += [spread(found.ratios(size, *both, name)) if all(both) else "" for both in pairs]
            mark = "*" if found.is_forced(size, name) else ""
            lines.append([_count(found.parameters[size]) + mark, str(bits), *cells])
    return table([*header, "plain, ours / theirs", "fastest, ours / theirs"], lines)


def _llama(found: Figures) -> str:
    lines = []
    for size in found.sizes:
        for way in found.ways(size, LLAMA):
            speed = found.speed(size, way, ANSWERS)
            if speed is not None:
                own = "" if way.method == PLAIN else _speedup(found, size, way)
                lines.append([_count(found.parameters[size]), way.kind, way.name, _speed(speed), own])
    return table(["parameters", "weights", "way", "tokens/s", "over its plain decoding"], lines)


def _memory(found: Figures) -> str:
    firsts = [name for name in found.sets if name.startswith("first")]
    lines = []
    for size in found.sizes:
        for way in [*found.ways(size, OURS, PLAIN), *found.ways(size, LLAMA, PLAIN)]:
            cells = []
            for name in firsts:
                drafting = [each for each in found.ways(size, way.side, kind=way.kind) if each.method != PLAIN]
                seconds = [each for one in drafting if (each := found.first_seconds(size, one, name)) is not None]
                both = (found.first_seconds(size, way, name), min(seconds, default=None))
                cells += [number(each, ".3g") for each in both]
            memory = f"{found.drafting_peak(size, way) / GB:.2f}"
            lines.append([_count(found.parameters[size]), way.side, way.kind, memory, *cells])
    columns = [f"{name.removeprefix('first ')} tokens, {how}" for name in firsts for how in ("plain", "drafting")]
    text = (
        "Most memory of a process that drafts, files that are mapped included, with ours Python and torch, and seconds "
        "to the first token.\n\n"
    )
    return text + table(["parameters", "side", "weights", "memory, GiB", *columns], lines)


def _equal(found: Figures) -> str:
    lines = []
    for size in found.sizes:
        share = found.equal(size, Way(OURS, "bfloat16", PLAIN), Way(LLAMA, EXACT, PLAIN))
        if share is not None:
            lines.append(f"- {_count(found.parameters[size])}: {share:.0%} of our answers in bfloat16 are llama.cpp's.")
        for side in (OURS, LLAMA):
            shares = [found.equal(size, way, way.plain) for way in found.ways(size, side)]
            known = [each for each in shares if each is not None]
            if known and not found.is_forced(size, ANSWERS):
                said = f"drafted answers are those of plain decoding for {min(known):.0%} of the prompts or more."
                lines.append(f"- {_count(found.parameters[size])}, {side}: {said}")
    repetitive = sorted((found.parameters[size], bits, count) for (size, bits), count in found.repetitive.items())
    if repetitive:
        told = ", ".join(f"{count} ({_count(parameters)}, {bits} bits)" for parameters, bits, count in repetitive)
        lines.append(f"- Prompts that are left out, since their answers run in circles: {told}.")
    return "\n".join(lines) or "None was compared."


def changed(runs: Sequence[Run]) -> list[str]:
    """Return our methods whose responses differ from our plain decoding."""
    found = Figures(runs)
    return [
        f"{way.kind} {way.name} at {size}"
        for size in found.sizes
        for way in found.ways(size, OURS)
        if found.equal(size, way, way.plain) not in (None, 1.0)
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw speed-up over plain decoding, tokens/s, memory, and time to the first token by size."""
    found = Figures(runs)
    colours = {bits: f"C{i}" for i, bits in enumerate(found.bits)}
    millions = {size: count / 1e6 for size, count in found.parameters.items()}

    def measured_and_length(name: str) -> tuple[bool, int]:
        """Return whether most sizes have timed a prompt length, and that length."""
        measured = {run.size for run in runs if run.set == name}
        return 2 * len(measured) > len(found.sizes), int(name.split()[1])

    read = max((name for name in found.sets if name.startswith("first")), key=measured_and_length, default="")
    with picture(path, 2, 2, figsize=(12, 9)) as (_, ((speedup, speed), (memory, first))):
        for kind in dict.fromkeys(way.kind for way in found.ways(side=OURS)):
            points = {}
            for size in found.sizes:
                drafting = [way for way in found.ways(size, OURS, kind=kind) if way.method != PLAIN]
                ratios = [each for way in drafting if (each := found.ratios(size, way, way.plain, ANSWERS))]
                if ratios:
                    points[millions[size]] = max(ratios, key=median)
            if points:
                middle = [median(each) for each in points.values()]
                low = [median(each) - min(each) for each in points.values()]
                high = [max(each) - median(each) for each in points.values()]
                style = {"color": colours[BITS[kind]], "alpha": 0.4 if kind == "float32" else 1.0, "label": kind}
                speedup.errorbar(list(points), middle, (low, high), fmt="o-", capsize=3, **style)
        speedup.axhline(1, color="black", linewidth=1, linestyle=":")
        for bits in found.bits:
            for side, style in ((OURS, "o-"), (LLAMA, "s--")):
                lines: dict[str, list[tuple[float, Any]]] = {"fastest": [], "plain": [], "memory": [], "first": []}
                for size in found.sizes:
                    best, plain = (found.best(size, side, bits, ANSWERS, method) for method in (None, PLAIN))
                    values = {
                        "fastest": best and found.speed(size, best, ANSWERS),
                        "plain": plain and found.speed(size, plain, ANSWERS),
                        "memory": best and found.drafting_peak(size, best) / GB,
                        "first": plain and found.first_seconds(size, plain, read),
                    }
                    for name, value in values.items():
                        lines[name] += [(millions[size], value)] if value else []
                label = f"{side}, {bits} bits"
                for axes, name in ((speed, "fastest"), (memory, "memory"), (first, "first")):
                    if lines[name]:
                        axes.plot(*zip(*lines[name], strict=True), style, color=colours[bits], label=label)
                if lines["plain"]:
                    speed.plot(*zip(*lines["plain"], strict=True), style[0] + ":", color=colours[bits], alpha=0.4)
        titles = {
            speedup: "ours: fastest way over plain decoding",
            speed: "tokens/s, fastest way (plain: dotted)",
            memory: "memory, GiB",
            first: f"seconds to the first token ({read.removeprefix('first ')} tokens, plain)",
        }
        for axes, title in titles.items():
            axes.set(xlabel="parameters of the target", title=title)
            log_scale(axes, "x", sorted(set(millions.values())), "{:.0f} M")
            if axes is not speedup:
                log_scale(axes, "y")
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
        speedup.set_ylim(bottom=0)
