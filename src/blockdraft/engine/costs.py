"""What cycles cost on this machine: measured once for a pair, kept on disk, and interpolated."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockdraft.engine.batch import Batch
from blockdraft.proposal import Plan
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from blockdraft.engine.engine import Engine

ROWS = (1, 2, 4, 8, 16, 32, 64)
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXT = 128  # committed tokens of each row while measuring
REPEATS = 9
LIMIT_SECONDS = 20.0  # once measuring has taken so long, larger sizes are left to extrapolation


@dataclass(frozen=True)
class Costs:
    """Seconds that cycles take. Between measured sizes they are interpolated, beyond them extrapolated.

    Attributes:
        nodes, forward: Target forward of one row with so many nodes.
        rows, plain: Whole cycle of so many rows that does not draft.
        draft: What a cycle of so many rows takes longer when it drafts, the target's work on the guesses left out.
    """

    nodes: tuple[int, ...]
    forward: tuple[float, ...]
    rows: tuple[int, ...]
    plain: tuple[float, ...]
    draft: tuple[float, ...]

    def plain_cycle(self, rows: int) -> float:
        """Time of a cycle of `rows` rows that does not draft."""
        return _at(rows, self.rows, self.plain)

    def cycle(self, rows: int, most: int) -> list[float]:
        """Time of a cycle that drafts, by guesses a row: entry n is for n guesses, from 0 to `most`."""
        fixed = self.plain_cycle(rows) + _at(rows, self.rows, self.draft)
        return [fixed + self.guesses(rows, count) for count in range(most + 1)]

    def guesses(self, rows: int, count: int) -> float:
        """Time that the target needs for `count` guesses in each of `rows` rows, besides the anchors.

        Read off the forwards of one row: a batch shares the weights, whichever row a node belongs to.
        """
        return max(_at(rows * (count + 1), self.nodes, self.forward) - _at(rows, self.nodes, self.forward), 0.0)


def _at(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    if x <= xs[-1] or len(xs) == 1:
        return float(np.interp(x, xs, ys))
    return ys[-1] + max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), 0.0) * (x - xs[-1])


def measure(engine: Engine, report: Callable[[str], None] = lambda line: None) -> Costs:
    """Measure an engine's pair on this machine, up to its largest batch.

    It takes a few seconds for a small target and not much more than `LIMIT_SECONDS` for a large one.

    Args:
        report: Called with lines of progress.
    """
    began = time.perf_counter()
    target = engine.target
    context = min(CONTEXT, target.max_context // 4)
    nodes: list[int] = []
    forward: list[float] = []
    batch = _batch(engine, 1, context, max(NODES))

    def score(count: int) -> None:
        tokens, star = torch.zeros(2, 1, count, dtype=torch.long, device=target.device)
        star[:, 0] = -1  # every guess hangs on the anchor, so that the mask is that of a tree
        target.forward(tokens, star, batch.cache, engine.drafter.taps)

    for count in NODES:
        if nodes and (time.perf_counter() - began > LIMIT_SECONDS / 2 or context + count > target.max_context):
            break
        nodes.append(count)
        forward.append(_seconds(engine, partial(score, count)))
        report(f"target forward of {count} tokens: {1000 * forward[-1]:.2f} ms")
    rows: list[int] = []
    plain: list[float] = []
    draft: list[float] = []
    for size in [size for size in ROWS if size < engine.max_batch_size] + [engine.max_batch_size]:
        if rows and time.perf_counter() - began > LIMIT_SECONDS:
            break
        params = [SamplingParams()] * size
        seconds = []
        for block_size in (1, engine.drafter.block_size):
            batch = _batch(engine, size, context, 2 * (REPEATS + 1) * engine.drafter.block_size)
            seconds.append(_seconds(engine, partial(engine.step, batch, Plan(block_size, params))))
        rows.append(size)
        plain.append(seconds[0])
        known = Costs(tuple(nodes), tuple(forward), tuple(rows), tuple(plain), tuple(plain))
        draft.append(max(seconds[1] - seconds[0] - known.guesses(size, engine.drafter.block_size - 1), 0.0))
        report(f"{size} rows: plain cycle {1000 * plain[-1]:.2f} ms, drafting {1000 * draft[-1]:.2f} ms more")
    return Costs(tuple(nodes), tuple(forward), tuple(rows), tuple(plain), tuple(draft))


def _batch(engine: Engine, rows: int, context: int, room: int) -> Batch:
    """Rows of arbitrary tokens, with slots for `room` more."""
    room = min(room, engine.target.max_context - context)
    prompt = [(7 * i + 3) % engine.target.vocab_size for i in range(context)]
    params = SamplingParams(room, ignore_eos=True)
    return engine.prefill([engine.request(prompt, params) for _ in range(rows)])


def _seconds(engine: Engine, work: Callable[[], object]) -> float:
    """Median time of a piece of work, after one run that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        began = engine.now()
        work()
        times.append(engine.now() - began)
    return statistics.median(times[1:])


def load_or_measure(engine: Engine, report: Callable[[str], None] = lambda line: None, anew: bool = False) -> Costs:
    """The costs of an engine's pair from the cache on disk, or measured now and put there.

    A measurement is kept for each target, drafter, dtype, device, number of threads, largest batch and version of torch
    and transformers, in the folder that `BLOCKDRAFT_CACHE` names, or else in `~/.cache/blockdraft`.

    Args:
        anew: Measure even if there is a measurement.
    """
    path = cache_folder() / "costs" / f"{_fingerprint(engine)}.json"
    if path.is_file() and not anew:
        try:
            return Costs(**{name: tuple(values) for name, values in json.loads(path.read_text()).items()})
        except (ValueError, TypeError, AttributeError):
            report(f"{path} cannot be read; measuring again")
    costs = measure(engine, report)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(costs)), encoding="utf-8")
    partial.replace(path)
    return costs


def cache_folder() -> Path:
    return Path(os.environ.get("BLOCKDRAFT_CACHE") or Path.home() / ".cache" / "blockdraft")


def _fingerprint(engine: Engine) -> str:
    target, drafter = engine.target, engine.drafter
    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    facts = [
        *(target.path, target.hidden_size, target.num_layers, target.vocab_size, target.dtype, target.device.type, gpu),
        *(type(drafter).__name__, drafter.path, drafter.block_size, drafter.taps),
        *(engine.max_batch_size, torch.get_num_threads(), platform.node(), platform.processor()),
        *(version("torch"), version("transformers"), version("blockdraft")),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
