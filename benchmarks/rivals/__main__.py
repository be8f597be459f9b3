"""Kinds of drafters against each other, on one target at an equal budget: `make bench-rivals ARGS="..."`.

DFlash, DFlash2, DSpark, a flow map, EAGLE-3, Medusa, an MTP head and a small language model are trained for the same
target on the same tokens, each with about as many weights, several seeds of each; prompt lookup needs no training. Each
then answers prompt sets in chains and trees of several sizes: tokens a cycle (tau), the share of cycles that accept i
guesses (S_i), the time of a draft and of a cycle (R), memory, and what that makes of the speed-up: on this processor,
and where a forward of 16 tokens costs little more than one of a single token.

    blockdraft data chats.jsonl --regenerate --out build/data          # what the target says, to learn from
    make bench-rivals ARGS="--data build/data --prompts gsm8k.jsonl --prompts humaneval.jsonl --prompts mt-bench.jsonl"

An interrupted run goes on where it was; --anew forgets it. More seeds, kinds, ways, widths and batches are added to
what is there. Written to --out: trained.csv, answers.csv, forwards.csv, cycles.csv and speeds.csv with all figures,
rivals.md, rivals.png, and the drafters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import CORES, ROOT, Parser, digest, in_words, keep_settings, listed, tell
from benchmarks.harness.process import PeerError, Progress
from benchmarks.harness.records import Records
from benchmarks.rivals import measure, report
from benchmarks.rivals.figures import CHAINS, TREES, Figures
from benchmarks.rivals.kinds import (
    KINDS,
    check_compiled,
    drafter_of,
    fitted,
    parameters,
    read_tables,
    recipe_of,
    target_of,
    target_weights_read,
)
from benchmarks.rivals.records import (
    NATIVE,
    PLAIN,
    TORCH,
    Answers,
    Cycle,
    Forward,
    Speed,
    Trained,
    Unit,
    Way,
    parse,
)  # fmt: skip
from benchmarks.rivals.train import FINISHED, Task
from blockdraft import load_target
from blockdraft.cli.display import progress
from blockdraft.data.documents import read_data
from blockdraft.data.folder import write_file
from blockdraft.drafters import Drafter
from blockdraft.errors import UsageError, counted
from blockdraft.evaluation.prompts import PromptSet, read_prompt_sets
from blockdraft.settings import as_toml
from blockdraft.targets import target_fingerprint
from blockdraft.training.progress import run_folder

QUICK = {
    "seeds": 1,
    "tokens": 20_000,
    "limit": 3,
    "max_new_tokens": 32,
    "ways": "chain:3,chain:7,tree:16",
    "batches": "1,4",
    "repeats": 1,
}
WAYS = "chain:1,chain:2,chain:4,chain:7,tree:8,tree:24,tree:60"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, quick=QUICK, resumes=True, threads=CORES)
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder or hub name; the bundled one by default")
    add("--data", type=Path, required=True, metavar="DIR", help="token data of the target, made by `blockdraft data`")
    form = 'JSON lines {"prompt": ...} or {"turns": [...]}; may be repeated'
    add("--prompts", type=Path, required=True, action="append", metavar="FILE", help=form)
    add("--recipe", type=Path, default=Path(__file__).with_name("recipe.toml"), help="how each kind is trained")
    add("--parameters", type=int, help="weights of each drafter; by default those of DFlash as the recipe has it")
    add("--kinds", type=listed(known=KINDS), default=",".join(KINDS), help=f"of {','.join(KINDS)}")
    add("--seeds", type=int, default=3, help="of each kind (3)")
    add("--tokens", type=int, default=2_000_000, help="of text that each drafter is trained on (2000000)")
    add("--temperatures", type=listed(float), default="0,1")
    add("--ways", type=listed(parse), default=WAYS, help="chains and trees of N guesses")
    wide = "how many times as wide cycles are timed, powers of two (1,4, quick 1,2; of another target 1)"
    add("--widths", type=listed(int), help=wide)
    add("--batches", type=listed(int), default="1,4,16", help="rows of the cycles that are timed")
    add("--limit", type=int, default=32, help="prompts of each file (32)")
    add("--max-new-tokens", type=int, default=128, help="of an answer (128)")
    add("--repeats", type=int, default=5, help="of what is timed (5)")
    add("--cost-of-16", type=float, default=1.25, help="time of a forward of 16 tokens over one, simulated (1.25)")
    add("--uncompiled", action="store_true", help="measure a target or drafters that do not run compiled, too")
    add("--out", type=Path, help="build/rivals, or build/rivals-quick")
    given = parser.parse(words)
    given.out = given.out or ROOT / "build" / ("rivals-quick" if given.quick else "rivals")
    given.widths = given.widths or ([1] if given.target else [1, 2] if given.quick else [1, 4])
    if given.seeds < 1 or given.tokens < 1 or given.repeats < 1:
        raise UsageError("--seeds, --tokens and --repeats must be at least 1.")
    return given


@dataclass(frozen=True)
class Step:
    """A unit of work and the function that does it."""

    stage: str
    name: str
    work: Callable[[Progress], None]


class Bench:
    """A run: its target, its records, and its units of work, each of which is kept when it is done.

    Raises:
        UsageError: Data, prompts, recipe and target do not fit together, or the folder holds other figures.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out = given, given.out
        torch.set_num_threads(given.threads)
        self.sets = read_prompt_sets(given.prompts, given.limit)
        self.target = load_target(given.target)
        torch.set_num_threads(given.threads)
        data = read_data(given.data)
        data.check_tokenizer(self.target.tokenizer)
        tables = read_tables(given.recipe)
        dflash = KINDS["dflash"]
        self.budget = given.parameters or parameters(dflash, recipe_of(dflash, tables["dflash"]), self.target)
        self.values: dict[str, dict[str, Any]] = {}
        for kind in (KINDS[name] for name in given.kinds):
            if kind.trained:
                recipe = fitted(kind, tables[kind.name], self.target, self.budget)
                self.values[kind.name] = {**tables[kind.name], kind.free: getattr(recipe, kind.free)}
                count = parameters(kind, recipe, self.target)
                tell(f"{kind.name}: {count:,} weights, {count / self.budget:.0%} of the budget of {self.budget:,}")
        fixed = {name: getattr(given, name) for name in ("tokens", "max_new_tokens", "threads", "quick")}
        fixed |= {"target": target_fingerprint(self.target), "data": data.fingerprint, "parameters": self.budget}
        fixed |= {"recipe": digest(given.recipe), "prompts": digest([[one.name, one.prompts] for one in self.sets])}
        keep_settings(self.out, fixed, given.anew)
        (self.out / "plain").mkdir(exist_ok=True)
        kinds = {"units": Unit, "trained": Trained, "answers": Answers, "forwards": Forward, "cycles": Cycle}
        kinds |= {"speeds": Speed}
        self.records = {name: Records(kind, self.out / f"{name}.csv") for name, kind in kinds.items()}
        self._measured: Any = None
        self._place: tuple[int, str] | None = None

    def loaded(self, width: int = 1, running: str = NATIVE) -> Any:
        """The target. One at a time is in memory, besides that for training."""
        if self._place != (width, running):
            self._measured = None
            insist = not self.given.uncompiled
            self._measured = target_of(self.given.target, width, running, insist, self.out / "wide")
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

    def steps(self) -> list[Step]:
        """Units of work, seed after seed, so that an interrupted comparison has seen every kind equally often."""
        given, ways = self.given, " ".join(way.name for way in self.given.ways)
        prompts = [(one, temperature) for one in self.sets for temperature in given.temperatures]
        found = [self._answering(PLAIN, 0, one, temperature) for one, temperature in prompts]
        for seed in range(given.seeds):
            for kind in given.kinds:
                if KINDS[kind].trained:
                    found.append(Step("train", f"{kind} {seed}", partial(self._train, kind, seed)))
                if KINDS[kind].trained or seed == 0:
                    found += [self._answering(kind, seed, one, temperature) for one, temperature in prompts]
        for width in given.widths:
            for running in (NATIVE, TORCH):
                name = f"{width} {running}"
                found.append(Step("forwards", name, partial(self._time_forwards, width, running)))
                for kind in given.kinds:
                    if KINDS[kind].trained:  # what prompt lookup finds depends on the text
                        for batch in given.batches if running == NATIVE else [1]:
                            timing = partial(self._time_cycles, kind, width, running, batch)
                            found.append(Step("cycles", f"{kind} {name} {batch} {ways}", timing))
        kinds = " ".join(given.kinds)
        return found + [Step("speeds", f"{one.name} {kinds}", partial(self._time_answers, one)) for one in self.sets]

    def _answering(self, kind: str, seed: int, one: PromptSet, temperature: float) -> Step:
        ways = "" if kind == PLAIN else " " + " ".join(way.name for way in self.given.ways)
        work = partial(self._answer, kind, seed, one, temperature)
        return Step("answers", f"{kind} {seed} {one.name} {temperature:g}{ways}", work)

    def _train(self, kind: str, seed: int, tell: Progress) -> None:
        given, out = self.given, self.folder(kind, seed)
        finished = run_folder(out) / FINISHED
        if not finished.exists():
            how = {"target": given.target, "data": str(given.data), "tokens": given.tokens, "threads": given.threads}
            ended = train_apart(Task(kind, self.values[kind] | {"seed": seed}, out=str(out), **how))
            if ended:
                raise PeerError(f"Training {kind} with seed {seed} has ended with {ended}; see above.")
        self.records["trained"].add(Trained(**json.loads(finished.read_text())))

    def _answer(self, kind: str, seed: int, one: PromptSet, temperature: float, tell: Progress) -> None:
        kept = self.out / "plain" / f"{one.name}-{temperature:g}.json"
        plain = kind == PLAIN
        drafter: Any = measure.NoDrafter() if plain else self.drafter(kind, seed)
        known = None if plain else {int(i): ids for i, ids in json.loads(kept.read_text()).items()}
        how = {"tokens": self.given.max_new_tokens, "wanted": self.given.ways, "plain": known, "tell": tell}
        found, said = measure.answers(self.loaded(), drafter, one, kind, seed, temperature, **how)
        if plain:
            write_file(kept, json.dumps(said).encode())
        self.records["answers"].add(*found)

    def _time_forwards(self, width: int, running: str, tell: Progress) -> None:
        self.records["forwards"].add(*measure.forwards(self.loaded(width, running), width, running, self.given.repeats))

    def _time_cycles(self, kind: str, width: int, running: str, batch: int, tell: Progress) -> None:
        drafter, target = self.drafter(kind, 0, width, running), self.loaded(width, running)
        how = {"kind": kind, "width": width, "running": running, "batch": batch}
        how |= {"wanted": self.given.ways, "repeats": self.given.repeats, "tell": tell}
        self.records["cycles"].add(*measure.cycles(target, drafter, **how))

    def _time_answers(self, one: PromptSet, tell: Progress) -> None:
        found, chosen = self.figures(), dict[tuple[str, Way], Drafter]()
        for kind in self.given.kinds:
            drafter = self.drafter(kind)
            place = found.here(1) if KINDS[kind].trained else found.here_by_weights(1)
            for shape in (CHAINS, TREES):
                best = found.best(kind, found.temperatures[0], place, shape)
                if best is not None:
                    chosen[kind, parse(best.way)] = drafter
        given = self.given
        self.records["speeds"].add(
            *measure.speeds(self.loaded(), chosen, one, given.max_new_tokens, given.repeats, tell)
        )

    def figures(self) -> Figures:
        found = {name: records.all for name, records in self.records.items() if name != "units"}
        return Figures(target_weights_read(self.target), self.given.cost_of_16, **found)

    def left(self, steps: list[Step]) -> list[Step]:
        return [step for step in steps if (step.stage, step.name) not in self.records["units"].had]

    def run(self) -> None:
        left, units = self.left(self.steps()), self.records["units"]
        for number, step in enumerate(left):
            seconds, all_known = seconds_left(left[number:], units.all)
            about = f"; {'about' if all_known else 'more than'} {seconds / 60:.0f} min left for all" if seconds else ""
            tell(f"[{number + 1} of {len(left)}] {step.stage} {step.name}{about}")
            began = time.monotonic()
            with progress("done") as shown:
                step.work(shown)
            units.add(Unit(step.stage, step.name, time.monotonic() - began))
        self.write()

    def write(self) -> None:
        found, given = self.figures(), self.given
        tables = (f"[{name}]\n{as_toml(recipe_of(KINDS[name], values))}" for name, values in self.values.items())
        (self.out / "recipes.toml").write_text("\n".join(tables).strip() + "\n", encoding="utf-8")
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


def seconds_left(steps: Sequence[Step], units: Sequence[Unit]) -> tuple[float, bool]:
    """Seconds that steps will take, by what units of the same stage and kind have taken, or else of the same stage; and
    whether something is known of all of them."""
    total, all_known = 0.0, True
    for step in steps:
        same = [unit for unit in units if unit.stage == step.stage]
        near = [unit for unit in same if unit.name.split()[0] == step.name.split()[0]] or same
        all_known = all_known and bool(near)
        total += sum(unit.seconds for unit in near) / max(len(near), 1)
    return total, all_known


def train_apart(task: Task) -> int:
    """Train in a process of its own; returns what it ended with."""
    command = [sys.executable, "-m", "benchmarks.rivals.train", json.dumps(asdict(task))]
    return subprocess.run(command, cwd=ROOT).returncode


def main() -> None:
    with in_words():
        Bench(arguments()).run()


if __name__ == "__main__":
    main()
