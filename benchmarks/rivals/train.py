"""Trains one drafter in a process of its own, so that its memory is known: `python -m benchmarks.rivals.train JSON`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import in_words
from benchmarks.harness.process import peak_bytes
from benchmarks.rivals import small_lm
from benchmarks.rivals.kinds import KINDS, Kind, SmallLMRecipe, new_network, parameters, recipe_of, weights_read
from benchmarks.rivals.rows import Trained
from blockdraft.cli.display import progress
from blockdraft.data.documents import TokenData, read_data
from blockdraft.data.folder import write_file
from blockdraft.targets import Target, load_target
from blockdraft.training.devices import make_accelerator
from blockdraft.training.progress import Progress, run_folder
from blockdraft.training.recipe import Recipe
from blockdraft.training.trainer import train as train_variant
from blockdraft.training.variant import find_variant

CLOCK_SECONDS = 5.0  # of training whose time a killed process loses at most
FINISHED = "trained.json"


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        values: Of its recipe, the size and the seed among them.
        tokens: Positions to train on, in whole steps.
        out: Folder of the drafter; what belongs to the run lies beside it.
    """

    kind: str
    values: dict[str, Any]
    target: str | None
    data: str
    tokens: int
    out: str
    threads: int


def steps_for(data: TokenData, recipe: Recipe, tokens: int) -> int:
    """Steps of as many tokens as asked for, rounded; the rows of an epoch are spread evenly over its steps."""
    batches, of_epoch = small_lm.batches(data, recipe)
    return max(1, round(tokens * batches.steps_of(0) / of_epoch))


def run(task: Task, target: Target, tell: Callable[[str, int, int], None]) -> Trained:
    """Train, or go on with what an earlier process left."""
    kind, out, data = KINDS[task.kind], Path(task.out), read_data(task.data)
    recipe = recipe_of(kind, task.values)
    recipe = replace(recipe, steps=steps_for(data, recipe, task.tokens))
    clock = Clock(run_folder(out) / "clock.json")

    def told(stage: str, done: int, total: int) -> None:
        clock.tick(last=done == total)
        tell(f"{kind.title}: {stage}", done, total)

    if isinstance(recipe, SmallLMRecipe):
        small_lm.train(target, data, out, recipe, told)
    else:
        accelerator = make_accelerator(recipe, run_folder(out))
        train_variant(kind.name, target, data, out, recipe, accelerator, progress=Progress(told))
    return _figures(kind, recipe, data, target, clock.seconds)


def _figures(kind: Kind, recipe: Recipe, data: TokenData, target: Target, seconds: float) -> Trained:
    assert recipe.steps is not None
    batches, of_epoch = small_lm.batches(data, recipe)
    with torch.device("meta"):
        network = new_network(kind, recipe, target)
    guesses = 0 if isinstance(recipe, SmallLMRecipe) else find_variant(kind.name)(recipe).taught_slots
    weights = weights_read(kind, network, guesses, target)
    return Trained(
        kind.name,
        recipe.seed,
        parameters(kind, recipe, target),
        recipe.steps,
        round(of_epoch * recipe.steps / batches.steps_of(0)),
        seconds,
        peak_bytes(os.getpid()),
        weights.passed,
        weights.observed,
    )


class Clock:
    """Seconds of all processes that worked on something, on disk. Steps that are done twice count twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds = json.loads(path.read_text()) if path.exists() else 0.0
        self._last = self._written = time.monotonic()

    def tick(self, last: bool = False) -> None:
        now = time.monotonic()
        self.seconds += now - self._last
        self._last = now
        if last or now - self._written >= CLOCK_SECONDS:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, json.dumps(self.seconds).encode())
            self._written = now


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    with in_words():
        target = load_target(task.target)
        torch.set_num_threads(task.threads)
        with progress("steps") as tell:
            found = run(task, target, tell)
        write_file(run_folder(Path(task.out)) / FINISHED, json.dumps(asdict(found)).encode())


if __name__ == "__main__":
    main()
