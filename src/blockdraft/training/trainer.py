"""The training run: steps, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator

from blockdraft.data.documents import TokenData
from blockdraft.drafters import entries
from blockdraft.errors import NumbersError
from blockdraft.folders import held
from blockdraft.formats import clear_remains
from blockdraft.settings import as_toml
from blockdraft.targets import Target
from blockdraft.training import checkpoints, start
from blockdraft.training.batches import Batch, Batches
from blockdraft.training.export import Format, export
from blockdraft.training.figures import figures_of, loss_of, not_finite, weights_of
from blockdraft.training.finish import forget_finish, told_to_finish
from blockdraft.training.loss import DraftLoss, Sums
from blockdraft.training.measure import held_out_prompts, measured_tau
from blockdraft.training.optimizers import make_optimizers, set_rate
from blockdraft.training.recipe import Recipe
from blockdraft.training.records import Records, draw, run_folder
from blockdraft.training.schedule import Schedule
from blockdraft.training.sources import features_of, open_source
from blockdraft.training.state import gathered, gathered_weights, restore
from blockdraft.training.telling import Telling
from blockdraft.training.trackers import begin_trackers, track
from blockdraft.types import Prompt


def train(
    variant_name: str,
    target: Target,
    data: TokenData,
    out: Path,
    recipe: Recipe,
    accelerator: Accelerator,
    prompts: Sequence[Prompt] | None = None,
    telling: Telling | None = None,
    written: Format | None = None,
    more: int = 0,
    other_answers: bool = False,
) -> list[dict[str, Any]]:
    """Train a drafter, or go on with a run: one that was interrupted, or one that has ended and of which more steps are
    asked for now, by the recipe or by `more`.

    A file `finish` in the run's folder (see `run_folder`) makes it end within a few steps.

    Args:
        variant_name: File name of the variant.
        target: On the accelerator's device.
        out: Folder of the drafter; what belongs to the run lies beside it, see `run_folder`.
        recipe: Of the variant's recipe class.
        accelerator: From `make_accelerator`.
        prompts: To measure tau on; None takes the beginnings of held-out documents.
        written: Format of the drafter in `out`; None is the first of those that its kind has.
        more: Steps to add behind the end of a run.
        other_answers: Learn from answers that another model wrote.

    Returns:
        The figures of all steps, as in log.jsonl; empty in all processes but the main one.

    Raises:
        ValueError: Data, target, recipe, disk or an earlier run in the same folder do not fit together, or another
            process is training there. All is checked before the first step, and told at once as far as it can be.
        FloatingPointError: The target's numbers or the loss are not finite. Of a run that did no step nothing is left.
    """
    main = accelerator.is_main_process
    told = telling if telling is not None and main else Telling()
    with held(out, "training") if main else contextlib.nullcontext():
        arguments = variant_name, target, data, out, recipe, accelerator, prompts, told, written
        return Trainer(*arguments, more, other_answers).run()


class Trainer:
    """Arguments as in `train`. Making one checks and loads everything; `run` trains."""

    def __init__(
        self,
        variant_name: str,
        target: Target,
        data: TokenData,
        out: Path,
        recipe: Recipe,
        accelerator: Accelerator,
        prompts: Sequence[Prompt] | None,
        telling: Telling,
        written: Format | None,
        more: int,
        other_answers: bool,
    ) -> None:
        self.target, self.accelerator, self.telling = target, accelerator, telling
        self.plain = Format(entries()[variant_name].layouts[0])
        self.written = written or self.plain
        self.out, self.folder = out, run_folder(out)
        state = checkpoints.newest(self.folder / "checkpoints")
        known = None
        if state is not None:
            known, data = state["identity"], start.data_of_run(data, state["data"], out, telling.note)
        settled, self.config, self.prompts = start.checked(
            variant_name, recipe, target, data, accelerator.num_processes, self.written, prompts, known, other_answers
        )
        self.variant, documents, trained, held_out = settled.variant, *settled[1:4]
        self.recipe = recipe = self.variant.recipe
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer is not None else None
        network = self.variant.network(self.config, vocabulary).to(target.device)
        self.variant.fit_data(network, data)
        self.variant.fit_head(network, target)
        if told := start.init_note(recipe, target):
            telling.note(told)
        if accelerator.is_main_process:
            clear_remains(out)
            clear_remains(self.folder / "measured")
        self.fresh = not self.folder.exists()
        start.check_folder(out, self.folder, network, recipe)
        identity = start.identity(variant_name, target, data, recipe, self.variant.free_fields)
        if state is not None:
            start.check_same(self.folder, state["identity"], identity)
        self.identity, self.manifest = identity, data.manifest
        for note in [*start.data_notes(documents, len(trained), len(held_out)), *settled.notes]:
            telling.note(note)
        slots = self.variant.taught_slots
        self.batches = Batches(documents, trained, recipe, slots)
        self.begin = 0 if state is None else int(state["step"])
        self.schedule = Schedule(self.batches.steps(), recipe, None if state is None else state["schedule"])
        self._plan(more)
        assert recipe.batch is not None
        # Rows that one process has on its device at a time.
        self.rows = recipe.batch // (accelerator.num_processes * recipe.accumulation)
        self.fixed = Batches(documents, held_out, recipe, slots).fixed(self.rows)
        if self.prompts is None:
            self.prompts = held_out_prompts(documents, held_out, recipe.eval_prompts)
        self.taps = taps = self.config.taps
        if self.variant.needs_teacher:
            if target.num_layers not in taps:
                self.taps = taps = (*taps, target.num_layers)
            start.check_teacher(target, documents[trained[0]].tokens)
        self.width = len(taps) * target.hidden_size
        self.source = open_source(recipe.features, target, data, documents, taps, telling.progress)

        module = DraftLoss(network, self.variant, target)
        named = [(name.removeprefix("network."), parameter) for name, parameter in module.named_parameters()]
        optimizers = make_optimizers(named, self.variant, recipe)
        size = sum(parameter.numel() for _, parameter in named)
        share = f"{accelerator.num_processes} processes ({accelerator.distributed_type.value})"
        alone = accelerator.num_processes == 1
        telling.note(f"{size:,} parameters, taps {self.config.taps}, {'one process' if alone else share}")
        self.module, *wrapped = accelerator.prepare(module, *optimizers)
        self.optimizers = [cast(torch.optim.Optimizer, getattr(one, "optimizer", one)) for one in wrapped]
        if state is not None:
            restore(self.module, self.optimizers, state)
        self.records = Records(self.folder, self.begin) if accelerator.is_main_process else None

    def run(self) -> list[dict[str, Any]]:
        recipe, accelerator = self.recipe, self.accelerator
        if accelerator.is_main_process:
            (self.folder / "recipe.toml").write_text(as_toml(recipe), encoding="utf-8")
            begin_trackers(accelerator, self.out.name, self.folder, recipe)
        if self.begin == self.schedule.end:  # it may be asked for in another format now
            self._export(self.out, self.written)
        began, tokens, last, step = time.monotonic(), 0, "", self.begin
        stream = self.batches.run(step)
        while step < self.schedule.end:
            if not self.schedule.finishing and told_to_finish(self.folder, self.accelerator):
                self.schedule.finish(step)
                self.telling.note(f"Told to finish: the rates fall until step {self.schedule.end}, which is the last.")
            (epoch, batch), step = next(stream), step + 1
            moment = time.monotonic()
            figures = {"step": step, "epoch": epoch, **self._step(batch, step - 1)}
            count = int((batch.tensors.documents_BS >= 0).sum())
            figures |= {"tokens": count, "tokens_per_second": count / (time.monotonic() - moment)}
            tokens += count
            end = step == self.schedule.end
            if end or (recipe.eval_every and step % recipe.eval_every == 0):
                figures |= self._evaluate(step)
                last = f", tau {figures['tau']:.2f}" if "tau" in figures else ""
            if self.records is not None:
                self.records.add(figures)
                track(accelerator, figures)
            if end or (recipe.save_every and step % recipe.save_every == 0):
                self._save(step)
            speed = tokens / (time.monotonic() - began)
            told = f"step {step} of {self.schedule.end}, loss {figures['loss']:.3f}, {speed:,.0f} tokens/s{last}"
            self.telling.progress(told, step - self.begin, self.schedule.end - self.begin)
            if step == 1 and (note := start.loss_note(figures["loss"], self.target)):
                self.telling.note(note)
        forget_finish(self.folder, self.accelerator)
        if self.records is not None and not draw(self.records, self.folder / "curves.png"):
            self.telling.note("There is no picture of the curves, since matplotlib is not installed.")
        accelerator.end_training()
        return self.records.lines if self.records is not None else []

    def _step(self, batch: Batch, done: int) -> dict[str, Any]:
        """One optimiser step; `batch` is that of all processes together."""
        recipe, accelerator, processes = self.recipe, self.accelerator, self.accelerator.num_processes
        share = self.schedule.rate(done)
        set_rate(self.optimizers, share)
        weights = weights_of(self.variant, [batch])
        self.module.train()
        found: list[Sums] = []
        for part in range(recipe.accumulation):
            begin = (part * processes + accelerator.process_index) * self.rows
            rows = batch.rows(begin, begin + self.rows)
            syncing = part == recipe.accumulation - 1
            with contextlib.nullcontext() if syncing else accelerator.no_sync(self.module):
                sums = self._forward(rows)
                # Wrappers for many processes take the mean of their gradients, and the sum is wanted.
                accelerator.backward(loss_of(self.variant, sums.terms_T, weights) * processes)
            found.append(Sums(*(one.detach() for one in sums)))
        norm = accelerator.clip_grad_norm_(self.module.parameters(), recipe.clip or math.inf)
        figures = figures_of(self.variant, found, weights, accelerator)
        if not math.isfinite(figures["loss"]) or not math.isfinite(float(norm)):
            raise self._failure(batch, done, figures["loss"], float(norm))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {"rate": share, "gradient_norm": float(norm), **figures}

    @torch.no_grad()
    def _failure(self, batch: Batch, done: int, loss: float, norm: float) -> NumbersError:
        """Why a step failed. Removes the run's folder where this was its first step."""
        target = self.target
        parts = [batch.rows(begin, begin + self.rows) for begin in range(0, len(batch.contents), self.rows)]
        said = [features_of(one, self.source, self.width, target) for one in parts]
        said.append(target.head(torch.ones(1, target.hidden_size, dtype=target.dtype, device=target.device)))
        if done == 0 and self.fresh:
            self.accelerator.end_training()
            if self.accelerator.is_main_process:
                shutil.rmtree(self.folder)
        return not_finite(said, done, loss, norm)

    def _forward(self, rows: Batch) -> Sums:
        features = features_of(rows, self.source, self.width, self.target)
        size, teacher = self.target.hidden_size, None
        tapped = len(self.config.taps) * size
        if self.variant.needs_teacher:
            begin = self.taps.index(self.target.num_layers) * size
            teacher = features[:, :, begin : begin + size]
        sums: Sums = self.module(features[:, :, :tapped], teacher, *rows.on(self.target.device))
        return Sums(*sums)

    @torch.no_grad()
    def _evaluate(self, step: int) -> dict[str, Any]:
        """Figures on the held-out documents, and tau of the drafter as it is written."""
        figures: dict[str, Any] = {}
        if self.fixed:
            self.module.eval()
            processes, index = self.accelerator.num_processes, self.accelerator.process_index
            empty = self.batches.batch([()] * self.rows, torch.Generator())
            padded = self.fixed + [empty] * (-len(self.fixed) % processes)
            weights = weights_of(self.variant, self.fixed)
            sums = [self._forward(batch) for batch in padded[index::processes]]
            found = figures_of(self.variant, sums, weights, self.accelerator)
            figures = {f"held_out_{name}": value for name, value in found.items()}
        if self.prompts:
            measured = self.folder / "measured"
            self._export(measured, self.plain)
            if self.accelerator.is_main_process:
                self.telling.progress(f"step {step}: measuring tau", step - self.begin, self.schedule.end - self.begin)
                answers = self.recipe.eval_tokens, self.recipe.eval_temperature
                figures["tau"] = measured_tau(measured, self.target, self.prompts, *answers)
            self.accelerator.wait_for_everyone()
        return figures

    def _export(self, folder: Path, written: Format) -> None:
        """Write the drafter as it is now."""
        tensors = gathered_weights(self.module)
        if self.accelerator.is_main_process:
            named = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            export(folder, written, self.config, self.variant.saved(named), self.target)

    def _save(self, step: int) -> None:
        """Write the drafter and then a checkpoint, so that a run whose last checkpoint is there has nothing to do."""
        self._export(self.out, self.written)
        state = gathered(self.module, self.optimizers)
        if self.accelerator.is_main_process:
            state |= {"step": step, "identity": self.identity, "schedule": self.schedule.saved(), "data": self.manifest}
            checkpoints.save(self.folder / "checkpoints", step, state, self.recipe.keep)
        self.accelerator.wait_for_everyone()

    def _plan(self, more: int) -> None:
        """How many steps there are, and a word on it."""
        steps = self.batches.steps()
        if self.begin in (0, self.schedule.end):
            forget_finish(self.folder, self.accelerator)
        self.schedule.go_on(self.begin, steps, more)
        if note := start.steps_note(self.begin, self.schedule.end, steps, self.recipe, self.folder):
            self.telling.note(note)
