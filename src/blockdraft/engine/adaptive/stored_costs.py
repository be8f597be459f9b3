"""What cycles cost on this machine: measured when asked for or learned while decoding, kept on disk, interpolated."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blockdraft.drafters import Drafter
from blockdraft.errors import UsageError
from blockdraft.machine import cache_folder
from blockdraft.targets import Target

LAYOUT = 4  # of the file; files of other layouts are not read
ROWS = (1, 2, 4, 8, 16, 32, 64)
CHAIN_DRAFT_TOKENS = (1, 2, 3, 4, 5, 7, 11, 15)
TREE_DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_DRAFT_TOKENS = 512  # of all rows together; larger trees are extrapolated
CONTEXT = 128  # committed tokens of each row while measuring
REPEATS = 7
LIMIT_SECONDS = 25.0  # once measuring has taken so long, larger batches are left to extrapolation
DRAFT_PASS = 0.2  # of a plain cycle's time, where nothing is known of the machine
DRAFT_TOKEN = 0.05  # the same of each guess

Points = tuple[tuple[int, float], ...]  # guesses of a row, rising, and the seconds of a cycle with them


@dataclass(frozen=True)
class Costs:
    """Seconds that cycles take. Between known sizes they are interpolated, beyond them extrapolated.

    Attributes:
        rows: Numbers of rows, rising.
        plain: For each, a cycle that does not draft.
        chain, tree: For each, cycles that draft; an empty tuple where none are known.
        date: When they were measured or learned, in seconds since 1970.
    """

    rows: tuple[int, ...]
    plain: tuple[float, ...]
    chain: tuple[Points, ...]
    tree: tuple[Points, ...]
    date: float = 0.0

    def plain_cycle(self, rows: int) -> float:
        """Time of a cycle of `rows` rows that does not draft."""
        found: float = _at(rows, self.rows, self.plain).item()
        return found

    def knows(self, tree: bool) -> bool:
        """Whether there are times of cycles that draft chains, or trees."""
        return any(self.tree if tree else self.chain)

    def updated(self, newer: Costs) -> Costs:
        """These costs, with those that are newer in the place of what they know of the same numbers of rows."""
        known: dict[int, tuple[float, Points, Points]] = {}
        for costs in (self, newer):
            for rows, plain, chain, tree in zip(costs.rows, costs.plain, costs.chain, costs.tree, strict=True):
                _, older_chain, older_tree = known.get(rows, (0.0, (), ()))
                known[rows] = plain, chain or older_chain, tree or older_tree
        return _costs(known, newer.date)

    def cycle(self, rows: int, most: int, tree: bool) -> list[float]:
        """Time of a cycle that drafts, by guesses a row: entry n is for n guesses, from 0 to `most`."""
        counts, sizes, curves = np.arange(most + 1), [], []
        for size, points in zip(self.rows, self.tree if tree else self.chain, strict=True):
            if points:
                draft_tokens, seconds = zip(*points, strict=True)
                sizes.append(size)
                curves.append(_at(counts, draft_tokens, seconds))
        found: list[float] = _at(rows, sizes, curves).tolist()
        return found


def prior(costs: Costs | None, rows: int, most: int, tree: bool) -> tuple[float, list[float]]:
    """What is taken for the times of cycles before any has run.

    Args:
        costs: What is stored of the machine, if anything.
        most: Most guesses of a row.

    Returns:
        Seconds of a plain cycle, and seconds of one that drafts by its number of guesses.
    """
    plain = costs.plain_cycle(rows) if costs else 1.0
    if costs is None or not costs.knows(tree):
        return plain, [plain * (1 + DRAFT_PASS + DRAFT_TOKEN * rows * n) for n in range(most + 1)]
    return plain, costs.cycle(rows, most, tree)


def _costs(known: dict[int, tuple[float, Points, Points]], date: float) -> Costs:
    """From the plain cycle, the chains and the trees of each number of rows."""
    rows = sorted(known)
    plain, chain, tree = (tuple(known[each][part] for each in rows) for part in range(3))
    return Costs(tuple(rows), plain, chain, tree, date)  # type: ignore[arg-type]


def _at(x: Any, xs: Sequence[int], ys: Sequence[Any]) -> NDArray[np.float64]:
    """Interpolated over `xs`; before the first the first holds, beyond the last its slope goes on, but never falls."""
    if len(xs) == 1:
        return np.asarray(ys[0] + 0 * np.asarray(x))
    after = np.clip(np.searchsorted(xs, x), 1, len(xs) - 1)
    left, right = np.asarray(xs)[after - 1], np.asarray(xs)[after]
    below, above = np.asarray(ys)[after - 1], np.asarray(ys)[after]
    share = np.maximum((x - left) / (right - left), 0.0)
    step = np.where(share > 1, np.maximum(above - below, 0.0), above - below)
    found: NDArray[np.float64] = below + np.minimum(share, 1.0) * (above - below) + np.maximum(share - 1, 0.0) * step
    return found


class Cycles(Protocol):
    """Runs cycles for measuring.

    Args:
        rows, context: Rows of a fresh batch, and committed tokens of each.
        draft_tokens: Of a row; 0 for cycles that do not draft.
        tree: Whether they are a tree, or a chain.
        count: Cycles to run.

    Returns:
        For each cycle the guesses that a row really had, and its seconds.
    """

    def __call__(
        self, rows: int, context: int, draft_tokens: int, tree: bool, count: int
    ) -> list[tuple[int, float]]: ...


def measure(
    cycles: Cycles,
    block_size: int,
    max_batch_size: int,
    max_context: int,
    report: Callable[[str], None] = lambda line: None,
) -> Costs:
    """Measure a pair on this machine, up to its largest batch.

    It takes a few seconds for a small target and not much more than `LIMIT_SECONDS` for a large one.

    Args:
        block_size: Of the drafter; 1 for one that guesses nothing.
        max_context: Tokens that a row may have. What does not fit is left to extrapolation.
        report: Called with lines of progress.

    Raises:
        UsageError: Not even a cycle of one guess fits the context.
    """
    began = time.perf_counter()
    context = max(min(CONTEXT, max_context // 4), 1)

    def fits(draft_tokens: int) -> bool:
        """Each cycle may commit a whole path; the last one still needs room for its nodes."""
        return context + REPEATS * min(draft_tokens + 1, block_size) + draft_tokens + 1 < max_context

    if not fits(min(1, block_size - 1)):
        raise UsageError(
            f"The target's context of {max_context} tokens is too short to measure in: {REPEATS + 1} cycles of one "
            f"guess need {context + 2 * REPEATS + 3}. Use a fixed block size and tree budget."
        )
    known: dict[int, tuple[float, Points, Points]] = {}
    for rows in [size for size in ROWS if size < max_batch_size] + [max_batch_size]:
        if known and time.perf_counter() - began > LIMIT_SECONDS:
            break

        def points(sizes: Sequence[int], tree: bool, rows: int = rows) -> Points:
            found: dict[int, list[float]] = {}
            for size in sizes:
                if fits(size) and (rows * size <= MAX_DRAFT_TOKENS or size == sizes[0]):
                    draft_tokens, seconds = _median(cycles(rows, context, size, tree, REPEATS + 1))
                    found.setdefault(draft_tokens, []).append(seconds)
            return tuple((draft_tokens, statistics.median(found[draft_tokens])) for draft_tokens in sorted(found))

        _, plain = _median(cycles(rows, context, 0, False, REPEATS + 1))
        longest = block_size - 1
        chain = points(sorted({min(size, longest) for size in CHAIN_DRAFT_TOKENS}), False) if longest else ()
        tree = points(TREE_DRAFT_TOKENS, True) if longest else ()
        known[rows] = plain, chain, tree
        added = (
            f"{kind} of {p[-1][0]} {1000 * p[-1][1]:.2f} ms" for kind, p in (("chain", chain), ("tree", tree)) if p
        )
        report(", ".join([f"{rows} rows: plain cycle {1000 * plain:.2f} ms", *added]))
    return _costs(known, time.time())


def _median(cycles: list[tuple[int, float]]) -> tuple[int, float]:
    """Guesses and seconds of cycles, of which the first does not count."""
    draft_tokens, seconds = zip(*cycles[1:], strict=True)
    return int(statistics.median(draft_tokens)), statistics.median(seconds)


def path(target: Target, drafter: Drafter) -> Path:
    """The file of a pair's costs, in the folder that `BLOCKDRAFT_CACHE` names, or else in `~/.cache/blockdraft`.

    There is one for each target, backend, drafter with the tokens and bits that are left of it, dtype, device, number
    of threads, machine, and version of torch, transformers and blockdraft.
    """
    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    facts = [
        *(_place(target.path), target.running, target.hidden_size, target.num_layers, target.vocab_size, target.dtype),
        *(target.device.type, gpu),
        *(type(drafter).__name__, drafter.block_size, drafter.target_layers),
        *((part.kind, _place(part.path), part.draft_vocab, part.bits, str(part.device)) for part in drafter.parts),
        *(torch.get_num_threads(), platform.node(), platform.processor()),
        *(LAYOUT, version("torch"), version("transformers"), version("blockdraft")),
    ]
    return cache_folder() / "costs" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def _place(path: str | Path | None) -> str | None:
    """A folder or file, wherever it is named from; a hub name as it is."""
    return None if path is None else str(Path(path).resolve() if Path(path).exists() else path)


@dataclass(frozen=True)
class Pair:
    """What costs were measured of, for those who look for them without loading it.

    Attributes:
        target, drafter: Their folders or files; None where they have none.
        weights: Kind of the target's weights: "file" for those of a GGUF file.
        threads: Threads that ran it.
    """

    target: str | None
    drafter: str | None
    weights: str
    threads: int


def pair_of(target: Target, drafter: Drafter) -> Pair:
    """What costs of a loaded pair are of."""
    place = _place(target.path)
    bits = getattr(target, "bits", None)
    weights = f"int{bits}" if bits else str(target.dtype).removeprefix("torch.")
    return Pair(
        target=place,
        drafter=_place(drafter.path),
        weights="file" if place and place.endswith(".gguf") else weights,
        threads=torch.get_num_threads(),
    )


def of_target(target: str | Path) -> Iterator[tuple[Pair, Costs]]:
    """Costs that are stored of a target with any drafter and kind of weights, newest first."""
    found = []
    for file in (cache_folder() / "costs").glob("*.json"):
        costs = load(file)
        with suppress(OSError, ValueError, TypeError, KeyError):  # older files do not say what they are of
            pair = Pair(**json.loads(file.read_text(encoding="utf-8"))["pair"])
            if costs is not None and pair.target == _place(target):
                found.append((pair, costs))
    yield from sorted(found, key=lambda each: -each[1].date)


def load(file: Path) -> Costs | None:
    """The costs in a file; None where there is none, or none that can be read. Costs are only where learning begins,
    so nothing is lost with them."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        found.pop("pair", None)
        if found.pop("layout") != LAYOUT:
            return None
        costs = Costs(**{name: _tuples(value) for name, value in found.items()})
        points = [point for row in (*costs.chain, *costs.tree) for point in row]
        usable = all(0 < seconds < math.inf for seconds in (*costs.plain, *(seconds for _, seconds in points)))
        same = len(costs.rows) == len(costs.plain) == len(costs.chain) == len(costs.tree) > 0
        return costs if usable and same else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def store(file: Path, costs: Costs, pair: Pair) -> None:
    """Write costs of a pair in the place of what was there, at once or not at all.

    Raises:
        OSError: The folder cannot be written to.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"layout": LAYOUT, "pair": asdict(pair), **asdict(costs)}), encoding="utf-8")
    partial.replace(file)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
