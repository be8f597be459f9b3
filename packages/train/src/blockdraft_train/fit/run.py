"""A fit as a whole: survey and plan in the first run, then the plan's steps, then the card."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.folders import check_free, check_writable, held, make_folder, write_file
from blockdraft.targets import Target, check_target, load_target, without_tokenizer
from blockdraft.timing import telling
from blockdraft.types import DEFAULT_BACKEND
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.manifest import read_manifest
from blockdraft_train.data.records import check_sources
from blockdraft_train.data.regenerate import prompts_of
from blockdraft_train.data.settings import RecordSettings
from blockdraft_train.fit import survey
from blockdraft_train.fit.card import engines, usage, write_card
from blockdraft_train.fit.facts import FitPlan, TargetFacts, show
from blockdraft_train.fit.plan import Default, Planner, answer_length, candidates, reference
from blockdraft_train.fit.prompts import read_prompts, write_prompts
from blockdraft_train.fit.settings import FitSettings, PromptSettings
from blockdraft_train.fit.steps import Where, done_steps, make_steps, run_steps
from blockdraft_train.progress import run_folder
from blockdraft_train.variant import find_variant

FORMAT = 1
PLAN = "plan.json"
SAMPLE = 64  # number of prompts that the survey takes its answers from
FEW, PROMPT_SECONDS = 4, 5.0  # number of prompts that a target writes which takes longer than this for them
MIN_CONTEXT = 2 * Default.EVAL_TOKENS


@dataclass(frozen=True)
class Fit:
    """A requested fit.

    Attributes:
        sources: Sources of prompts; empty if the target writes its own.
        records: How the sources are read.
    """

    where: Where
    settings: FitSettings
    sources: tuple[str, ...]
    records: RecordSettings

    def asked(self) -> dict[str, Any]:
        """Return the values that must stay the same for a fit to be resumed."""
        where = {name: value for name, value in asdict(self.where).items() if name != "out"}
        records = {"split": self.records.split, "subset": self.records.subset}
        return {**where, **asdict(self.settings), "data": list(self.sources), **records}

    def record_options(self) -> list[str]:
        """Return the command-line options of `records`."""
        subset = [] if self.records.subset is None else ["--subset", self.records.subset]
        return subset if self.records.split == RecordSettings.split else [*subset, "--split", self.records.split]


def run_fit(fit: Fit, dry_run: bool, note: Callable[[str], None]) -> list[str]:
    """Make the plan if there is none yet, run the steps that are not done, and write the card.

    Args:
        dry_run: Whether to stop after planning and to write nothing.
        note: Called with sentences about the progress.

    Returns:
        Lines about the outcome and the use of the drafter; in a dry run, lines about the plan.

    Raises:
        UsageError: Folders, data, target or time do not suffice. Everything is checked before the first step, and
            reported together.
        BlockdraftError: A step failed.
    """
    with held(fit.where.folder, "blockdraft fit"):
        return _run(fit, dry_run, note)


def _run(fit: Fit, dry_run: bool, note: Callable[[str], None]) -> list[str]:
    folder = fit.where.folder
    known = read_manifest(folder / PLAN, FORMAT)
    if known is None:
        plan, lines = _plan(fit, note)
    else:
        _check_same(folder, known["asked"], fit.asked())
        plan, lines = FitPlan(**known["plan"]), list(known["survey"])
        note(f"The fit follows {folder / PLAN}; to start over, delete {folder} and {run_folder(fit.where.out)}.")
    if dry_run:
        return lines
    if known is None:
        make_folder(folder)
        made = {"format": FORMAT, "asked": fit.asked(), "plan": asdict(plan), "survey": lines}
        write_file(folder / PLAN, (json.dumps(made, indent=2) + "\n").encode())
    steps = make_steps(plan, fit.where, fit.sources, fit.record_options())
    if all(step.name in done_steps(folder) for step in steps):
        note("All steps are done.")
    else:
        for line in lines:
            note(line)
    run_steps(steps, folder, note, slack=(1 - Default.SAFETY) * 3600 * fit.settings.hours)
    methods = write_card(fit.where, plan, steps, done_steps(folder), fit.sources, lines)
    return [
        outcome(methods),
        f"The drafter is {fit.where.out}; its README.md has the figures.",
        "",
        *usage(fit.where, plan.temperature),
        *(f"{name}: {line}" for name, line in engines(fit.where).items()),
    ]


WORTHWHILE = 1.02  # speed-up from which on a drafter is worth having
NOT_YET = (
    "It does not pay off here yet. More training makes it better: run the command with more --hours and another --out. "
    "Until then use --drafter lookup, which needs no training and pays off where answers repeat the prompt."
)


def outcome(methods: dict[str, Any]) -> str:
    chain, auto = methods["chain"], methods["chain:auto"]
    same = f"same answers: {100 * min(chain['identical'], auto['identical']):.0f} %"
    if chain["tau"] is None or auto["speedup"] is None:
        return f"All answers to held-out prompts are repetitive, so tau and speed mean nothing; {same}"
    figures = f'tau {chain["tau"]:.2f}; with "auto" {auto["speedup"]:.2f} times the speed of plain decoding; {same}'
    return figures if auto["speedup"] > WORTHWHILE else f"{figures}\n{NOT_YET}"


def _plan(fit: Fit, note: Callable[[str], None]) -> tuple[FitPlan, list[str]]:
    """Survey target and machine, and plan. Everything that can be refused is refused here."""
    settings, where, complaints = fit.settings, fit.where, Complaints()
    scratch = where.folder / "survey"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed run
    with complaints.noting():
        for folder in (where.out, where.folder, run_folder(where.out)):
            check_free(folder)
        check_writable(where.out)
    with complaints.noting():
        check_sources(fit.sources, fit.records)
    with complaints.noting():
        if where.target is not None:
            check_target(where.target, where.revision)
    complaints.check()  # before anything slow
    with telling(note, "Loading the target"):
        # With torch's default number of threads, as in the commands that follow.
        model, backend = where.target or "bundled", where.backend or DEFAULT_BACKEND
        named = {name: getattr(where, name) for name in ("dtype", "device", "adapter", "revision")}
        load = partial(load_target, model, backend=backend, **named)
        target = load()
    start, facts = survey.age(), survey.target_facts(target)
    variants = _check_target(target, facts, settings.variant, complaints)
    with (
        complaints.noting(),
        telling(note, "Reading the prompts" if fit.sources else "Writing some prompts with the target"),
    ):
        prompts, available = _sample(fit, target)
    complaints.check()
    machine = survey.machine(target, where.out)
    tokens = answer_length(settings, target.max_context)
    quantized = partial(load, quantize=survey.WRITER_QUANTIZE) if survey.may_be_quantized(target) else None
    try:
        measured = survey.measure(target, facts, prompts, settings.hours, tokens, variants, scratch, note, quantized)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):  # absent
            where.folder.rmdir()
    del target
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the processes of the steps
    plan = Planner(settings, facts, machine, measured, available, start, survey.age()).plan()
    return plan, show(plan, facts, machine, fit.sources, settings.hours)


def _sample(fit: Fit, target: Target) -> tuple[list[Any], int | None]:
    """Return some prompts, as the engine takes them, and the number of all prompts in the sources."""
    if fit.sources:
        pool = PromptSettings.pool
        settings = PromptSettings(count=pool, held_out=1, seed=fit.settings.seed)
        prompts = read_prompts(fit.sources, replace(fit.records, limit=pool), target, settings)
    else:
        start = time.monotonic()
        for count, batch_size in ((FEW, 2 * FEW), (SAMPLE, SAMPLE)):
            with Engine(target, load_drafter("none", target=target), batch_size) as engine:
                prompts = write_prompts(engine, PromptSettings(count=count, held_out=0, seed=fit.settings.seed))
            if time.monotonic() - start > PROMPT_SECONDS:
                break
    sample = [
        record["prompt"] if "prompt" in record else prompts_of(record["messages"])[0]
        for record in prompts.records[:SAMPLE]
    ]
    return sample, prompts.available


def _check_target(target: Target, facts: TargetFacts, asked: str | None, complaints: Complaints) -> list[str]:
    """Return the kinds of drafters to compare, which fit the target. Faults are added to the complaints.

    Args:
        asked: The only kind to make; None compares several.
    """
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, and `fit` needs one; put tokenizer.json into its folder.")
    if target.max_context < MIN_CONTEXT:
        complaints.messages.append(
            f"The target's context is {target.max_context} tokens; `fit` needs {MIN_CONTEXT} or more."
        )
    fitting, faults = list[str](), Complaints()
    for name in [asked] if asked else candidates(facts):
        with faults.noting():
            variant = find_variant(name)
            variant(variant.recipe_class(**reference(name, facts))).config(target)
            fitting.append(name)
    if not fitting:
        complaints.messages += faults.messages
    return fitting


def _check_same(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    changed = [name for name in ours if theirs.get(name) != ours[name]]
    if changed:
        changes = "; ".join(f"{name} was {theirs.get(name)!r} and is {ours[name]!r}" for name in changed)
        raise UsageError(
            f"{folder} holds a fit with other options: {changes}. Give its options to resume it, choose another --out, "
            "or delete the folder."
        )
