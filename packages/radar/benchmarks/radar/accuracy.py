"""How near projections come to published speeds, and the constants of device classes that make them come near."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from benchmarks.harness.report import table
from benchmarks.radar.published import Figure, Measured, published

from blockdraft.models import PublishedDrafter
from blockdraft_radar.devices import find, machine_of
from blockdraft_radar.project import Interval, Projection, batch_for, project
from blockdraft_radar.shape import Shape, read_shape
from blockdraft_radar.step import Constants, constants

NEAR = 0.3  # of the published figure
ASKED = {"near": 2 / 3, "inside": 0.9}  # shares of figures that are near, and inside the interval

STEPS = (1.4, 1.2, 1.1, 1.05)  # factors that a constant is tried with, up and down, the wide ones first
SHARES = {"bandwidth": (0.3, 0.95), "arithmetic": (0.1, 0.95), "overlap": (0.1, 1.0)}  # and their limits
PULL = 0.02  # of the loss, for a constant that is e times what it was: figures that say nothing leave it alone
OUTLIER = 0.7  # most that one figure adds to the loss, as the logarithm of a ratio
FEWEST = 4  # figures of a class that constants are fitted on


@dataclass(frozen=True)
class Verdict:
    """A published figure and its projection."""

    figure: Figure
    projected: Interval

    @property
    def off(self) -> float:
        """The projection's deviation, as a share of the figure."""
        return self.projected.mid / self.figure.value - 1

    @property
    def near(self) -> bool:
        """Whether it is off by `NEAR` at most."""
        return abs(self.off) <= NEAR

    @property
    def inside(self) -> bool:
        """Whether the figure lies in the interval."""
        return self.projected.low <= self.figure.value <= self.projected.high


def projection(measured: Measured, constant: Constants | None = None) -> Projection:
    """Project a measurement, with the source's tau if it states one.

    Args:
        constant: Constants of the device's class, in the place of the package's.
    """
    shape = read_shape(measured.model)
    return project(
        shape,
        machine_of(find(measured.device)),
        measured.weights,
        measured.context,
        measured.batch,
        measured.task,
        drafter=None if measured.method == "plain" else _drafter(shape, measured.method),
        block_size=measured.block_size,
        tau=measured.tau,
        eager=measured.engine == "transformers",
        constant=constant,
    )


def _drafter(shape: Shape, kind: str) -> PublishedDrafter:
    unpublished = PublishedDrafter(hub=f"unpublished/{kind}", kind=kind, layout="unknown", source="https://example.org")
    return next((drafter for drafter in shape.drafters if drafter.kind == kind), unpublished)


def verdicts(table: Iterable[Measured], constant: Constants | None = None) -> Iterator[Verdict]:
    """Yield projections of all figures of some measurements."""
    for measured in table:
        row = projection(measured, constant)
        for figure in measured.figures():
            yield Verdict(figure, _interval(row, figure.what))


def _interval(row: Projection, what: str) -> Interval:
    if what == "plain":
        return row.plain
    assert row.drafted is not None
    if what == "drafted":
        return row.drafted
    plain = row.plain.mid
    return Interval(row.drafted.low / plain, row.drafted.mid / plain, row.drafted.high / plain)


def shares(results: Sequence[Verdict]) -> Mapping[str, float]:
    """Return the shares of figures that are near, and inside their interval."""
    return {
        "near": sum(verdict.near for verdict in results) / len(results),
        "inside": sum(verdict.inside for verdict in results) / len(results),
    }


def percent(share: float) -> str:
    """Format a share in percent."""
    return f"{100 * share:.0f} %"


def fit(rows: Iterable[Measured] | None = None) -> dict[str, Constants]:
    """Fit the constants of each device class to the half of the published figures that is for fitting.

    With them come the names of the devices. Each constant in turn is multiplied by factors, as long as that brings the
    mean logarithm of the ratios down.
    """
    table = [row for row in (published() if rows is None else rows) if row.fitted]
    fitted = dict(constants())
    for kind, constant in fitted.items():
        own = [row for row in table if row.kind == kind]
        enough = sum(1 for row in own for _ in row.figures()) >= FEWEST
        if enough:
            constant = _fit_class(own, constant)
        # Constants of CPUs come from measurements of our own, where nothing else was published.
        devices = tuple(dict.fromkeys(find(row.device).name for row in own)) if enough else ()
        fitted[kind] = replace(constant, reported=enough or kind == "cpu", devices=devices)
    return fitted


def _fit_class(rows: Sequence[Measured], first: Constants) -> Constants:
    names = [name for name, value in vars(first).items() if isinstance(value, float) and value > 0]

    def loss(constant: Constants) -> float:
        logs = [abs(log(verdict.projected.mid / verdict.figure.value)) for verdict in verdicts(rows, constant)]
        pulled = sum(log(getattr(constant, name) / getattr(first, name)) ** 2 for name in names)
        return sum(min(deviation, OUTLIER) for deviation in logs) / len(logs) + PULL * pulled

    best, least = first, loss(first)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (step, 1 / step):
                    low, high = SHARES.get(name, (0.0, 1e9))
                    value = float(f"{min(max(getattr(best, name) * factor, low), high):.3g}")
                    tried = replace(best, **{name: value})
                    tried_loss = loss(tried)
                    if tried_loss < least - 1e-6:
                        best, least, improved = tried, tried_loss, True
    return best


CLAIMS: tuple[dict[str, Any], ...] = (
    {"speed": 9000, "model": "llama-3.3-70b", "device": "RTX 5090", "weights": "int4"},
    {"speed": 9000, "model": "llama-3.3-70b", "device": "H100 SXM", "weights": "int4"},
    {"speed": 9000, "model": "llama-3.3-70b", "device": "H200 SXM", "weights": "fp8"},
    {"speed": 9000, "model": "llama-3.3-70b", "device": "B200 SXM", "weights": "fp8"},
    {"speed": 9000, "model": "llama-3.3-70b", "device": "B200 SXM", "weights": "nvfp4"},
)


def claims() -> Iterator[Sequence[str]]:
    """Yield table lines: a claimed speed, the speed of one sequence there, and the batch that reaches the claim."""
    for claim in CLAIMS:
        shape, machine = read_shape(claim["model"]), machine_of(find(claim["device"]))
        alone = project(shape, machine, claim["weights"], context=1024)
        count = batch_for(claim["speed"], shape, machine, weights=claim["weights"], context=1024)
        assert alone.drafted is not None
        takes = (
            "do not fit its memory"
            if not alone.fits
            else "no batch that fits"
            if count is None
            else f"{count} sequences"
        )
        yield (
            f"{claim['speed']:,} tokens/s",
            claim["model"],
            claim["weights"],
            claim["device"],
            f"{alone.plain.mid:.0f}",
            f"{alone.drafted.mid:.0f}",
            "its weights " + takes if not alone.fits else takes,
        )


INTRODUCTION = """# How accurate radar is

`make bench-radar` writes this page. It compares radar's projections with {figures} published speeds of
{devices} devices; [published.toml](published.toml) holds the figures and their sources.

One half, chosen by a hash of source, device and model, fits the constants of each device class (`--fit`). The other
half judges. tau is the source's where it states one, else radar's own. Near is within {near} of the published figure;
inside is within the interval that radar prints.
"""


def page() -> str:
    """Return the page."""
    rows = published()
    judged = list(verdicts(row for row in rows if not row.fitted))
    fitted = list(verdicts(row for row in rows if row.fitted))
    figures, devices = len(judged) + len(fitted), len({row.device for row in rows})
    parts = [
        INTRODUCTION.format(figures=figures, devices=devices, near=percent(NEAR)),
        "## In short",
        table(("figures", "number", "near", "inside"), _summary(judged, fitted), left=1),
        "Of the classes of devices, in the half that judges:",
        table(("class", "number", "near", "inside"), _by_class(judged), left=1),
        "## Where it misses",
        "Figures outside their interval, of both halves.",
        _figures(verdict for verdict in (*judged, *fitted) if not verdict.inside),
        "## Speeds that no single sequence reaches",
        "Claims about a card are often sums over many sequences. Tokens per second at a context of 1024, and the\n"
        "smallest power of two of drafted sequences that reaches the claim:",
        table(("claim", "model", "weights", "device", "one sequence", "drafted", "it takes"), claims(), left=4),
        "## The half that judges",
        _figures(judged),
        "## The half that constants were fitted on",
        _figures(fitted),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _summary(judged: Sequence[Verdict], fitted: Sequence[Verdict]) -> Iterator[Sequence[str]]:
    for name, results in (("the half that judges", judged), ("the half that was fitted", fitted)):
        yield _line(name, results)
    yield ("asked for", "", percent(ASKED["near"]), percent(ASKED["inside"]))


def _by_class(results: Sequence[Verdict]) -> Iterator[Sequence[str]]:
    for kind in dict.fromkeys(verdict.figure.measured.kind for verdict in results):
        yield _line(kind, [verdict for verdict in results if verdict.figure.measured.kind == kind])


def _line(name: str, results: Sequence[Verdict]) -> Sequence[str]:
    reached = shares(results)
    return name, str(len(results)), percent(reached["near"]), percent(reached["inside"])


def _figures(results: Iterable[Verdict]) -> str:
    header = ("device", "model", "weights", "batch", "what", "published", "projected", "interval", "off", "source")
    return table(header, (_cells(verdict) for verdict in results), left=3)


def _cells(verdict: Verdict) -> Sequence[str]:
    measured, what, value = verdict.figure
    form = ".2f" if what == "speedup" or value < 10 else ".0f"
    low, mid, high = (format(getattr(verdict.projected, bound), form) for bound in ("low", "mid", "high"))
    block = f", blocks of {measured.block_size}" if measured.block_size else ""
    told = "plain" if what == "plain" else f"{what}, {measured.task}{block}"
    return (
        measured.device,
        measured.model,
        measured.weights,
        str(measured.batch),
        told,
        format(value, form),
        mid,
        f"{low} to {high}",
        f"{100 * verdict.off:+.0f} %" + ("" if verdict.inside else " outside"),
        f"[{measured.engine}]({measured.source})",
    )
