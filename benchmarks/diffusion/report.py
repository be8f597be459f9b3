"""Tables and a picture of all figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from benchmarks.diffusion.converted import Answer
from benchmarks.diffusion.strategies import ITSELF, Sample
from benchmarks.diffusion.text import AUTOREGRESSIVE, TextRun
from benchmarks.harness.report import log_scale, picture, table
from benchmarks.harness.turns import groups

TWO_SIDED = NormalDist().inv_cdf(0.975)  # standard errors to either side of a mean, for 95 %
RUN = 4  # characters of the stretches whose variety is counted
CLIPPED = " clipped"
MARKERS = "os^vD<>PXp*h"
EXPECTED = (AUTOREGRESSIVE, "block 4", "block 16", "whole")  # arXiv 2503.09573: fewer bits first


@dataclass(frozen=True)
class Found:
    """Results so far; parts that were not measured are empty."""

    runs: Sequence[TextRun] = ()
    samples: Sequence[Sample] = ()
    answers: Sequence[Answer] = ()
    quick: bool = False


def page(found: Found) -> str:
    """All results as Markdown."""
    parts = ["# Block-diffusion models"]
    if found.quick:
        parts.append("**A quick run: it shows that all works; its models have learned next to nothing.**")
    if found.runs:
        parts.append("## Bits per character by block size\n\n" + _text(found.runs))
    if found.samples:
        parts.append("## Speed and quality by strategy\n\n" + _strategies(found.samples, found.runs))
    if found.answers:
        parts.append("## A converted model\n\n" + _converted(found.answers))
    return "\n\n".join(parts) + "\n"


def _around(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean."""
    return TWO_SIDED * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _text(runs: Sequence[TextRun]) -> str:
    models, told = groups(runs, lambda run: run.model), []
    for (parameters, steps, tokens, scored), own in groups(
        runs, lambda run: (run.parameters, run.steps, run.tokens, run.scored)
    ).items():
        seeds = len({run.seed for run in own})
        told.append(
            f"{parameters:,} parameters; {tokens:,} characters learned in {steps} steps; {scored:,} held-out characters"
            f" measured on; {seeds} seed{'s' * (seeds > 1)}."
        )
    told.append(
        "Bits are the mean of the seeds (lowest to highest), a bound except for blocks of one; the draws of the noise "
        "leave the bound of one model uncertain by what stands beside it (95 %). How the loss varies from step to step "
        "is its standard deviation in the second half of the training."
    )
    rows = []
    for name, own in sorted(models.items(), key=lambda item: fmean(run.bits for run in item[1])):
        bits, one = [run.bits for run in own], own[0]
        draws = max((run.bits_high - run.bits_low) / 2 for run in own)
        rows.append(
            [
                name,
                str(one.block_size),
                f"{one.low:g} to {one.high:g}" if one.low < one.high else f"{one.high:g}",
                f"{fmean(bits):.3f} ({min(bits):.3f} to {max(bits):.3f})",
                f"{draws:.3f}" if draws else "exact",
                f"{fmean(run.loss_deviation for run in own):.3f}",
            ]
        )
    header = ["model", "block", "noise learned", "bits per character", "draws, ±", "loss varies by"]
    return "\n\n".join([" ".join(told), table(header, rows), "\n".join(_orders(runs))])


def _orders(runs: Sequence[TextRun]) -> list[str]:
    """Whether the results have the paper's order, with all noise and clipped."""
    lines = []
    for title, end in (("without clipping", ""), ("with clipping", CLIPPED)):
        names = [EXPECTED[0], *(name + end for name in EXPECTED[1:])]
        by_seed = groups((run for run in runs if run.model in names), lambda run: run.seed)
        whole = [{run.model: run.bits for run in own} for own in by_seed.values() if len(own) == len(names)]
        if not whole:
            continue
        as_expected = sum(sorted(names, key=lambda name: bits[name]) == names for bits in whole)
        means = {name: fmean(bits[name] for bits in whole) for name in names}
        order = " < ".join(sorted(names, key=lambda name: means[name]))
        lines.append(
            f"- Order {title}: {order}. Expected of arXiv 2503.09573: {' < '.join(names)}; so it was with "
            f"{as_expected} of {len(whole)} seeds."
        )
    return lines


@dataclass(frozen=True)
class Speed:
    """One way of sampling: tokens per forward and second, and bits per character to the judge with their 95 % interval.

    Attributes:
        variety: Of all stretches of 4 characters, the share that differ, as the mean of the seeds.
    """

    tokens_per_forward: float
    tokens_per_second: float
    bits: float
    around: float
    variety: float


def speed(samples: Sequence[Sample]) -> Speed:
    tokens, bits = sum(one.new_tokens for one in samples), [one.bits for one in samples]
    forwards, seconds = sum(one.forwards for one in samples), sum(one.seconds for one in samples)
    return Speed(
        tokens / forwards if forwards else 0.0,
        tokens / seconds if seconds else 0.0,
        fmean(bits),
        _around(bits),
        fmean(_variety(own) for own in groups(samples, lambda one: one.seed).values()),
    )


def _variety(samples: Sequence[Sample]) -> float:
    texts = [json.loads(one.text) for one in samples]
    stretches = [text[i : i + RUN] for text in texts for i in range(len(text) - RUN + 1)]
    return len(set(stretches)) / max(len(stretches), 1)


def _strategies(samples: Sequence[Sample], runs: Sequence[TextRun]) -> str:
    told = (
        "Each sample was written alone. Its bits per character are those that the autoregressive model of another seed "
        "gives (of the same one, where there is one only), with the 95 % interval of their mean. Fewer are not better "
        f"where the text runs in circles, which shows in its variety: the share of stretches of {RUN} characters that "
        "differ. The bound is the model's own, on the held-out text."
    )
    bounds = {name: fmean(run.bits for run in own) for name, own in groups(runs, lambda run: run.model).items()}
    rows = []
    for (model, strategy), own in groups(samples, lambda one: (one.model, one.strategy)).items():
        found = speed(own)
        rows.append(
            [
                model,
                strategy,
                f"{found.tokens_per_forward:.2f}" if found.tokens_per_forward else "",
                f"{found.tokens_per_second:.0f}" if found.tokens_per_second else "",
                f"{found.bits:.3f} ± {found.around:.3f}",
                f"{found.variety:.2f}",
                f"{bounds[model]:.3f}" if model in bounds else "",
                str(len(own)),
            ]
        )
    speeds = ["tokens per forward", "tokens/s"]
    header = ["model", "strategy", *speeds, "bits per character", "variety", "bound", "samples"]
    return told + "\n\n" + table(header, rows)


def tokens_per_forward(answers: Sequence[Answer]) -> float:
    """Tokens per forward of answers that do not loop; tau, where the forwards are a target's."""
    sound = [one for one in answers if not one.looping]
    return sum(one.counted for one in sound) / max(sum(one.forwards for one in sound), 1)


def right(answers: Sequence[Answer]) -> tuple[float, float]:
    """Share of right answers, and half of its 95 % interval."""
    share = fmean(one.right for one in answers)
    return share, TWO_SIDED * sqrt(share * (1 - share) / len(answers))


def _converted(answers: Sequence[Answer]) -> str:
    told = (
        "Greedy answers to problems: the share with the right result (95 % interval), and tokens per forward over "
        "those that do not run in circles; where a drafter guesses, this is tau, and the answers are the target's own."
    )
    rows = []
    for way, own in groups(answers, lambda one: one.way).items():
        share, around = right(own)
        shares = (fmean(one.ended for one in own), fmean(one.looping for one in own))
        speed_and_share = [f"{share:.1%} ± {around:.1%}", f"{tokens_per_forward(own):.2f}"]
        rows.append([way, *speed_and_share, *(f"{each:.1%}" for each in shares), str(len(own))])
    header = ["way", "right", "tokens per forward", "end by themselves", "run in circles", "answers"]
    return told + "\n\n" + table(header, rows)


def draw(found: Found, path: Path) -> None:
    """Bits by block size, quality by speed of each strategy, right answers by speed: what of these was measured."""
    panels: list[Callable[[Any], None]] = []
    if found.runs:
        panels.append(lambda axes: _draw_text(axes, found.runs))
    if found.samples:
        panels.append(lambda axes: _draw_speed(axes, found.samples, "forward"))
        panels.append(lambda axes: _draw_speed(axes, found.samples, "second"))
    if found.answers:
        panels.append(lambda axes: _draw_answers(axes, found.answers))
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    with picture(path, lines, columns, figsize=(8 * columns, 5.5 * lines)) as (figure, places):
        for axes, panel in zip(places.flat, panels, strict=False):
            panel(axes)
            axes.grid(alpha=0.3)
        for axes in places.flat[len(panels) :]:
            axes.set_axis_off()
        if found.quick:
            figure.suptitle("A quick run: its models have learned next to nothing", color="tab:red")


def _draw_text(axes: Any, runs: Sequence[TextRun]) -> None:
    names = list(dict.fromkeys(run.model.removesuffix(CLIPPED) for run in runs))
    for model, own in groups(runs, lambda run: run.model).items():
        clipped, bits = model.endswith(CLIPPED), [run.bits for run in own]
        x = names.index(model.removesuffix(CLIPPED)) + (0.1 if clipped else -0.1)
        colour, middle = "tab:orange" if clipped else "tab:blue", fmean(bits)
        ends = [[middle - min(bits)], [max(bits) - middle]]
        label = "clipped noise" if clipped else "all noise"
        axes.errorbar(x, middle, ends, fmt="o", color=colour, capsize=4, label=label)
        axes.plot([x] * len(bits), bits, ".", color=colour, alpha=0.4)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="bits per held-out character", title="Likelihood by block size (mean, lowest and highest seed)")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())


def _draw_speed(axes: Any, samples: Sequence[Sample], by: str) -> None:
    """Models by colour, strategies by form."""
    models = [model for model in groups(samples, lambda one: one.model) if model != ITSELF]
    strategies = [strategy for strategy in groups(samples, lambda one: one.strategy) if strategy]
    for (model, strategy), own in groups(samples, lambda one: (one.model, one.strategy)).items():
        found = speed(own)
        if model == ITSELF:
            axes.axhline(found.bits, color="black", linestyle=":", label=ITSELF)
            continue
        x = found.tokens_per_forward if by == "forward" else found.tokens_per_second
        colour, form = f"C{models.index(model)}", MARKERS[strategies.index(strategy) % len(MARKERS)]
        axes.errorbar(x, found.bits, found.around, fmt=form, color=colour, alpha=0.8, elinewidth=0.8)
    for number, model in enumerate(models):
        axes.plot([], [], "s", color=f"C{number}", label=model)
    for number, strategy in enumerate(strategies):
        axes.plot([], [], MARKERS[number % len(MARKERS)], color="gray", label=strategy)
    title = f"Samples, judged by another model, by tokens per {by}"
    axes.set(xlabel=f"tokens per {by}", ylabel="bits per character", title=title)
    log_scale(axes, "x")
    axes.legend(fontsize=8, ncols=2)


def _draw_answers(axes: Any, answers: Sequence[Answer]) -> None:
    for number, (way, own) in enumerate(groups(answers, lambda one: one.way).items()):
        x, (share, around) = tokens_per_forward(own), right(own)
        ends = [[100 * min(around, share)], [100 * min(around, 1 - share)]]
        axes.errorbar(
            x, 100 * share, ends, fmt=MARKERS[number % len(MARKERS)], color=f"C{number}", capsize=3, label=way
        )
    title = "A converted model beside the original"
    axes.set(xlabel="tokens per forward", ylabel="right answers, %", title=title)
    axes.legend(fontsize=8)
