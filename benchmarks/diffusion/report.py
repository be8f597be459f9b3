"""What comes out of the figures, and tables of it; `picture.py` draws it."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean, stdev
from typing import TypeVar

from benchmarks.diffusion.converted import Answer
from benchmarks.diffusion.strategies import Sample
from benchmarks.diffusion.text import AUTOREGRESSIVE, TextRun
from benchmarks.harness.report import table
from benchmarks.harness.turns import groups

T, K = TypeVar("T"), TypeVar("K", bound=Hashable)
TWO_SIDED = NormalDist().inv_cdf(0.975)  # standard errors to either side of a mean, for 95 %
RUN = 4  # characters of the stretches whose variety is counted
CLIPPED = " clipped"
EXPECTED = (AUTOREGRESSIVE, "block 4", "block 16", "whole")  # arXiv 2503.09573: fewer bits first


@dataclass(frozen=True)
class Found:
    """What was measured so far; a part that was not is empty."""

    runs: Sequence[TextRun] = ()
    samples: Sequence[Sample] = ()
    answers: Sequence[Answer] = ()
    quick: bool = False


def page(found: Found) -> str:
    """What was found, as Markdown."""
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
    """Half of the 95 % interval of their mean."""
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
    """Whether the order of the paper was found, with the noise as it is and clipped."""
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
    """Of those that do not run in circles; tau, where the forwards are a target's."""
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
