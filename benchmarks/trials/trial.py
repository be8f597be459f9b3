"""What all trials do: drafters of several seeds answer prompt sets, and a cost model says whether the new one pays.

The base is DFlash as it is. It and what is on trial draft in the same ways, chains and trees of several sizes, and each
is judged as `report.py` says.

Answers are kept as they come, so an interrupted run goes on where it was. Written to --out: answers.csv, results.json
and results.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor

from benchmarks.command import settled
from benchmarks.csv_rows import Rows
from benchmarks.rivals import measure
from benchmarks.rivals.kinds import KINDS, Weights, target_weights_read, weights_read
from benchmarks.rivals.rows import PLAIN, Answers
from benchmarks.rivals.ways import parse, ways_of
from benchmarks.trials import report
from benchmarks.trials.rooms import with_rooms
from blockdraft.cli.display import progress
from blockdraft.data.documents import read_data
from blockdraft.data.folder import write_file
from blockdraft.drafters import BUNDLED_DFLASH, bundled
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.errors import UsageError
from blockdraft.evaluation.prompts import PromptSet, read_prompt_sets
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.settings import read_settings
from blockdraft.targets import Target, load_target, target_fingerprint
from blockdraft.training.devices import make_accelerator
from blockdraft.training.records import run_folder
from blockdraft.training.telling import Telling
from blockdraft.training.trainer import train
from blockdraft.training.variants import find_variant
from blockdraft.training.variants.dflash import DFlashRecipe

ROOT = Path(__file__).parents[2]
MADE = ROOT / "build" / "trials" / "redraft" / "drafters"
DONE = "trained"  # file of a training that has ended, beside its drafter
Plain: TypeAlias = dict[int, list[int]]  # answers by prompt


class CountedDFlash(DFlashDrafter):
    """DFlash that counts its passes.

    Attributes:
        counted: Draft passes so far, by the tokens that each took of a row.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.counted: Counter[int] = Counter()

    def _draft_pass(
        self, state: Any, tokens: Tensor, first: int = 0, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        self.counted[tokens.size(1)] += 1
        return super()._draft_pass(state, tokens, first, window)


@dataclass(frozen=True)
class Contender:
    """A way of drafting that takes part in a trial.

    Attributes:
        name: Of the base or of a variant of what is on trial, in files and tables.
        make: From a seed to what it drafts for, the target or something around it, and the drafter.
        is_base: Whether it is what the others are compared with.
    """

    name: str
    make: Callable[[int], tuple[Target, Any]]
    is_base: bool = False


def parser(about: str | None, name: str) -> argparse.ArgumentParser:
    """Options that all trials have."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--target", metavar="MODEL", help="folder or hub name; the bundled one by default")
    add(
        "--prompts",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help='JSON lines {"prompt": ...} or {"turns": [...]}; repeat it, since what is new has to pay on two sets',
    )
    add("--limit", type=int, default=32, help="prompts of each file (32)")
    add("--max-new-tokens", type=int, default=128, help="of an answer (128)")
    add("--temperatures", default="0", help="of the answers (0)")
    add("--ways", default="chain:3,chain:7,chain:15,tree:8,tree:16,tree:32", help="chains and trees of N guesses")
    add("--costs-of-16", default="1.25,3", help="time of a forward of 16 tokens over one, each judged alone (1.25,3)")
    add("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    add("--anew", action="store_true", help="forget what was made before")
    add("--out", type=Path, default=ROOT / "build" / "trials" / name, help=f"build/trials/{name}")
    return found


def with_drafters(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Those of a trial of drafters that have been trained."""
    help_ = f"of DFlash's kind, one for each seed, or bundled ({MADE}/base-*)"
    options.add_argument("--drafter", action="append", metavar="DIR", help=help_)
    return options


def drafters_of(given: argparse.Namespace) -> list[Path]:
    """The drafters of the seeds. Raises UsageError where there are none."""
    made = [folder for folder in sorted(MADE.glob("base-*")) if (run_folder(folder) / DONE).exists()]
    names = given.drafter or [str(folder) for folder in made]
    if not names:
        raise UsageError(f"There is no drafter in {MADE}; give --drafter, or run benchmarks.trials.redraft first.")
    return [(bundled()[BUNDLED_DFLASH] if name == "bundled" else Path(name)).resolve() for name in names]


def learn(variant: str, target: Target, data: Path, out: Path, recipe: Path, **changes: Any) -> None:
    """Train a drafter, or go on with what was interrupted; nothing where it is done.

    Args:
        variant: Of training, or of `registered/`.
        recipe: A TOML file as for `blockdraft train dflash`.
        changes: Fields of the variant's recipe that have other values.
    """
    done = run_folder(out) / DONE
    if done.exists():
        return
    with with_rooms():
        kind = find_variant(variant).recipe_class
        plain = read_settings(DFlashRecipe, recipe)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        values |= {"eval_every": 0, "eval_prompts": 0, "trackers": ()}  # what training costs is the same for all
        made = kind(**values | changes)
        accelerator = make_accelerator(made, run_folder(out))
        with progress("steps") as tell:
            telling = Telling(lambda stage, done, total: tell(f"{out.name}: {stage}", done, total))
            train(variant, target, read_data(data), out, made, accelerator, telling=telling)
    done.touch()


class Trial:
    """A folder of answers and what they say.

    Args:
        given: As `parser` reads it.
        fixed: What else all figures of the folder have in common.

    Raises:
        UsageError: Prompts or options cannot be read. ValueError: The folder holds figures of something else.
    """

    def __init__(self, given: argparse.Namespace, fixed: dict[str, Any]) -> None:
        self.given, self.out = given, given.out
        torch.set_num_threads(given.threads)
        self.sets = read_prompt_sets(given.prompts, given.limit)
        self.temperatures, self.costs = _numbers(given, "temperatures"), _numbers(given, "costs_of_16")
        self.ways = [parse(word) for word in given.ways.split(",")]
        self.target = load_target(given.target)
        torch.set_num_threads(given.threads)
        if given.anew and self.out.exists():
            shutil.rmtree(self.out)
        told = json.dumps([[one.name, one.prompts] for one in self.sets])
        fixed = fixed | {"target": target_fingerprint(self.target), "max_new_tokens": given.max_new_tokens}
        settled(self.out, fixed | {"prompts": hashlib.sha256(told.encode()).hexdigest()[:16]})
        self.rows = Rows(Answers, self.out / "answers.csv")

    def run(self, contenders: Sequence[Contender], seeds: Sequence[int]) -> None:
        """Measure what is missing, seed after seed, so that an interrupted trial has seen all equally often; then write
        what it says."""
        plain = {(one.name, at): self._plain(one, at) for one in self.sets for at in self.temperatures}
        weights: Weights | None = None
        for seed in seeds:
            for contender in contenders:
                target, drafter = contender.make(seed)
                weights = weights or read_by(drafter, self.target)
                for one in self.sets:
                    for at in self.temperatures:
                        self._answer(contender.name, seed, target, drafter, one, at, plain[one.name, at])
        assert weights is not None
        report.write(
            self.out,
            [row for row in self.rows.all if row.kind in {each.name for each in contenders} and row.seed in seeds],
            [each.name for each in contenders if each.is_base],
            weights,
            target_weights_read(self.target),
            self.costs,
        )

    def _answer(
        self, name: str, seed: int, target: Target, drafter: Any, one: PromptSet, at: float, plain: Plain
    ) -> None:
        ways = ways_of(self.ways, drafter.block_size, True)
        missing = [way for way in ways if (name, seed, one.name, at, way.name) not in self.rows.had]
        if missing:
            with progress("answers") as tell:

                def told(stage: str, done: int, total: int) -> None:
                    tell(stage.replace("dflash", name, 1), done, total)

                tokens = self.given.max_new_tokens
                found, _ = measure.answers("dflash", seed, target, drafter, one, at, tokens, missing, plain, told)
            self.rows.add(*(replace(row, kind=name) for row in found))

    def _plain(self, one: PromptSet, at: float) -> Plain:
        """Plain decoding's answers by prompt."""
        kept = self.out / "plain" / f"{one.name}-{at:g}.json"
        if not kept.exists():
            with progress("plain answers") as tell:
                tokens = self.given.max_new_tokens
                _, said = measure.answers(PLAIN, 0, self.target, NoDrafter(), one, at, tokens, [], None, tell)
            kept.parent.mkdir(exist_ok=True)
            write_file(kept, json.dumps(said).encode())
        return {int(i): ids for i, ids in json.loads(kept.read_text()).items()}


def read_by(drafter: Any, target: Target) -> Weights:
    """Weights that a DFlash drafter reads."""
    with torch.device("meta"):
        network = DFlashNetwork(drafter.config)  # of the loaded one not all weights are in their places
    return weights_read(KINDS["dflash"], network, 0, target)


def _numbers(given: argparse.Namespace, name: str) -> list[float]:
    text = getattr(given, name)
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--{name.replace('_', '-')} is {text!r}; give numbers with commas between them.") from None
