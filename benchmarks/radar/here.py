"""How near projections of `blockdraft radar` come to what this machine does: `python -m benchmarks.radar.here`.

Measures the bundled pair at several widths and kinds of weights (`benchmarks.sizes`), and GGUF files, plain and with
chains of a fixed length, in batches. The projections know tau as it was measured, so costs alone are judged: once
those of the machine's bandwidth and arithmetic, once with the cycle times of `blockdraft calibrate`. Nothing else may
run meanwhile. Writes --out/radar-here.md.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import turns
from benchmarks.harness.command import CORES, PROMPTS, ROOT, Parser, listed, tell
from benchmarks.harness.models import why_uncompiled
from benchmarks.harness.report import table, write_files
from benchmarks.radar.accuracy import percent
from benchmarks.sizes import pairs
from benchmarks.sizes.ways import OUR_KINDS
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Engine, merge
from blockdraft.engine.adaptive.costs import Costs, Probe
from blockdraft.engine.adaptive.costs import measure as measure_costs
from blockdraft.engine.text import encode
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.models import Drafter as Published
from blockdraft.models import bundled_drafter, model_of
from blockdraft.radar.devices import Machine
from blockdraft.radar.machine import measured
from blockdraft.radar.project import Row, project
from blockdraft.radar.shape import Shape, read_shape
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

NEAR = 0.2  # of the measured speed
RADAR_KINDS = {"float32": "bf16", "bfloat16": "bf16"}  # weights, which stay in bfloat16 in either
DEFAULT_KINDS = "bfloat16,int8,int4"
PLAIN, DRAFTED = "plain", "drafted"


@dataclass(frozen=True)
class Subject:
    """A model with a kind of weights.

    Attributes:
        name: Name in the table.
        options: How `load_target` loads it.
        drafter: As `load_drafter` takes it; None drafts nothing.
        kind: Kind of the drafter.
    """

    name: str
    target: Path
    weights: str
    options: dict[str, str]
    drafter: Path | None
    kind: str = "dflash"


@dataclass(frozen=True)
class Figure:
    """A measured speed and its projections, in tokens per second of all texts together."""

    subject: Subject
    batch: int
    what: str
    tau: float
    value: float
    roofline: Row
    calibrated: Row

    def off(self, row: Row) -> float:
        """A projection's deviation, as a share of the measured speed."""
        interval = row.plain if self.what == PLAIN else row.drafted
        assert interval is not None
        return interval.mid / self.value - 1

    def inside(self, row: Row) -> bool:
        """Whether the measured speed lies in a projection's interval."""
        interval = row.plain if self.what == PLAIN else row.drafted
        assert interval is not None
        return interval.low <= self.value <= interval.high


def subjects(widths: Sequence[str], kinds: Sequence[str], files: Sequence[Path], folder: Path) -> Iterator[Subject]:
    """Models to measure; the pairs are made in a folder."""
    for width in widths:
        target, drafter = pairs.make(width, folder / width, pairs.TRAINED_CONTEXT)
        name = f"pair, {pairs.parameters(target) / 1e6:.0f} M"
        for kind in kinds:
            yield Subject(name, target, RADAR_KINDS.get(kind, kind), OUR_KINDS[kind][1], drafter)
    for file in files:
        model = model_of(file)
        ours = None if model is None else bundled_drafter(model)
        kind = model.drafters[0].kind if model and ours else ""
        yield Subject(model.name if model else file.stem, file, "file", {}, ours, kind)


def figures(
    subject: Subject, machine: Machine, prompts: Sequence[str], batches: Sequence[int], tokens: int, repeats: int
) -> Iterator[Figure]:
    """Measured speeds of a model and their projections.

    Raises:
        RuntimeError: It does not run compiled.
    """
    target = load_target(subject.target, device="cpu", compile="on", **subject.options)
    drafter = load_drafter(subject.drafter or "none", target=target)
    if reason := why_uncompiled(target, drafter):
        raise RuntimeError(f"{subject.name} is not measured: {reason}")
    ids = [encode(prompt, target) for prompt in prompts]
    costs = measure_costs(Probe(target, drafter), drafter.block_size, max(batches), target.max_context)
    shape, size = read_shape(str(subject.target)), min(drafter.block_size, 6)
    ways = [PLAIN, *([DRAFTED] if subject.drafter else [])]
    for batch in batches:
        # Prompts of one length, since a projection is for one context.
        length = min(map(len, ids))
        rows = [ids[i % len(ids)][:length] for i in range(batch)]
        context = length + tokens // 2
        for what, (value, tau) in _speeds(target, drafter, ways, rows, size, tokens, repeats).items():
            roofline, calibrated = (
                _project(subject, shape, machine, context, batch, size, tau, known) for known in (None, costs)
            )
            yield Figure(subject, batch, what, tau, value, roofline, calibrated)


def _speeds(
    target: Target,
    drafter: Drafter,
    ways: Sequence[str],
    rows: Sequence[Sequence[int]],
    size: int,
    tokens: int,
    repeats: int,
) -> dict[str, tuple[float, float]]:
    """Tokens per second without the prompts' time, the median of the repeats, and tau, by way."""
    engines = {PLAIN: Engine(target, load_drafter("none", target=target), len(rows))}
    engines[DRAFTED] = Engine(target, drafter, len(rows), Drafting(block_size=size))
    params = SamplingParams(tokens, ignore_eos=True)
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    taus: dict[str, float] = {}
    for repeat, _, way in turns.in_turns([None], ways, repeats + 1):
        began = time.perf_counter()
        answers = engines[way].generate(rows, params)
        seconds = time.perf_counter() - began - sum(answer.stats.read_seconds for answer in answers)
        if repeat:  # the first one warms up
            speeds[way].append(sum(sum(answer.stats.committed) for answer in answers) / seconds)
            taus[way] = merge(answer.stats for answer in answers).tau
    return {way: (turns.median(speeds[way]) or 0.0, taus[way]) for way in ways}


def _project(
    subject: Subject,
    shape: Shape,
    machine: Machine,
    context: int,
    batch: int,
    size: int,
    tau: float,
    costs: Costs | None,
) -> Row:
    published = next((each for each in shape.drafters if each.kind == subject.kind), None) or Published(
        hub="our/pair",
        kind="dflash",
        layout="any",
        source="https://example.org",
        layers=2,  # of the bundled pair
    )
    return project(
        shape,
        machine,
        subject.weights,
        context,
        batch,
        drafter=published,
        block_size=size,
        tau=tau,
        costs=costs,
    )


def page(found: Sequence[Figure], machine: Machine) -> str:
    """The page."""
    both = {"bandwidth and arithmetic": "roofline", "with `blockdraft calibrate`": "calibrated"}
    short = []
    for name, which in both.items():
        rows = [(figure, getattr(figure, which)) for figure in found]
        near = sum(abs(figure.off(row)) <= NEAR for figure, row in rows) / len(rows)
        inside = sum(figure.inside(row) for figure, row in rows) / len(rows)
        middle = turns.median(abs(figure.off(row)) for figure, row in rows) or 0.0
        short.append([name, percent(near), percent(inside), percent(middle)])
    lines = [
        [
            figure.subject.name,
            figure.subject.weights,
            str(figure.batch),
            figure.what,
            f"{figure.tau:.2f}" if figure.what == DRAFTED else "",
            f"{figure.value:,.0f}",
            *(f"{100 * figure.off(row):+.0f} %" for row in (figure.roofline, figure.calibrated)),
        ]
        for figure in found
    ]
    return "\n".join(
        [
            "# How near radar comes on one machine",
            "",
            *textwrap.wrap(
                f"{machine.name}; {machine.note}. Written by `python -m benchmarks.radar.here`. Near is within "
                f"{percent(NEAR)} of the measured speed; tau is that of the run, whose prompts are cut to one length. "
                f"{len(found)} speeds:",
                120,
                break_long_words=False,
                break_on_hyphens=False,
            ),
            "",
            table(["projected from", "near", "inside the interval", "median off"], short, left=1),
            "",
            table(["model", "weights", "batch", "what", "tau", "tokens/s", "off", "off, calibrated"], lines, left=4),
            "",
        ]
    )


def main(words: Sequence[str] | None = None) -> int:
    quick = {"widths": "1", "kinds": "bfloat16,int4", "batches": "1,4", "tokens": 16, "repeats": 1}
    parser = Parser(__doc__, out=ROOT / "docs", quick=quick, threads=CORES, prog="python -m benchmarks.radar.here")
    add = parser.add_argument
    add("--widths", type=listed(), default="1,2,4,8", help="powers of two (1,2,4,8); '' for none")
    add("--kinds", type=listed(known=OUR_KINDS), default=DEFAULT_KINDS, help=f"of weights ({DEFAULT_KINDS})")
    add("--files", type=listed(Path), default="", help="GGUF files; one of the catalogue with its bundled drafter")
    add("--batches", type=listed(int), default="1,4,16")
    add("--tokens", type=int, default=48, help="new tokens of each text (48)")
    add("--repeats", type=int, default=3)
    args = parser.parse(words)
    torch.set_num_threads(args.threads)
    [given] = read_prompt_sets([PROMPTS])
    machine = measured()
    tell(f"{machine.name}; {machine.note}")
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects(args.widths, args.kinds, args.files, Path(folder)):
            for figure in figures(subject, machine, given.prompts, args.batches, args.tokens, args.repeats):
                found.append(figure)
                off = [f"{100 * figure.off(row):+.0f} %" for row in (figure.roofline, figure.calibrated)]
                tell(
                    f"{subject.name:24} {subject.weights:5} batch {figure.batch:<3} {figure.what:8} "
                    f"{figure.value:9.1f} tokens/s, off by {off[0]}, calibrated {off[1]}"
                )
    print(f"Written: {write_files(args.out, {'radar-here.md': page(found, machine)})[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
