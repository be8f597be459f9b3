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
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockdraft.engine.probe import Probe
from blockdraft.machine import cache_folder

if TYPE_CHECKING:
    from blockdraft.engine.engine import Engine

LAYOUT = 3  # of the file; a new one measures anew
ROWS = (1, 2, 4, 8, 16, 32, 64)
NODES = (1, 2, 4, 6, 7, 8, 12, 13, 16, 24, 32, 48, 64, 128, 256, 512)  # a CPU takes six rows at a time
CHAIN_GUESSES = (1, 3, 7, 15)
TREE_GUESSES = (1, 4, 8, 16, 32, 64, 128)
MOST_GUESSES = 512  # of all rows together; larger trees are extrapolated
CONTEXT = 128  # committed tokens of each row while measuring
REPEATS = 7
LIMIT_SECONDS = 25.0  # once measuring has taken so long, larger sizes are left to extrapolation


@dataclass(frozen=True)
class Costs:
    """Seconds that cycles take. Between measured sizes they are interpolated, beyond them extrapolated.

    Attributes:
        nodes, forward: Target forward of one row with so many nodes.
        rows, plain: Whole cycle of so many rows that does not draft.
        chain, tree: For each of these numbers of rows, what a cycle takes longer when it drafts, the target's work on
            the guesses left out; and the time of this work over what `forward` says of it, which knows one row only.
    """

    nodes: tuple[int, ...]
    forward: tuple[float, ...]
    rows: tuple[int, ...]
    plain: tuple[float, ...]
    chain: tuple[tuple[float, float], ...]
    tree: tuple[tuple[float, float], ...]

    def plain_cycle(self, rows: int) -> float:
        """Time of a cycle of `rows` rows that does not draft."""
        return _at(rows, self.rows, self.plain)

    def cycle(self, rows: int, most: int, tree: bool) -> list[float]:
        """Time of a cycle that drafts, by guesses a row: entry n is for n guesses, from 0 to `most`."""
        curves = [
            [plain + extra + scale * _more(self.nodes, self.forward, size, count) for count in range(most + 1)]
            for size, plain, (extra, scale) in zip(
                self.rows, self.plain, self.tree if tree else self.chain, strict=True
            )
        ]
        return [_at(rows, self.rows, seconds) for seconds in zip(*curves, strict=True)]


def _more(nodes: Sequence[int], forward: Sequence[float], rows: int, guesses: int) -> float:
    """Time of so many guesses a row, were the nodes of all rows those of one: they share the weights."""
    return max(_at(rows * (guesses + 1), nodes, forward) - _at(rows, nodes, forward), 0.0)


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
    runner, rows_of_one = Probe(target, engine.drafter).rows(1, context, max(NODES))

    def score(count: int) -> None:
        tokens = torch.zeros(1, count, dtype=torch.long, device=target.device)
        star = torch.tensor([[-1] + [0] * (count - 1)])  # all hang on the anchor, so that the mask is that of a tree
        target.forward(tokens, star, runner.cache.of([rows_of_one[0].start]), engine.drafter.taps)

    for count in NODES:
        if nodes and (time.perf_counter() - began > LIMIT_SECONDS / 2 or context + count > target.max_context):
            break
        nodes.append(count)
        forward.append(_seconds(engine, partial(score, count)))
        report(f"target forward of {count} tokens: {1000 * forward[-1]:.2f} ms")
    longest = engine.drafter.block_size - 1
    chain_guesses = sorted({min(count, longest) for count in (*CHAIN_GUESSES, longest)})
    rows: list[int] = []
    plain: list[float] = []
    chain: list[tuple[float, float]] = []
    tree: list[tuple[float, float]] = []
    for size in [size for size in ROWS if size < engine.max_batch_size] + [engine.max_batch_size]:
        if rows and time.perf_counter() - began > LIMIT_SECONDS:
            break
        trees = [count for count in TREE_GUESSES if size * count <= MOST_GUESSES] or TREE_GUESSES[:1]
        rows.append(size)
        plain.append(_cycle(engine, size, context, 0)[1])
        for found, counts in ((chain, chain_guesses), (tree, trees)):
            points = [_cycle(engine, size, context, count, found is tree) for count in counts]
            work = [_more(nodes, forward, size, guesses) for guesses, _ in points]
            found.append(_line(work, [seconds - plain[-1] for _, seconds in points]))
        added = (f"a {kind} {1000 * found[-1][0]:.2f} ms" for kind, found in (("chain", chain), ("tree", tree)))
        report(f"{size} rows: plain cycle {1000 * plain[-1]:.2f} ms; drafting adds to " + ", to ".join(added))
    return Costs(tuple(nodes), tuple(forward), tuple(rows), tuple(plain), tuple(chain), tuple(tree))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Offset and slope, both at least 0, of the line through most of the points (Theil and Sen): machines have other
    work too, and a few measurements are far off."""
    pairs = combinations(zip(xs, ys, strict=True), 2)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if a[0] != b[0]]
    slope = max(statistics.median(slopes), 0.0) if slopes else 1.0
    offset = statistics.median(y - slope * x for x, y in zip(xs, ys, strict=True))
    return max(offset, 0.0), slope


def _cycle(engine: Engine, rows: int, context: int, guesses: int, tree: bool = False) -> tuple[int, float]:
    """How many guesses a row there were, of those asked for, and the median time of a cycle with them."""
    found = Probe(engine.target, engine.drafter)(rows, context, guesses, tree, REPEATS + 1)
    return int(statistics.median(made for made, _ in found)), statistics.median(seconds for _, seconds in found[1:])


def _seconds(engine: Engine, work: Callable[[], object]) -> float:
    """Median time of a piece of work, after one run that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def load_or_measure(engine: Engine, report: Callable[[str], None] = lambda line: None, anew: bool = False) -> Costs:
    """The costs of an engine's pair from the cache on disk, or measured now and put there.

    A measurement is kept for each target, backend, drafter, dtype, device, number of threads, largest batch and version
    of torch and transformers, in the folder that `BLOCKDRAFT_CACHE` names, or else in `~/.cache/blockdraft`.

    Args:
        anew: Measure even if there is a measurement.
    """
    path = cache_folder() / "costs" / f"{_fingerprint(engine)}.json"
    if path.is_file() and not anew:
        try:
            return Costs(**{name: _tuples(values) for name, values in json.loads(path.read_text()).items()})
        except (ValueError, TypeError, AttributeError):
            report(f"{path} cannot be read; measuring again")
    costs = measure(engine, report)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(costs)), encoding="utf-8")
    partial.replace(path)
    return costs


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fingerprint(engine: Engine) -> str:
    target, drafter = engine.target, engine.drafter
    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    facts = [
        *(
            target.path,
            target.running,
            target.hidden_size,
            target.num_layers,
            target.vocab_size,
            target.dtype,
            target.device.type,
            gpu,
        ),
        *(type(drafter).__name__, drafter.path, drafter.block_size, drafter.taps),
        *(engine.max_batch_size, torch.get_num_threads(), platform.node(), platform.processor()),
        *(LAYOUT, version("torch"), version("transformers"), version("blockdraft")),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
