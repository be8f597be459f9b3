"""Step costs: the seconds of a step on this machine, by batch size and draft tokens; measured, and stored on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from blockdraft.decode.proposal import ChainPlan, Plan, TreePlan
from blockdraft.diskcache import written
from blockdraft.drafters import Drafter, slots_behind
from blockdraft.engine.request import Request, RunningSequence
from blockdraft.engine.runner import Runner
from blockdraft.errors import UsageError, describe
from blockdraft.machine import cache_folder, wait_for
from blockdraft.targets import Target
from blockdraft.types import SamplingParams

log = logging.getLogger(__name__)

LAYOUT = 5  # of the file; other layouts are not read
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CHAIN_DRAFT_TOKENS = (1, 2, 3, 4, 5, 7, 11, 15)
TREE_DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_DRAFT_TOKENS = 512  # draft tokens of a whole batch; larger trees are extrapolated
CONTEXT = 128  # committed tokens of each sequence while measuring
REPEATS = 7
LIMIT_SECONDS = 25.0  # larger batches are not measured after this time
DRAFT_PASS, DRAFT_TOKEN = 0.2, 0.05  # assumed cost of a draft pass and of a draft token, relative to a plain step

Points: TypeAlias = tuple[tuple[int, float], ...]  # draft tokens per sequence, rising, and seconds of a step
# Runs `count` steps of a fresh batch: (batch size, context, draft tokens, whether a tree, count). Returns the draft
# tokens per sequence and the seconds of each step.
RunSteps: TypeAlias = Callable[[int, int, int, bool, int], list[tuple[int, float]]]


@dataclass(frozen=True)
class Costs:
    """Seconds of steps. They are interpolated between the known sizes, and extrapolated beyond them.

    Attributes:
        batch_sizes: Batch sizes, rising.
        plain: Seconds of a plain step, by batch size.
        chain, tree: Steps that draft, by batch size; an empty tuple where nothing is known.
        date: When they were measured or learned, in seconds since 1970.
    """

    batch_sizes: tuple[int, ...]
    plain: tuple[float, ...]
    chain: tuple[Points, ...]
    tree: tuple[Points, ...]
    date: float = 0.0

    def plain_step(self, batch_size: int) -> float:
        """Return the seconds of a plain step at this batch size."""
        seconds: float = _interpolate(batch_size, self.batch_sizes, self.plain).item()
        return seconds

    def knows(self, tree: bool) -> bool:
        """Return whether steps that draft chains, or trees, are known."""
        return any(self.tree if tree else self.chain)

    def drafted_steps(self, batch_size: int, most: int, tree: bool) -> list[float]:
        """Return the seconds of a step that drafts, by draft tokens per sequence from 0 to `most`."""
        counts, sizes, curves = np.arange(most + 1), [], []
        for size, points in zip(self.batch_sizes, self.tree if tree else self.chain, strict=True):
            if points:
                sizes.append(size)
                curves.append(_interpolate(counts, *zip(*points, strict=True)))
        seconds: list[float] = _interpolate(batch_size, sizes, curves).tolist()
        return seconds

    def updated(self, newer: Costs) -> Costs:
        """Return these costs, replaced by newer ones where the batch size is the same."""
        known: dict[int, tuple[float, Points, Points]] = {}
        for costs in (self, newer):
            for batch_size, plain, chain, tree in zip(
                costs.batch_sizes, costs.plain, costs.chain, costs.tree, strict=True
            ):
                _, old_chain, old_tree = known.get(batch_size, (0.0, (), ()))
                known[batch_size] = plain, chain or old_chain, tree or old_tree
        return _costs(known, newer.date)


def prior(costs: Costs | None, batch_size: int, most: int, tree: bool) -> tuple[float, list[float]]:
    """Return the assumed seconds of a plain step, and of steps with 0 to `most` draft tokens per sequence."""
    plain = costs.plain_step(batch_size) if costs else 1.0
    if costs is None or not costs.knows(tree):
        return plain, [plain * (1 + DRAFT_PASS + DRAFT_TOKEN * batch_size * n) for n in range(most + 1)]
    return plain, costs.drafted_steps(batch_size, most, tree)


def _costs(known: dict[int, tuple[float, Points, Points]], date: float) -> Costs:
    """Build costs from plain steps, chains and trees by batch size."""
    sizes = sorted(known)
    plain, chain, tree = zip(*(known[size] for size in sizes), strict=True)
    return Costs(tuple(sizes), plain, chain, tree, date)


def _interpolate(x: Any, xs: Sequence[int], ys: Sequence[Any]) -> NDArray[np.float64]:
    """Interpolate over `xs`. Before the first x the first y holds; beyond the last the slope goes on, but not down."""
    if len(xs) == 1:
        return np.asarray(ys[0] + 0 * np.asarray(x))
    after = np.clip(np.searchsorted(xs, x), 1, len(xs) - 1)
    left, right = np.asarray(xs)[after - 1], np.asarray(xs)[after]
    below, above = np.asarray(ys)[after - 1], np.asarray(ys)[after]
    share = np.maximum((x - left) / (right - left), 0.0)
    slope = np.where(share > 1, np.maximum(above - below, 0.0), above - below)
    y: NDArray[np.float64] = below + np.minimum(share, 1.0) * (above - below) + np.maximum(share - 1, 0.0) * slope
    return y


def measure(
    run_steps: RunSteps,
    block_size: int,
    max_batch_size: int,
    max_context: int,
    report: Callable[[str], None] = lambda line: None,
) -> Costs:
    """Measure the steps of a pair on this machine, up to its largest batch, in little more than `LIMIT_SECONDS`.

    Args:
        run_steps: A `Probe`.
        block_size: The drafter's; 1 for a drafter without draft tokens.
        max_context: Most tokens of a sequence. Sizes that do not fit are extrapolated.
        report: Called with lines of progress.

    Raises:
        UsageError: The context is too short even for steps of one draft token.
    """
    began = time.perf_counter()
    context = max(min(CONTEXT, max_context // 4), 1)

    def fits(size: int) -> bool:
        """Return whether every step may commit a whole path, and the last one still has room for its nodes."""
        return context + REPEATS * min(size + 1, block_size) + size + 1 < max_context

    def points(batch_size: int, sizes: Sequence[int], tree: bool) -> Points:
        times: dict[int, list[float]] = {}
        for size in sizes:
            if fits(size) and (batch_size * size <= MAX_DRAFT_TOKENS or size == sizes[0]):
                count, seconds = _median(run_steps(batch_size, context, size, tree, REPEATS + 1))
                times.setdefault(count, []).append(seconds)
        return tuple((count, statistics.median(times[count])) for count in sorted(times))

    longest = block_size - 1
    if not fits(min(1, longest)):
        raise UsageError(
            f"The target's context of {max_context} tokens is too short to measure step times: {REPEATS + 1} steps of "
            f"one draft token need {context + 2 * REPEATS + 3}. Use a fixed block size and tree budget."
        )
    chains = sorted({min(size, longest) for size in CHAIN_DRAFT_TOKENS}) if longest else []
    known: dict[int, tuple[float, Points, Points]] = {}
    for batch_size in [size for size in BATCH_SIZES if size < max_batch_size] + [max_batch_size]:
        if known and time.perf_counter() - began > LIMIT_SECONDS:
            break
        _, plain = _median(run_steps(batch_size, context, 0, False, REPEATS + 1))
        chain = points(batch_size, chains, False)
        tree = points(batch_size, TREE_DRAFT_TOKENS if longest else (), True)
        known[batch_size] = plain, chain, tree
        drafted = (
            f"{name} of {p[-1][0]} {1000 * p[-1][1]:.2f} ms" for name, p in (("chain", chain), ("tree", tree)) if p
        )
        report(", ".join([f"batch size {batch_size}: plain step {1000 * plain:.2f} ms", *drafted]))
    return _costs(known, time.time())


def _median(steps: list[tuple[int, float]]) -> tuple[int, float]:
    """Return the median draft tokens and seconds of all steps but the first, which warms up."""
    counts, seconds = zip(*steps[1:], strict=True)
    return int(statistics.median(counts)), statistics.median(seconds)


@dataclass(frozen=True)
class Probe:
    """Runs steps of a pair on arbitrary tokens, outside of any engine; see `RunSteps`."""

    target: Target
    drafter: Drafter

    def open_sequences(self, count: int, context: int, room: int) -> tuple[Runner, list[RunningSequence]]:
        """Prefill `count` sequences of `context` arbitrary tokens, with KV slots for `room` more.

        Drafters may want more slots, even beyond the target's context.
        """
        prompt = [(7 * i + 3) % self.target.vocab_size for i in range(context)]
        capacity = self.target.row_slots(context + slots_behind(self.drafter, room))
        runner, params = Runner(self.target, self.drafter, count * capacity), SamplingParams(room, seed=0)
        requests = [Request(prompt=prompt, params=params, tokenizer=self.target.tokenizer) for _ in range(count)]
        sequences = [RunningSequence(request, index * capacity, capacity) for index, request in enumerate(requests)]
        for sequence in sequences:
            runner.open(sequence.start, capacity)
        runner.prefill(sequences, [context] * count)
        return runner, sequences

    def __call__(
        self, batch_size: int, context: int, draft_tokens: int, tree: bool, count: int
    ) -> list[tuple[int, float]]:
        # Equal step times make a drafter that chooses its number of draft tokens use all of them.
        chooses = self.drafter.chooses_tree_size if tree else self.drafter.chooses_length
        seconds = [1.0] * (draft_tokens + 1) if draft_tokens and chooses else None
        block_size = self.drafter.block_size if seconds and tree else min(self.drafter.block_size, draft_tokens + 1)
        plan: Plan = ChainPlan(block_size, [SamplingParams()] * batch_size, step_seconds=seconds)
        if tree:
            plan = TreePlan(block_size, plan.params, draft_tokens, step_seconds=seconds)
        with self.target.lock:
            runner, sequences = self.open_sequences(batch_size, context, count * self.drafter.block_size + draft_tokens)
            return [self._time_step(runner, sequences, plan) for _ in range(count)]

    def _time_step(self, runner: Runner, sequences: Sequence[RunningSequence], plan: Plan) -> tuple[int, float]:
        wait_for(self.target.device)
        began = time.perf_counter()
        outcome = runner.step(sequences, plan)
        wait_for(self.target.device)
        return outcome.num_draft_tokens, time.perf_counter() - began


@dataclass(frozen=True)
class Pair:
    """Description of the pair that costs belong to, for readers that have not loaded it.

    Attributes:
        target, drafter: Their folders or files, or None.
        weights: Kind of the target's weights; "file" for those of a GGUF file.
        threads: Threads that ran it.
    """

    target: str | None
    drafter: str | None
    weights: str
    threads: int


def pair_of(target: Target, drafter: Drafter) -> Pair:
    """Describe a loaded pair."""
    place, bits = _absolute(target.path), getattr(target, "bits", None)
    weights = f"int{bits}" if bits else str(target.dtype).removeprefix("torch.")
    return Pair(
        target=place,
        drafter=_absolute(drafter.path),
        weights="file" if place and place.lower().endswith(".gguf") else weights,
        threads=torch.get_num_threads(),
    )


def path(target: Target, drafter: Drafter) -> Path:
    """Return the file of a pair's costs, in the folder `BLOCKDRAFT_CACHE`, or else in `~/.cache/blockdraft`.

    There is one file per target, backend, drafter with its draft vocabulary and bits, dtype, device, number of threads,
    machine, and version of torch, transformers and blockdraft.
    """
    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    facts = [
        *(
            _absolute(target.path),
            target.running,
            target.hidden_size,
            target.num_layers,
            target.vocab_size,
            target.dtype,
        ),
        *(target.device.type, gpu),
        *(type(drafter).__name__, drafter.block_size, drafter.target_layers),
        *((part.kind, _absolute(part.path), part.draft_vocab, part.bits) for part in drafter.parts),
        *(torch.get_num_threads(), platform.node(), platform.processor()),
        *(LAYOUT, version("torch"), version("transformers"), version("blockdraft")),
    ]
    return cache_folder() / "costs" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def _absolute(path: str | Path | None) -> str | None:
    """Return a folder or file as an absolute path, and a hub name as it is."""
    return None if path is None else str(Path(path).resolve() if Path(path).exists() else path)


def of_target(target: str | Path) -> Iterator[tuple[Pair, Costs]]:
    """Yield the stored costs of a target with any drafter and kind of weights, newest first."""
    matches = []
    for file in (cache_folder() / "costs").glob("*.json"):
        costs = load(file)
        with suppress(OSError, ValueError, TypeError, KeyError):  # a file without a pair
            pair = Pair(**json.loads(file.read_text(encoding="utf-8"))["pair"])
            if costs is not None and pair.target == _absolute(target):
                matches.append((pair, costs))
    yield from sorted(matches, key=lambda match: -match[1].date)


def load(file: Path) -> Costs | None:
    """Return the costs in a file, or None where they cannot be read: they are only where learning begins."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content.pop("pair", None)
        if content.pop("layout") != LAYOUT:
            return None
        costs = Costs(**{name: _tuples(value) for name, value in content.items()})
        points = [point for curve in (*costs.chain, *costs.tree) for point in curve]
        valid = all(0 < seconds < math.inf for seconds in (*costs.plain, *(seconds for _, seconds in points)))
        same = len(costs.batch_sizes) == len(costs.plain) == len(costs.chain) == len(costs.tree) > 0
        return costs if valid and same else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def load_for(target: Target, drafter: Drafter, member: Drafter) -> Costs | None:
    """Return the stored costs of one member of a drafter. A member with a network may use those of the whole."""
    return load(path(target, member)) or (load(path(target, drafter)) if member.runs_network else None)


def store(file: Path, costs: Costs, pair: Pair) -> None:
    """Replace the costs of a pair atomically.

    Raises:
        OSError: The folder cannot be written to.
    """
    with written(file) as partial:
        partial.write_text(json.dumps({"layout": LAYOUT, "pair": asdict(pair), **asdict(costs)}), encoding="utf-8")


def update(target: Target, drafter: Drafter, learned: Costs) -> None:
    """Store what an engine has learned beside what is stored. Log a warning if that fails."""
    file = path(target, drafter)
    known = load(file)
    try:
        store(file, learned if known is None else known.updated(learned), pair_of(target, drafter))
    except OSError as error:
        log.warning("The learned step times cannot be stored in %s: %s", file, describe(error))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
