"""Cost and tau of drafters: weights from `DrafterSpec.cost`, tau from what was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Literal

from blockdraft.decode.step_time import block_tokens
from blockdraft.drafters import DraftCost, entries
from blockdraft.errors import UsageError
from blockdraft.models import PublishedDrafter, catalogue
from blockdraft.models.catalogue import BUNDLED
from blockdraft_radar.shape import Shape

DEFAULT_KIND = "dflash"  # kind of drafter assumed for a model without a published one
# Tasks by group. A group's name stands for the mean over its tasks, "mean" for the mean over the groups.
GROUPS = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("humaneval", "mbpp", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard"),
}
TASKS = ("mean", *GROUPS, *(task for tasks in GROUPS.values() for task in tasks))
SPREAD = 0.1  # relative spread of tau around its published value, for other prompts, temperatures and engines

Source = Literal["published", "like it"]


@cache
def cost_of(kind: str) -> DraftCost:
    """Return the cost of a kind of drafter, or the default cost if blockdraft does not run this kind."""
    specs = entries()
    return specs[kind].cost if kind in specs else DraftCost()


def cost_for(drafter: PublishedDrafter | None) -> DraftCost:
    """Return the cost of a drafter: its kind's, with the published vocabulary and number of layers."""
    cost = cost_of(kind_of(drafter))
    if drafter is None:
        return cost
    head, layers = drafter.draft_vocab or cost.head_vocabulary, drafter.layers or cost.layers
    return replace(cost, head_vocabulary=head, layers=layers)


def kind_of(drafter: PublishedDrafter | None) -> str:
    """Return the kind of a drafter; None stands for one that is still to be trained."""
    return drafter.kind if drafter else DEFAULT_KIND


def draft_weights(shape: Shape, cost: DraftCost) -> int:
    """Return the number of weights of a draft network, without the target's embedding and output head.

    Assumes layers as wide as the target's, and a fusion of the hidden states of the target layers.
    """
    attention = 2 * shape.hidden * shape.heads * shape.head_size + shape.hidden * shape.hidden // 2
    width = min(shape.intermediate, 4 * shape.hidden) if not shape.experts else 3 * shape.hidden
    return cost.layers * (attention + 3 * shape.hidden * width) + cost.target_layers * shape.hidden * shape.hidden


def head_weights(shape: Shape, cost: DraftCost) -> int:
    """Return the number of weights of the output head that a drafter runs."""
    return shape.hidden * min(cost.head_vocabulary or shape.vocabulary, shape.vocabulary)


@dataclass(frozen=True)
class Tau:
    """Tokens committed per target forward pass, bonus included.

    Attributes:
        low, mid, high: Interval at the block size.
        block_size: Block size of the measurement, anchor included.
        source: "published" for this drafter and task, "like it" for the range of drafters of its kind.
        where: Address of the publication; None for a range.
    """

    low: float
    mid: float
    high: float
    block_size: int
    source: Source
    where: str | None = None

    def at(self, block_size: int) -> tuple[float, float, float]:
        """Return low, mid and high at another block size, for equal acceptance probabilities at all positions."""
        if block_size == self.block_size:
            return self.low, self.mid, self.high
        low, mid, high = (
            block_tokens(_acceptance_prob(tau, self.block_size), block_size) for tau in (self.low, self.mid, self.high)
        )
        return low, mid, high


@cache
def _acceptance_prob(tau: float, block_size: int) -> float:
    """Invert `block_tokens` by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if block_tokens(middle, block_size) < tau else (low, middle)
    return low


def checked_task(task: str) -> str:
    """Return the task. Raise a UsageError if there is no published tau for it."""
    if task not in TASKS:
        raise UsageError(f"task must be one of {', '.join(TASKS)}, which have published tau, got {task!r}.")
    return task


def of_task(taus: Mapping[str, float], task: str) -> float | None:
    """Return tau of a task or group of tasks from published values, or None if they lack it."""
    if task in taus:
        return taus[task]
    if task in GROUPS:
        values = [taus[name] for name in GROUPS[task] if name in taus]
    elif task == "mean":
        values = [tau for group in GROUPS if (tau := of_task(taus, group)) is not None]
    else:
        values = []
    return sum(values) / len(values) if values else None


def tau_of(drafter: PublishedDrafter | None, task: str) -> Tau:
    """Return tau of a drafter on a task. Greedy values without reasoning take precedence.

    Args:
        drafter: None stands for a drafter of the kind `DEFAULT_KIND` that is still to be trained.
        task: One of `TASKS`.
    """
    kind = kind_of(drafter)
    size = (drafter.block_size if drafter else None) or cost_of(kind).block_size
    candidates: list[tuple[tuple[bool, bool], Tau]] = []
    for measured in drafter.measured if drafter else ():
        tau = of_task(measured.tau, task)
        if tau is not None:
            block = max(measured.block_size or size, 2)
            rank = block != size, measured.temperature not in (None, 0)
            interval = max(1.0, tau * (1 - SPREAD)), tau, tau * (1 + SPREAD)
            candidates.append((rank, Tau(*interval, block, "published", measured.source)))
    if candidates:
        return min(candidates, key=lambda candidate: candidate[0])[1]
    probs = (
        _acceptance_probs(kind, task)
        or _acceptance_probs(DEFAULT_KIND, task)
        or _acceptance_probs(DEFAULT_KIND, "mean")
    )
    low, mid, high = (block_tokens(prob, size) for prob in (probs[0], median(probs), probs[-1]))
    return Tau(low, mid, high, size, "like it")


@cache
def _acceptance_probs(kind: str, task: str) -> tuple[float, ...]:
    """Return the sorted acceptance probabilities of all published drafters of a kind on a task.

    Leaves out this package's drafters, which were trained on too few tokens to stand for others.
    """
    drafters = [d for model in catalogue() for d in model.drafters if d.kind == kind and d.hub != BUNDLED]
    return tuple(
        sorted(
            _acceptance_prob(tau, measured.block_size or drafter.block_size or cost_of(kind).block_size)
            for drafter in drafters
            for measured in drafter.measured
            if (tau := of_task(measured.tau, task)) is not None
        )
    )
