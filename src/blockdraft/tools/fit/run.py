"""A fit from beginning to end: survey and plan on the first start, then the plan's steps, then the card."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from blockdraft.data.folder import check_free, check_writable, make_folder, read_manifest, write_file
from blockdraft.data.records import check_sources
from blockdraft.data.regenerate import prompts_of
from blockdraft.data.settings import DataSettings, RecordSettings
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import Complaints, UsageError
from blockdraft.folders import held
from blockdraft.targets import Target, checked_folder, load_target, without_tokenizer
from blockdraft.tools.fit import survey
from blockdraft.tools.fit.card import engines, usage, write_card
from blockdraft.tools.fit.plan import EVAL_TOKENS, Plan, answer_length, make_plan, reference, show
from blockdraft.tools.fit.prompts import read_prompts, write_prompts
from blockdraft.tools.fit.settings import FitSettings, PromptSettings
from blockdraft.tools.fit.steps import Where, done_steps, make_steps, run_steps
from blockdraft.training.progress import run_folder
from blockdraft.training.variant import find_variant, fit_gains
from blockdraft.types import DEFAULT_BACKEND

FORMAT = 1
PLAN = "plan.json"
SAMPLE = 96  # prompts that are answered for the survey
LEAST_CONTEXT = 2 * EVAL_TOKENS


@dataclass(frozen=True)
class Fit:
    """What is asked for.

    Attributes:
        sources: Of prompts; none where the target is to write them.
        rows: How they are read.
    """

    where: Where
    settings: FitSettings
    sources: tuple[str, ...]
    rows: RecordSettings

    def asked(self) -> dict[str, Any]:
        """What must be the same for a fit to go on."""
        where = {name: value for name, value in asdict(self.where).items() if name != "out"}
        rows = {"split": self.rows.split, "subset": self.rows.subset}
        return {**where, **self.settings.asked(), "data": list(self.sources), **rows}

    def row_options(self) -> list[str]:
        """`rows` as the commands are told."""
        subset = [] if self.rows.subset is None else ["--subset", self.rows.subset]
        return subset if self.rows.split == RecordSettings.split else [*subset, "--split", self.rows.split]


def run_fit(fit: Fit, dry_run: bool, note: Callable[[str], None]) -> list[str]:
    """Plan if there is no plan yet, do what is not done, and write the card.

    Args:
        dry_run: Stop at the plan, and write nothing.
        note: Called with sentences about what goes on.

    Returns:
        Lines about the outcome, and how it is used; about the plan in a dry run.

    Raises:
        ValueError: Something that is known before the first step does not fit; all of it together.
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
        plan, lines = Plan(**known["plan"]), list(known["survey"])
        note(f"{folder / PLAN} is followed; to begin afresh, delete {folder} and {run_folder(fit.where.out)}.")
    if dry_run:
        return lines
    if known is None:
        make_folder(folder)
        made = {"format": FORMAT, "asked": fit.asked(), "plan": plan.as_json(), "survey": lines}
        write_file(folder / PLAN, (json.dumps(made, indent=2) + "\n").encode())
    steps = make_steps(plan, fit.where, fit.sources, fit.row_options())
    if all(step.name in done_steps(folder) for step in steps):
        note("All steps are done.")
    else:
        for line in lines:
            note(line)
    run_steps(steps, folder, note)
    methods = write_card(fit.where, plan, steps, done_steps(folder), fit.sources, lines)
    elsewhere = engines(fit.where)
    return [
        _outcome(methods),
        f"{fit.where.out} is the drafter; its README.md has the figures.",
        "",
        *usage(fit.where, plan.temperature),
        *(f"{name}: {line}" for name, line in elsewhere.items()),
    ]


def _outcome(methods: dict[str, Any]) -> str:
    whole, auto = methods["chain"], methods["chain:auto"]
    same = f"same answers: {100 * min(whole['identical'], auto['identical']):.0f} %"
    if whole["tau"] is None or auto["speedup"] is None:
        return f"All answers to held-out prompts run in circles, so neither tau nor speed can be told; {same}"
    return f'tau {whole["tau"]:.2f}; with "auto" {auto["speedup"]:.2f} times the speed of plain decoding; {same}'


def _plan(fit: Fit, note: Callable[[str], None]) -> tuple[Plan, list[str]]:
    """Survey and plan. What can be refused is refused here."""
    settings, complaints = fit.settings, Complaints()
    variants: list[str] = [settings.variant] if settings.variant else list(fit_gains())
    scratch = fit.where.folder / "survey"
    shutil.rmtree(scratch, ignore_errors=True)  # of a start that was killed
    with complaints.noting():
        _check_folders(fit.where)
    with complaints.noting():
        check_sources(fit.sources, fit.rows)
    with complaints.noting():
        if fit.where.target is not None:
            checked_folder(fit.where.target, fit.where.revision)
    complaints.check()  # before anything takes long
    note("loading the target ...")
    with complaints.noting():
        # With torch's own number of threads, as the commands that compute for long.
        where, backend = fit.where, fit.where.backend or DEFAULT_BACKEND
        target = load_target(
            where.target, where.dtype, where.device, backend, adapter=where.adapter, revision=where.revision
        )
        start = survey.age()
        _check_target(target, variants, complaints)
        note("reading the prompts ..." if fit.sources else "the target writes some prompts ...")
        prompts, available = _sample(fit, target)
    complaints.check()
    note("measuring how fast the target answers, is read and trained for here ...")
    facts, machine = survey.target_facts(target), survey.machine(target, fit.where.out)
    tokens = answer_length(settings, target.max_context)
    try:
        measured = survey.measure(target, prompts, settings.hours, tokens, variants, scratch, note)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):  # absent
            fit.where.folder.rmdir()
    del target
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the steps are processes of their own
    plan = make_plan(settings, facts, machine, measured, available, start, survey.age())
    return plan, show(plan, facts, machine, fit.sources, settings.hours)


def _sample(fit: Fit, target: Target) -> tuple[list[Any], int | None]:
    """Some prompts, as the engine takes them, and how many there are."""
    if fit.sources:
        pool = PromptSettings.pool
        settings = PromptSettings(count=pool, held_out=1, seed=fit.settings.seed)
        found = read_prompts(fit.sources, replace(fit.rows, limit=pool), target, settings)
    else:
        with Engine(target, load_drafter("none", target=target), DataSettings.batch_size) as engine:
            found = write_prompts(engine, PromptSettings(count=SAMPLE, held_out=0, seed=fit.settings.seed))
    rows = found.rows[:SAMPLE]
    return [row["prompt"] if "prompt" in row else prompts_of(row["messages"])[0] for row in rows], found.available


def _check_target(target: Target, variants: list[str], complaints: Complaints) -> None:
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, and fitting takes one; put tokenizer.json into its folder.")
    if target.max_context < LEAST_CONTEXT:
        complaints.messages.append(
            f"The target's context is {target.max_context} tokens; {LEAST_CONTEXT} are the least."
        )
    for name in variants:
        variant = find_variant(name)
        with complaints.noting():
            variant(variant.recipe_class(**reference(name, survey.target_facts(target)))).config(target)


def _check_folders(where: Where) -> None:
    for folder in (where.out, where.folder, run_folder(where.out)):
        check_free(folder)
    check_writable(where.out)


def _check_same(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    changed = [name for name in ours if theirs.get(name) != ours[name]]
    if changed:
        told = "; ".join(f"{name} {theirs.get(name)!r} then and {ours[name]!r} now" for name in changed)
        raise UsageError(
            f"{folder} holds a fit that was begun with other options: {told}. Give the former to go on with it, choose "
            "another --out, or delete the folder."
        )
