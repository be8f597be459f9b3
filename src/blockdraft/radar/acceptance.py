"""tau by task: what was published of a drafter, or of drafters like it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal

from blockdraft.errors import UsageError
from blockdraft.models import Drafter, catalogue
from blockdraft.models.catalogue import BUNDLED
from blockdraft.radar.drafting import LIKELY, cost_of, kind_of

# Tasks by what is asked for. A name of a group stands for the mean over its tasks, "mean" for that over the groups.
GROUPS = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("humaneval", "mbpp", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard"),
}
TASKS = ("mean", *GROUPS, *(task for tasks in GROUPS.values() for task in tasks))
SPREAD = 0.1  # spread of tau around its published value: other prompts, temperatures and builds of an engine

Source = Literal["published", "like it"]


@dataclass(frozen=True)
class Tau:
    """Tokens committed for each forward of the target, bonus included.

    Attributes:
        low, mid, high: Interval at the block size.
        block_size: Tokens of a block that they were measured with, anchor included.
        source: Whether it was published of this drafter and task, or is the range of drafters of its kind.
        where: Address of the publication; None for a range.
    """

    low: float
    mid: float
    high: float
    block_size: int
    source: Source
    where: str | None = None

    def at(self, block_size: int) -> tuple[float, float, float]:
        """Low, mid and high with another block size, as if each guess were accepted with the same chance."""
        if block_size == self.block_size:
            return self.low, self.mid, self.high
        low, mid, high = (
            expected(_acceptance_prob(tau, self.block_size), block_size) for tau in (self.low, self.mid, self.high)
        )
        return low, mid, high


def expected(acceptance_prob: float, block_size: int) -> float:
    """tau where each guess is accepted with a chance: 1 + a + a^2 + ... up to the block's end."""
    return block_size if acceptance_prob == 1 else (1 - acceptance_prob**block_size) / (1 - acceptance_prob)


@cache
def _acceptance_prob(tau: float, block_size: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, block_size) < tau else (low, middle)
    return low


def checked_task(task: str) -> str:
    """A task that tau is known of.

    Raises:
        UsageError: Nobody published tau of it.
    """
    if task not in TASKS:
        raise UsageError(f"{task!r} is no task with published tau; those are {', '.join(TASKS)}.")
    return task


def of_task(taus: Mapping[str, float], task: str) -> float | None:
    """tau of a task or group of tasks among published ones; None if it is not among them."""
    if task in taus:
        return taus[task]
    if task in GROUPS:
        found = [taus[each] for each in GROUPS[task] if each in taus]
        return sum(found) / len(found) if found else None
    if task == "mean":
        groups = [tau for group in GROUPS if (tau := of_task(taus, group)) is not None]
        return sum(groups) / len(groups) if groups else None
    return None


def tau_of(drafter: Drafter | None, task: str) -> Tau:
    """tau of a drafter on a task. Greedy figures without reasoning come first among published ones.

    Args:
        drafter: None stands for one of the kind `LIKELY` that is still to be trained.
        task: One of `TASKS`.
    """
    kind = kind_of(drafter)
    size = (drafter.block_size if drafter else None) or cost_of(kind).block_size
    best: tuple[tuple[int, int], Tau] | None = None
    for measured in drafter.measured if drafter else ():
        tau = of_task(measured.tau, task)
        if tau is None:
            continue
        block = max(measured.block_size or size, 2)
        rank = (int(block != size), int(measured.temperature not in (None, 0)))
        found = Tau(max(1.0, tau * (1 - SPREAD)), tau, tau * (1 + SPREAD), block, "published", measured.source)
        if best is None or rank < best[0]:
            best = rank, found
    if best is not None:
        return best[1]
    acceptance_probs = (
        _acceptance_probs(kind, task) or _acceptance_probs(LIKELY, task) or _acceptance_probs(LIKELY, "mean")
    )
    low, mid, high = (
        expected(acceptance_prob, size)
        for acceptance_prob in (acceptance_probs[0], median(acceptance_probs), acceptance_probs[-1])
    )
    return Tau(low, mid, high, size, "like it")


@cache
def _acceptance_probs(kind: str, task: str) -> tuple[float, ...]:
    """Chances of guesses of all published drafters of a kind on a task, rising."""
    found: list[float] = []
    for drafter in _drafters(kind):
        for measured in drafter.measured:
            tau = of_task(measured.tau, task)
            if tau is not None:
                block = measured.block_size or drafter.block_size or cost_of(kind).block_size
                found.append(_acceptance_prob(tau, block))
    return tuple(sorted(found))


def _drafters(kind: str) -> Iterable[Drafter]:
    """Published drafters of a kind. Those of this package saw too few tokens to stand for others."""
    every = (drafter for model in catalogue() for drafter in model.drafters)
    return (drafter for drafter in every if drafter.kind == kind and drafter.hub != BUNDLED)
