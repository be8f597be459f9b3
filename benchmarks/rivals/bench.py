"""What a run does: its units of work, each of which is kept once it is done."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import keep_settings
from benchmarks.harness.process import PeerError
from benchmarks.harness.records import Records
from benchmarks.rivals import measure, report
from benchmarks.rivals.figures import CHAINS, TREES, Figures
from benchmarks.rivals.kinds import KINDS, fitted, parameters, read_tables, recipe_of, target_weights_read
from benchmarks.rivals.pairs import check_compiled, drafter_of, target_of
from benchmarks.rivals.rows import NATIVE, PLAIN, TORCH, Answers, Cycle, Forward, Speed, Trained, Unit
from benchmarks.rivals.train import FINISHED, Task
from benchmarks.rivals.ways import Way, parse
from blockdraft import load_target
from blockdraft.cli.display import progress
from blockdraft.data.documents import read_data
from blockdraft.data.folder import write_file
from blockdraft.drafters import Drafter
from blockdraft.errors import counted
from blockdraft.evaluation.prompts import PromptSet, read_prompt_sets
from blockdraft.settings import as_toml
from blockdraft.targets import target_fingerprint
from blockdraft.training.progress import run_folder

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Step:
    """A unit of work: which it is, and what does it."""

    stage: str
    name: str
    work: Callable[[measure.Progress], None]


class Bench:
    """All that a run has at hand.

    Raises:
        UsageError: Data, prompts, recipe and target do not fit together, or the folder holds other figures.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out = given, given.out
        torch.set_num_threads(given.threads)
        self.sets = read_prompt_sets(given.prompts, given.limit)
        self.target = load_target(given.target)
        torch.set_num_threads(given.threads)
        self.target_weights = target_weights_read(self.target)
        data = read_data(given.data)
        data.check_tokenizer(self.target.tokenizer)
        tables = read_tables(given.recipe)
        dflash = KINDS["dflash"]
        self.budget = given.parameters or parameters(dflash, recipe_of(dflash, tables["dflash"]), self.target)
        self.values: dict[str, dict[str, Any]] = {}
        for name in given.kinds:
            if KINDS[name].trained:
                recipe = fitted(KINDS[name], tables[name], self.target, self.budget)
                self.values[name] = {**tables[name], KINDS[name].free: getattr(recipe, KINDS[name].free)}
                count = parameters(KINDS[name], recipe, self.target)
                tell(f"{name}: {count:,} weights, {count / self.budget:.0%} of the budget of {self.budget:,}")
        if given.anew and self.out.exists():
            shutil.rmtree(self.out)
        told = json.dumps([[one.name, one.prompts] for one in self.sets])
        recipes = hashlib.sha256(given.recipe.read_bytes()).hexdigest()[:16]
        fixed = {"target": target_fingerprint(self.target), "data": data.fingerprint, "recipe": recipes}
        fixed |= {"prompts": hashlib.sha256(told.encode()).hexdigest()[:16], "parameters": self.budget}
        fixed |= {name: getattr(given, name) for name in ("tokens", "max_new_tokens", "threads", "quick")}
        keep_settings(self.out, fixed)
        (self.out / "plain").mkdir(exist_ok=True)
        self.units = Records(Unit, self.out / "units.csv")
        self.trained = Records(Trained, self.out / "trained.csv")
        self.answers = Records(Answers, self.out / "answers.csv")
        self.forwards = Records(Forward, self.out / "forwards.csv")
        self.cycles = Records(Cycle, self.out / "cycles.csv")
        self.speeds = Records(Speed, self.out / "speeds.csv")
        self._measured: Any = None
        self._place: tuple[int, str] | None = None

    # What is measured on

    def loaded(self, width: int = 1, running: str = NATIVE) -> Any:
        """The target, of which one at a time is in memory besides that for training."""
        if self._place != (width, running):
            self._measured = None
            path, insist = self.given.target, not self.given.uncompiled
            self._measured = target_of(path, width, running, insist, self.out / "wide")
            torch.set_num_threads(self.given.threads)
            self._place = width, running
        return self._measured

    def folder(self, kind: str, seed: int) -> Path | None:
        return self.out / "drafters" / f"{kind}-{seed}" if KINDS[kind].trained else None

    def drafter(self, kind: str, seed: int = 0, width: int = 1, running: str = NATIVE) -> Drafter:
        target = self.loaded(width, running)
        found = drafter_of(kind, self.folder(kind, seed), target, width, running, self.out / "wide")
        if running == NATIVE and not self.given.uncompiled:
            check_compiled(kind, found)
        return found

    def seeds(self, kind: str) -> list[int]:
        return list(range(self.given.seeds)) if KINDS[kind].trained else [0]

    # Units

    def steps(self) -> list[Step]:
        """Seed after seed, so that an interrupted comparison has seen every kind equally often."""
        given = self.given
        found = []
        for one in self.sets:
            for temperature in given.temperatures:
                found.append(self._answering(PLAIN, 0, one, temperature))
        for seed in range(given.seeds):
            for kind in given.kinds:
                if seed not in self.seeds(kind):
                    continue
                if KINDS[kind].trained:
                    found.append(Step("train", f"{kind} {seed}", self._training(kind, seed)))
                for one in self.sets:
                    found += [self._answering(kind, seed, one, temperature) for temperature in given.temperatures]
        for width in given.widths:
            for running in (NATIVE, TORCH):
                name = f"{width} {running}"
                found.append(Step("forwards", name, self._timing_forwards(width, running)))
                for kind in given.kinds:
                    if KINDS[kind].trained:  # what prompt lookup finds hangs on the text
                        for batch in given.batches if running == NATIVE else [1]:
                            timing = self._timing_cycles(kind, width, running, batch)
                            found.append(Step("cycles", f"{kind} {name} {batch} {_names(given.ways)}", timing))
        found += [Step("speeds", f"{one.name} {' '.join(given.kinds)}", self._timing_answers(one)) for one in self.sets]
        return found

    def _training(self, kind: str, seed: int) -> Callable[[measure.Progress], None]:
        def work(tell: measure.Progress) -> None:
            out = self.folder(kind, seed)
            assert out is not None
            task = Task(
                kind,
                self.values[kind] | {"seed": seed},
                self.given.target,
                str(self.given.data),
                self.given.tokens,
                str(out),
                self.given.threads,
            )
            finished = run_folder(out) / FINISHED
            if not finished.exists():
                ended = train_apart(task)
                if ended:
                    raise PeerError(f"Training {kind} with seed {seed} has ended with {ended}; see above.")
            self.trained.add(Trained(**json.loads(finished.read_text())))

        return work

    def _answering(self, kind: str, seed: int, one: PromptSet, temperature: float) -> Step:
        kept = self.out / "plain" / f"{one.name}-{temperature:g}.json"
        given = self.given

        def work(tell: measure.Progress) -> None:
            plain = kind == PLAIN
            drafter: Any = measure.NoDrafter() if plain else self.drafter(kind, seed)
            known = None if plain else {int(i): ids for i, ids in json.loads(kept.read_text()).items()}
            found, said = measure.answers(
                *(kind, seed, self.loaded(), drafter, one, temperature),
                *(given.max_new_tokens, given.ways, known, tell),
            )
            if plain:
                write_file(kept, json.dumps(said).encode())
            self.answers.add(*found)

        ways = "" if kind == PLAIN else f" {_names(given.ways)}"
        return Step("answers", f"{kind} {seed} {one.name} {temperature:g}{ways}", work)

    def _timing_forwards(self, width: int, running: str) -> Callable[[measure.Progress], None]:
        def work(tell: measure.Progress) -> None:
            target = self.loaded(width, running)
            self.forwards.add(*measure.forwards(target, width, running, self.given.repeats, tell))

        return work

    def _timing_cycles(self, kind: str, width: int, running: str, batch: int) -> Callable[[measure.Progress], None]:
        def work(tell: measure.Progress) -> None:
            drafter = self.drafter(kind, 0, width, running)
            target, given = self.loaded(width, running), self.given
            self.cycles.add(
                *measure.cycles(kind, target, drafter, width, running, batch, given.ways, given.repeats, tell)
            )

        return work

    def _timing_answers(self, one: PromptSet) -> Callable[[measure.Progress], None]:
        def work(tell: measure.Progress) -> None:
            found, chosen = self.figures(), {}
            for kind in self.given.kinds:
                drafter = self.drafter(kind)
                place = found.here(1) if KINDS[kind].trained else found.here_by_weights(1)
                for shape in (CHAINS, TREES):
                    best = found.best(kind, found.temperatures[0], place, shape)
                    if best is not None:
                        chosen[kind, parse(best.way)] = drafter
            self.speeds.add(
                *measure.speeds(self.loaded(), chosen, one, self.given.max_new_tokens, self.given.repeats, tell)
            )

        return work

    # All together

    def figures(self) -> Figures:
        rows = self.trained.all, self.answers.all, self.forwards.all, self.cycles.all, self.speeds.all
        return Figures(self.target_weights, self.given.cost_of_16, *rows)

    def left(self, steps: list[Step]) -> list[Step]:
        return [step for step in steps if (step.stage, step.name) not in self.units.had]

    def seconds_left(self, steps: list[Step]) -> tuple[float, bool]:
        """By what units of the same stage and kind have taken, or else of the same stage; and whether something is
        known of all of them."""
        total, all_known = 0.0, True
        for step in steps:
            kind = step.name.split()[0]
            same = [unit for unit in self.units.all if unit.stage == step.stage]
            near = [unit for unit in same if unit.name.split()[0] == kind] or same
            all_known = all_known and bool(near)
            total += sum(unit.seconds for unit in near) / max(len(near), 1)
        return total, all_known

    def run(self) -> None:
        left = self.left(self.steps())
        count = len(left)
        while left:
            step = left.pop(0)
            seconds, all_known = self.seconds_left([step, *left])
            about = f"; {'about' if all_known else 'more than'} {seconds / 60:.0f} min left for all" if seconds else ""
            tell(f"[{count - len(left)} of {count}] {step.stage} {step.name}{about}")
            began = time.monotonic()
            with progress("done") as shown:
                step.work(shown)
            self.units.add(Unit(step.stage, step.name, time.monotonic() - began))
        self.write()

    def write(self) -> None:
        found, given = self.figures(), self.given
        recipes = "".join(
            f"\n[{name}]\n{as_toml(recipe_of(KINDS[name], values))}" for name, values in self.values.items()
        )
        (self.out / "recipes.toml").write_text(recipes.strip() + "\n", encoding="utf-8")
        about = (
            f"Target: {given.target or 'the bundled one'}, {self.loaded().running}, "
            f"{counted(given.threads, 'thread')}. {given.tokens:,} tokens of training, at most {given.limit} prompts "
            f"of a set, answers of up to {given.max_new_tokens} tokens."
        )
        page = report.page(found, self.budget, about, given.quick)
        (self.out / "rivals.md").write_text(page, encoding="utf-8")
        report.draw(found, self.out / "rivals.png", given.quick)
        print(page)
        if found.changed() and not given.uncompiled:
            raise ValueError(f"These change tokens, so their speed says nothing: {', '.join(found.changed())}.")


def train_apart(task: Task) -> int:
    """Train in a process of its own; returns what it ended with."""
    command = [sys.executable, "-m", "benchmarks.rivals.train", json.dumps(asdict(task))]
    return subprocess.run(command, cwd=ROOT).returncode


def _names(ways: list[Way]) -> str:
    return " ".join(way.name for way in ways)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
