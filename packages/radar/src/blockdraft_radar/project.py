"""Projection of the memory and speed of a model on a machine, with and without a drafter.

A drafted step is a forward pass over a block and a pass of the drafter (`step.py`), and yields tau tokens
(`drafting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from blockdraft.decode.step_time import CONTEXT, Costs
from blockdraft.drafters import DraftCost
from blockdraft.errors import UsageError
from blockdraft.models import PublishedDrafter
from blockdraft_radar.devices import Machine
from blockdraft_radar.drafting import Tau, cost_for, kind_of, tau_of
from blockdraft_radar.memory import memory_of
from blockdraft_radar.shape import Shape
from blockdraft_radar.step import Constants, Roofline, bits_of, constants, kind_of_weights

SHARE = 0.9  # usable share of a device's memory
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # candidate block sizes
LOSES, WINS = 0.98, 1.02  # speed-ups between these are reported as neither

Confidence = Literal["calibrated", "measured", "device", "class", "extrapolated"]
# Relative interval of plain speed by confidence. The interval of drafted speed includes tau's as well.
BANDS = {
    "calibrated": (0.72, 1.45),
    "measured": (0.52, 1.9),
    "device": (0.7, 1.35),
    "class": (0.6, 1.5),
    "extrapolated": (0.45, 1.9),
}


@dataclass(frozen=True)
class Interval:
    """A projected value with its 90 % interval."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Projection:
    """Projected memory and speed. Speeds are tokens per second of the whole batch, even if the memory is too small.

    Attributes:
        fits: Whether target and drafter fit the device's memory.
        memory_bytes: Weights, caches and workspace of target and drafter.
        first_token_seconds: Time to first token of a single prompt that fills the context.
        drafted: None if the context is too short for a block.
        block_size: Fastest block size, anchor included; 1 if nothing is drafted.
        why: Details of the computation.
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
        """Return the JSON object that `--json` prints."""
        return asdict(self)


def project(
    shape: Shape,
    machine: Machine,
    weights: str = "bf16",
    context: int = 4096,
    batch: int = 1,
    task: str = "mean",
    *,
    drafter: PublishedDrafter | None = None,
    block_size: int | None = None,
    tau: float | None = None,
    eager: bool = False,
    constant: Constants | None = None,
    costs: Costs | None = None,
) -> Projection:
    """Project the memory and speed of a model on a machine.

    Args:
        weights: One of `BITS`, or "file" for the weights of a GGUF file.
        context: Tokens per sequence.
        batch: Number of sequences.
        task: One of `drafting.TASKS`.
        drafter: Drafter; by default the fastest published one, or else one that is still to be trained.
        block_size: Block size; by default the fastest.
        tau: Measured tau at `block_size`, used instead of published values.
        eager: Whether the engine runs operations eagerly, as transformers does.
        constant: Constants of the device, used instead of `constants`.
        costs: Step times measured on the machine with these weights and this drafter.

    Raises:
        UsageError: The context is longer than the model's, or an argument is not positive.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}.")
    if shape.context and context > shape.context:
        raise UsageError(f"context must be at most {shape.context}, the context of {shape.name}, got {context}.")
    constant = constant or constants()[machine.kind]
    weights = weights if weights == "file" else kind_of_weights(weights)
    bits = bits_of(shape, weights)
    step = Roofline(shape, machine, constant, bits, weights, context, batch, eager)
    plain = _seconds(step, costs, 1)
    candidates: Sequence[PublishedDrafter | None] = [drafter] if drafter else (shape.drafters or (None,))
    choices = (_choose(step, candidate, task, block_size, tau, costs) for candidate in candidates)
    best = max(choices, key=lambda choice: choice.speed)
    drafting = best.size <= context
    memory = memory_of(shape, bits, context, batch, best.size if drafting else 1, best.cost if drafting else None)
    confidence: Confidence = "extrapolated"
    if costs is not None:
        confidence = "calibrated"
    elif machine.measured:
        confidence = "measured"
    elif machine.name.split("x ")[-1] in constant.devices:
        confidence = "device"
    elif constant.reported:
        confidence = "class"
    low, high = BANDS[confidence]
    speed = batch / plain
    drafted = None
    if drafting:
        # The errors of the machine's speed and of tau are independent, so they add in quadrature.
        low_tau, mid_tau, high_tau = best.taus
        down = ((1 - low) ** 2 + (1 - low_tau / mid_tau) ** 2) ** 0.5
        up = ((high - 1) ** 2 + (high_tau / mid_tau - 1) ** 2) ** 0.5
        drafted = Interval(best.speed * max(1 - down, 0.1), best.speed, best.speed * (1 + up))
    gain = best.speed / speed if drafting else 1.0

    def bound(size: int) -> str:
        return "memory" if step.memory_seconds(size) >= step.arithmetic_seconds(size) else "arithmetic"

    why = {
        "step_seconds": plain,
        "drafted_step_seconds": best.seconds if drafting else None,
        "read_bytes": int(step.read_bytes(1)),
        "flops": step.flops(1),
        "bound": bound(1),
        "block_bound": bound(best.size),
        "experts_read": None if not shape.experts else [round(step.experts(1), 1), round(step.experts(best.size), 1)],
        "weight_bytes": memory["weights"],
        "drafter_bytes": memory["drafter"],
        "cache_bytes": memory["caches"],
        "workspace_bytes": memory["workspace"],
        "drafter": best.drafter.hub if best.drafter else None,
        "drafter_kind": kind_of(best.drafter) if drafting else None,
        "tau": None if not drafting else dict(zip(("low", "mid", "high"), best.taus, strict=True)),
        "tau_source": None if not drafting else best.tau.where or best.tau.source,
        "least_tau": best.seconds / plain if drafting else None,  # below it drafting loses
        "speedup": gain if drafting else None,
        "drafting": "loses" if gain < LOSES else "wins" if gain > WINS else "neither",
        "note": machine.note,
    }
    return Projection(
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


def batch_for(speed: float, shape: Shape, machine: Machine, max_batch: int = 4096, **options: Any) -> int | None:
    """Return the smallest power of two as batch size that reaches a speed, or None if none fits and does."""
    batch = 1
    while batch <= max_batch:
        projection = project(shape, machine, batch=batch, **options)
        if not projection.fits:
            return None
        if max(projection.plain.mid, projection.drafted.mid if projection.drafted else 0.0) >= speed:
            return batch
        batch *= 2
    return None


@dataclass(frozen=True)
class _Choice:
    """A drafter with its fastest block size."""

    drafter: PublishedDrafter | None
    cost: DraftCost
    tau: Tau
    taus: tuple[float, float, float]
    size: int
    seconds: float
    speed: float


def _seconds(step: Roofline, costs: Costs | None, size: int, cost: DraftCost | None = None) -> float:
    """Return the seconds of a step over `size` tokens per sequence. It drafts if the cost of a drafter is given."""
    seconds = step.seconds(size, cost)
    if costs is None:
        return seconds
    short = replace(step, context=CONTEXT)  # of the measured steps
    if cost is not None and costs.knows(tree=False):
        return costs.drafted_steps(step.batch, size - 1, tree=False)[-1] * seconds / short.seconds(size, cost)
    return costs.plain_step(step.batch) * seconds / short.seconds(1)


def _choose(
    step: Roofline,
    drafter: PublishedDrafter | None,
    task: str,
    block_size: int | None,
    measured: float | None,
    costs: Costs | None,
) -> _Choice:
    cost, tau = cost_for(drafter), tau_of(drafter, task)
    if measured is not None:
        size = block_size or tau.block_size
        tau = Tau(measured, measured, measured, size, "published", None)
    max_size = max(tau.block_size, (drafter.block_size if drafter else None) or 0)
    choices = []
    for size in [block_size] if block_size else [size for size in SIZES if size <= max_size]:
        taus, seconds = tau.at(size), _seconds(step, costs, size, cost)
        choices.append(_Choice(drafter, cost, tau, taus, size, seconds, step.batch * taus[1] / seconds))
    return max(choices, key=lambda choice: choice.speed)
