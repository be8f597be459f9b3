"""Projection of memory and speed, plain and drafted, of a model on a device.

A cycle that drafts is a forward of a block and a pass of the drafter (`step.py`), and yields tau tokens
(`acceptance.py`). `page/projection.js` is the same in JavaScript; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from blockdraft.drafters import DraftCost
from blockdraft.engine.adaptive.costs import CONTEXT, Costs
from blockdraft.errors import UsageError
from blockdraft.models import Drafter
from blockdraft.radar.acceptance import Tau, tau_of
from blockdraft.radar.devices import Machine
from blockdraft.radar.drafting import cost_for, kind_of
from blockdraft.radar.memory import memory_of
from blockdraft.radar.shape import Shape
from blockdraft.radar.step import Constants, Step, bits_of, constants

SHARE = 0.9  # of a device's memory that may be taken
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # blocks that are tried
LOSES, WINS = 0.98, 1.02  # of plain decoding, within which nothing is told

Confidence = Literal["calibrated", "measured", "device", "class", "extrapolated"]
# Interval of plain decoding around its projection, by what it rests on. Drafted speed adds that of tau.
BANDS = {
    "calibrated": (0.72, 1.45),
    "measured": (0.52, 1.9),
    "device": (0.7, 1.35),
    "class": (0.6, 1.5),
    "extrapolated": (0.45, 1.9),
}


@dataclass(frozen=True)
class Interval:
    """A projection: the likely value, and what it lies between nine times of ten."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Row:
    """One projection. Speeds are tokens per second of all texts of the batch together, as if the memory sufficed.

    Attributes:
        fits: Whether it fits the device's memory, with its drafter.
        memory_bytes: Weights, caches and workspace of target and drafter.
        first_token_seconds: For a prompt that fills the context, alone.
        drafted: None if nothing is drafted, as with a context of one block.
        block_size: Tokens of a block that are fastest, anchor included; 1 if nothing is drafted.
        why: What the figures come from.
    """

    device: str
    model: str
    weights: str
    context: int
    batch: int
    task: str
    fits: bool
    memory_bytes: int
    first_token_seconds: float
    plain: Interval
    drafted: Interval | None
    block_size: int
    confidence: Confidence
    why: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)


def project(
    shape: Shape,
    machine: Machine,
    weights: str = "bf16",
    context: int = 4096,
    batch: int = 1,
    task: str = "mean",
    *,
    drafter: Drafter | None = None,
    block_size: int | None = None,
    tau: float | None = None,
    eager: bool = False,
    constant: Constants | None = None,
    costs: Costs | None = None,
) -> Row:
    """Projection of a model on a machine.

    Args:
        weights: One of `BITS`, or "file" for those of a GGUF file.
        context: Tokens of each text.
        batch: Texts that are decoded together.
        task: One of `acceptance.TASKS`.
        drafter: By default the fastest of the published ones, or one that is still to be trained.
        block_size: Tokens of a block; by default the fastest.
        tau: tau that was measured with `block_size`, in the place of published ones.
        eager: Whether operations are started one by one, as by transformers.
        constant: What the class reaches, in the place of `constants`.
        costs: Seconds of cycles that were measured on the machine, of these weights with this drafter.

    Raises:
        UsageError: The context is longer than the model's, or an argument is not positive.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it has to be 1 or more.")
    if shape.context and context > shape.context:
        raise UsageError(
            f"context is {context}, but {shape.name} was made for {shape.context} tokens; give {shape.context} or less."
        )
    own = constant or constants()[machine.kind]
    bits = bits_of(shape, weights)
    step = Step(shape, machine, own, bits, weights, context, batch, eager)
    plain = _seconds(step, costs, 1)
    candidates: Sequence[Drafter | None] = [drafter] if drafter else (shape.drafters or (None,))
    best: _Choice | None = None
    for each in candidates:
        found = _choose(step, each, task, block_size, tau, costs)
        if best is None or found.speed > best.speed:
            best = found
    assert best is not None
    drafting = best.size <= context
    memory = memory_of(shape, bits, context, batch, best.size if drafting else 1, best.cost if drafting else None)
    confidence: Confidence = "extrapolated"
    if costs is not None:
        confidence = "calibrated"
    elif machine.measured:
        confidence = "measured"
    elif machine.name.split("x ")[-1] in own.devices:
        confidence = "device"
    elif own.reported:
        confidence = "class"
    low, high = BANDS[confidence]
    speed = batch / plain
    drafted = None
    if drafting:
        # The two sides of an interval are independent of each other: that of the machine, and that of tau.
        low_tau, mid_tau, high_tau = best.taus
        down = ((1 - low) ** 2 + (1 - low_tau / mid_tau) ** 2) ** 0.5
        up = ((high - 1) ** 2 + (high_tau / mid_tau - 1) ** 2) ** 0.5
        drafted = Interval(best.speed * max(1 - down, 0.1), best.speed, best.speed * (1 + up))
    gain = best.speed / speed if drafting else 1.0
    read, flops = step.read_bytes(1), step.flops(1)
    why = {
        "step_seconds": plain,
        "cycle_seconds": best.seconds if drafting else None,
        "read_bytes": int(read),
        "flops": flops,
        "bound": "memory" if step.memory_seconds(1) >= step.arithmetic_seconds(1) else "arithmetic",
        "block_bound": "memory"
        if step.memory_seconds(best.size) >= step.arithmetic_seconds(best.size)
        else "arithmetic",
        "experts_read": None if not shape.experts else [round(step.experts(1), 1), round(step.experts(best.size), 1)],
        "weight_bytes": memory["weights"],
        "drafter_bytes": memory["drafter"],
        "cache_bytes": memory["caches"],
        "workspace_bytes": memory["workspace"],
        "drafter": best.drafter.hub if best.drafter else None,
        "drafter_kind": kind_of(best.drafter) if drafting else None,
        "tau": None if not drafting else dict(zip(("low", "mid", "high"), best.taus, strict=True)),
        "tau_source": None if not drafting else best.tau.where or best.tau.source,
        "speedup": gain if drafting else None,
        "drafting": "loses" if gain < LOSES else "wins" if gain > WINS else "neither",
        "note": machine.note,
    }
    return Row(
        device=machine.name,
        model=shape.name,
        weights=weights,
        context=context,
        batch=batch,
        task=task,
        fits=sum(memory.values()) <= SHARE * machine.memory_gb * 1e9,
        memory_bytes=sum(memory.values()),
        first_token_seconds=step.prompt(),
        plain=Interval(speed * low, speed, speed * high),
        drafted=drafted,
        block_size=best.size if drafting else 1,
        confidence=confidence,
        why=why,
    )


def batch_for(speed: float, shape: Shape, machine: Machine, most: int = 4096, **options: Any) -> int | None:
    """Smallest power of two of texts that reach a speed together, drafted or plain, and fit; None if none do."""
    batch = 1
    while batch <= most:
        row = project(shape, machine, batch=batch, **options)
        if not row.fits:
            return None
        if max(row.plain.mid, row.drafted.mid if row.drafted else 0.0) >= speed:
            return batch
        batch *= 2
    return None


@dataclass(frozen=True)
class _Choice:
    """A drafter and the block size that is fastest with it."""

    drafter: Drafter | None
    cost: DraftCost
    tau: Tau
    taus: tuple[float, float, float]
    size: int
    seconds: float
    speed: float


def _seconds(step: Step, costs: Costs | None, size: int, cost: DraftCost | None = None) -> float:
    """Seconds of a cycle over so many tokens of each text, that drafts if a drafter's cost is given."""

    def roofline(step: Step) -> float:
        drafting = 0.0 if cost is None else step.draft(cost, size) + step.own.cycle_ms / 1e3
        return step.forward(size) + drafting

    if costs is None:
        return roofline(step)
    short = replace(step, context=CONTEXT)
    plain = costs.plain_cycle(step.batch)
    if cost is None:
        measured = plain
    elif costs.knows(tree=False):
        measured = costs.cycle(step.batch, size - 1, tree=False)[-1]
    else:
        measured = plain * roofline(short) / short.forward(1)
    return measured * roofline(step) / roofline(short)  # costs are of short texts


def _choose(
    step: Step,
    drafter: Drafter | None,
    task: str,
    block_size: int | None,
    measured: float | None,
    costs: Costs | None,
) -> _Choice:
    cost, tau = cost_for(drafter), tau_of(drafter, task)
    if measured is not None:
        size = block_size or tau.block_size
        tau = Tau(measured, measured, measured, size, "published", None)
    most = max(tau.block_size, (drafter.block_size if drafter else None) or 0)
    sizes = [block_size] if block_size else [size for size in SIZES if size <= most]
    best: _Choice | None = None
    for size in sizes:
        taus = tau.at(size)
        seconds = _seconds(step, costs, size, cost)
        found = _Choice(drafter, cost, tau, taus, size, seconds, step.batch * taus[1] / seconds)
        if best is None or found.speed > best.speed:
            best = found
    assert best is not None
    return best
