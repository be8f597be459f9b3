"""Choice of the number of threads: the fastest one, as measured once on this machine."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import psutil
import torch

from blockdraft.diskcache import key_of, written
from blockdraft.machine import OtherWork, allowed_cores, cache_folder, processor

log = logging.getLogger(__name__)

MIN_ROUNDS = 5  # measurements of each number of threads
MIN_SECONDS, MAX_SECONDS = 0.2, 1.0  # no round begins after MAX_SECONDS; a clock tick of the processor takes 0.01 s
TIE = 1.05  # a number of threads that takes less than this multiple of the least time is as fast


class ThreadChoice(NamedTuple):
    """How many threads run, and why."""

    threads: int
    reason: str

    def __str__(self) -> str:
        return f"{self.threads} of {cores()} cores, {self.reason}"


_chosen: ThreadChoice | None = None  # torch's number belongs to the process, and so does this


def set_threads(count: int, reason: str) -> None:
    """Set torch's number of threads, which is also that of the compiled forwards."""
    global _chosen
    torch.set_num_threads(count)
    _chosen = ThreadChoice(count, reason)


def thread_choice() -> ThreadChoice:
    """Return how many threads run, and why."""
    count = torch.get_num_threads()
    if _chosen is not None and _chosen.threads == count:
        return _chosen
    return ThreadChoice(count, "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "torch's default")


def cores() -> int:
    """Return the number of physical cores that this process may use."""
    return min(psutil.cpu_count(logical=False) or 1, allowed_cores())


def candidates() -> list[int]:
    """Return the numbers of threads to try: powers of two below the number of cores, and that number."""
    return [2**i for i in range(cores().bit_length()) if 2**i < cores()] + [cores()]


def use_best_threads(work: Callable[[], object], facts: tuple[object, ...]) -> None:
    """Set torch's number of threads to the fastest for `work`, unless `OMP_NUM_THREADS` is set.

    The result is stored per machine and `facts`. What is measured while other programs use the processor would slow
    down all later starts, so it is not stored: one thread per core runs, and the next start measures again.

    Args:
        facts: Everything that decides the time of `work`, with a distinct `repr`.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    counts = candidates()
    path = cache_folder() / "threads" / f"{key_of(facts, counts, processor(), torch.__version__)}.json"
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        seconds = {int(count): float(time) for count, time in json.loads(path.read_text())["least_seconds"].items()}
        if list(seconds) == counts:
            set_threads(fastest(seconds), f"measured earlier: {_in_words(seconds)}")
            return
    seconds, others = measure(work, counts)
    if others is not None:
        set_threads(counts[-1], f"all of them, since other programs used {others:.1f} cores during the measurement")
        return
    set_threads(fastest(seconds), f"measured now: {_in_words(seconds)}")
    try:
        with written(path) as partial:
            partial.write_text(json.dumps({"least_seconds": seconds}), encoding="utf-8")
    except OSError as error:
        log.warning("The number of threads cannot be stored in %s: %s", path, error)


def measure(work: Callable[[], object], counts: list[int]) -> tuple[dict[int, float], float | None]:
    """Measure `work` with each number of threads, interleaved.

    Returns:
        The least seconds of each number, and how many cores other programs used meanwhile, or None if next to none.
    """
    others, began, least = OtherWork(), time.perf_counter(), dict.fromkeys(counts, float("inf"))
    rounds = 0
    while (elapsed := time.perf_counter() - began) < MAX_SECONDS and (rounds < MIN_ROUNDS or elapsed < MIN_SECONDS):
        for count in counts:
            torch.set_num_threads(count)
            work()  # starts the threads
            start = time.perf_counter()
            work()
            least[count] = min(least[count], time.perf_counter() - start)
        rounds += 1
    return least, others.disturbing_cores()


def fastest(seconds: Mapping[int, float]) -> int:
    """Return the largest number of threads that is nearly the fastest: more of them prefill faster."""
    return max(count for count, time in seconds.items() if time < TIE * min(seconds.values()))


def _in_words(seconds: Mapping[int, float]) -> str:
    return ", ".join(f"{1000 * time:.0f} ms with {count}" for count, time in seconds.items())
