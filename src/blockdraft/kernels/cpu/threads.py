"""Choice of the number of threads: the fastest one, since small networks gain nothing from more."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable

import psutil
import torch

from blockdraft.machine import cache_folder, processor

ROUNDS = 7  # measurements of each number of threads
LIMIT_SECONDS = 1.0  # after this, no further round begins
GAIN = 0.95  # more threads must take at most this share of the time of fewer
BUSY = 1.5  # load per core above which a measurement is not stored


def allowed_cores() -> int:
    """Return the number of logical cores that this process may use."""
    return len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1


def candidates() -> list[int]:
    """Return the numbers of threads to try: powers of two below the number of cores, and that number."""
    cores = min(psutil.cpu_count(logical=False) or 1, allowed_cores())
    return [2**i for i in range(cores.bit_length()) if 2**i < cores] + [cores]


def is_busy() -> bool:
    """Return whether the load of the last minute makes more threads look slower than they are."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * candidates()[-1]


def use_best_threads(work: Callable[[], object], facts: tuple[object, ...]) -> None:
    """Set torch's number of threads to the fastest for `work`, unless `OMP_NUM_THREADS` is set.

    The result is stored per machine and `facts`, except while the machine `is_busy`.

    Args:
        facts: Everything that decides the time of `work`, with a distinct `repr`.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    counts = candidates()
    key = hashlib.sha256(repr((facts, counts, processor(), torch.__version__)).encode()).hexdigest()[:16]
    path = cache_folder() / "threads" / f"{key}.json"
    try:
        best = int(json.loads(path.read_text())["threads"])
    except (OSError, ValueError, KeyError, TypeError):
        seconds = measure(work, counts)
        best = fastest(seconds)
        if not is_busy():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps({"threads": best, "seconds": seconds}), encoding="utf-8")
            partial.replace(path)
    torch.set_num_threads(best)


def measure(work: Callable[[], object], counts: list[int]) -> dict[int, float]:
    """Return the median seconds of `work` for each number of threads, from interleaved measurements."""
    began, times = time.perf_counter(), {count: list[float]() for count in counts}
    for _ in range(ROUNDS):
        for count in counts:
            torch.set_num_threads(count)
            work()  # starts the threads
            start = time.perf_counter()
            work()
            times[count].append(time.perf_counter() - start)
        if time.perf_counter() - began > LIMIT_SECONDS:
            break
    return {count: statistics.median(seconds) for count, seconds in times.items()}


def fastest(seconds: dict[int, float]) -> int:
    """Return the smallest number of threads that is nearly the fastest."""
    best = min(seconds)
    for count in sorted(seconds):
        if seconds[count] < GAIN * seconds[best]:
            best = count
    return best
