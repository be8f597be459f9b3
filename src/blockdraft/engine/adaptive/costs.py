"""Step costs on this machine: steps of a pair to measure, and the file of what was measured or learned."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from blockdraft.decode.proposal import ChainPlan, Plan, TreePlan
from blockdraft.decode.step_time import Costs
from blockdraft.diskcache import written
from blockdraft.drafters import Drafter, slots_behind
from blockdraft.engine.request import Request, RunningSequence
from blockdraft.engine.runner import Runner
from blockdraft.errors import describe
from blockdraft.machine import cache_folder, wait_for
from blockdraft.targets import Target
from blockdraft.types import SamplingParams

log = logging.getLogger(__name__)

LAYOUT = 5  # of the file; other layouts are not read


@dataclass(frozen=True)
class Probe:
    """Runs steps of a pair on arbitrary tokens, outside of any engine."""

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
        """Run `count` steps of a fresh batch. Return the draft tokens per sequence and the seconds of each."""
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
