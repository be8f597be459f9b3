"""Interleaved runs, so that a slow moment of the machine affects all alike, and figures from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
W = TypeVar("W")
K = TypeVar("K", bound=Hashable)

RESAMPLES = 2000
CONFIDENCE = 0.95


def interleaved(
    tasks: Sequence[T], ways: Sequence[W], repeats: int, takes: Callable[[T, W], bool] = lambda task, way: True
) -> Iterator[tuple[int, T, W]]:
    """Yield repeat, task and method of each step. Another method begins with each task and in each repeat.

    Args:
        takes: Whether a way does a task.
    """
    for repeat in range(repeats):
        for i, task in enumerate(tasks):
            own = [way for way in ways if takes(task, way)]
            first = (repeat + i) % max(len(own), 1)
            for way in (*own[first:], *own[:first]):
                yield repeat, task, way


def time_interleaved(
    calls: Mapping[K, Callable[[], Any]],
    rounds: int,
    warm_up: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, list[float]]:
    """Return the seconds of each call in each round, without the warm-up. Every round makes each call once."""
    found: dict[K, list[float]] = {key: [] for key in calls}
    for number in range(warm_up + rounds):
        for key, call in calls.items():
            if number < warm_up:
                call()
            else:
                began = clock()
                call()
                found[key].append(clock() - began)
    return found


class Timed(Protocol):
    """An answer, or a part of one.

    Attributes:
        repeat: Round that it belongs to.
        later_tokens: Tokens that came after the prompt's forward.
        steps: Forwards of the target after that one.
        decode_seconds: Seconds from there to the last token.
    """

    repeat: Any
    later_tokens: int
    steps: int
    decode_seconds: float


def rates(answers: Iterable[Timed], prompts: int) -> dict[int, float]:
    """Return the tokens per second of each repeat that has a response to every prompt."""
    return {
        repeat: sum(answer.later_tokens for answer in own) / seconds
        for repeat, own in groups(answers, lambda answer: answer.repeat).items()
        if len(own) == prompts and (seconds := sum(answer.decode_seconds for answer in own)) > 0
    }


def tau(answers: Sequence[Timed]) -> float:
    """Return the tokens per step."""
    return sum(answer.later_tokens for answer in answers) / max(sum(answer.steps for answer in answers), 1)


def ratios(rates: Mapping[K, float], others: Mapping[K, float]) -> list[float]:
    """Return the ratios within a repeat."""
    return [rate / others[repeat] for repeat, rate in rates.items() if others.get(repeat)]


def median(values: Iterable[float]) -> float | None:
    """Return the median, or None without values."""
    known = list(values)
    return statistics.median(known) if known else None


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap interval of the median, which holds `CONFIDENCE` of the medians of resampled values."""
    random = Random(seed)
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return medians[cut], medians[-1 - cut]


def groups(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by a key, in the order in which the keys first occur."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
