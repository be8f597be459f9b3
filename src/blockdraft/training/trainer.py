"""Training of a drafter: steps, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule

from blockdraft.data.documents import TokenData
from blockdraft.drafters import entries
from blockdraft.errors import NumbersError, UsageError
from blockdraft.folders import clear_remains, held
from blockdraft.machine import wait_for
from blockdraft.settings import as_toml
from blockdraft.targets import Target
from blockdraft.training import checkpoints, preflight
from blockdraft.training.batches import Batch, Batches
from blockdraft.training.devices import begin_trackers, end_processes, track
from blockdraft.training.export import Format, export
from blockdraft.training.graceful_shutdown import Stopped, StopSignals, agreed, clear_finish_request, finish_requested
from blockdraft.training.hidden_state_sources import FOLDER, batch_hidden_states, open_source
from blockdraft.training.loss import DraftLoss, Sums
from blockdraft.training.metrics import (
    held_out_prompts,
    measure_tau,
    not_finite,
    step_metrics,
    total_loss,
    total_weights,
)
from blockdraft.training.optimizers import make_optimizers, set_rate
from blockdraft.training.progress import Progress, RunLog, draw_curves, run_folder
from blockdraft.training.recipe import Recipe
from blockdraft.training.rounded_weights import rounded_layers, rounded_weights
from blockdraft.training.schedule import Schedule
from blockdraft.training.variant import find_variant
from blockdraft.types import Prompt


def train(
    variant_name: str,
    target: Target,
    data: TokenData,
    out: Path,
    recipe: Recipe,
    accelerator: Accelerator,
    prompts: Sequence[Prompt] | None = None,
    progress: Progress | None = None,
    written: Format | None = None,
    more: int = 0,
    other_answers: bool = False,
) -> list[dict[str, Any]]:
    """Train a drafter, or resume a run: one that was interrupted, or one that has ended and that the recipe or `more`
    extends.

    A file `finish` in the run's folder (see `run_folder`) ends the run within a few steps. The signals TERM and INT end
    it at once, after a checkpoint of all steps that are done.

    Args:
        variant_name: Name of the variant.
        target: Target, on the accelerator's device.
        data: Documents to train on and to measure on.
        out: Folder of the drafter; the run's own folder lies beside it, see `run_folder`.
        recipe: Recipe of the variant's recipe class.
        accelerator: From `make_accelerator`.
        prompts: Prompts to measure tau on; None takes the beginnings of held-out documents.
        progress: Callbacks of the main process; None reports nothing.
        written: Format of the drafter in `out`; None is the first one of its kind.
        more: Steps to add beyond the end of a run.
        other_answers: Accept answers that another model wrote.

    Returns:
        Metrics of all steps, as in log.jsonl; empty in all processes but the main one.

    Raises:
        UsageError: Data, target, recipe, disk or an earlier run in the same folder do not fit together, or another
            process is training there. All of it is checked before the first step and reported together where possible.
        NumbersError: The target's outputs or the loss are not finite. A run that fails at its first step leaves no
            files.
        Stopped: A signal ended the run. The same call resumes it.
    """
    main = accelerator.is_main_process
    progress = progress if progress is not None and main else Progress()
    stops = StopSignals(progress.note)
    with (
        held(out, "training") if main else contextlib.nullcontext(),
        stops.listening(),
        checkpoints.named_when_full(run_folder(out)),
    ):
        trainer = Trainer(
            variant_name=variant_name,
            target=target,
            data=data,
            out=out,
            recipe=recipe,
            accelerator=accelerator,
            prompts=prompts,
            progress=progress,
            stops=stops,
            written=written,
            more=more,
            other_answers=other_answers,
        )
        return trainer.run()


def measuring(
    variant_name: str, target: Target, data: TokenData, out: Path, recipe: Recipe, accelerator: Accelerator
) -> Trainer:
    """Trainer whose steps are to be timed. Arguments are those of `train`."""
    progress = Progress()
    return Trainer(
        variant_name=variant_name,
        target=target,
        data=data,
        out=out,
        recipe=recipe,
        accelerator=accelerator,
        prompts=None,
        progress=progress,
        stops=StopSignals(progress.note),
        written=None,
        more=0,
        other_answers=False,
    )


class Trainer:
    """A run of `train`, whose arguments it takes. Making it checks and loads everything; `run` trains."""

    def __init__(
        self,
        *,
        variant_name: str,
        target: Target,
        data: TokenData,
        out: Path,
        recipe: Recipe,
        accelerator: Accelerator,
        prompts: Sequence[Prompt] | None,
        progress: Progress,
        stops: StopSignals,
        written: Format | None,
        more: int,
        other_answers: bool,
    ) -> None:
        self.target, self.accelerator, self.progress, self.stops = target, accelerator, progress, stops
        only = find_variant(variant_name).layout(recipe)
        if only is not None and written is not None and written.name != only:
            raise UsageError(f"The format is {written.name} and the recipe needs {only}; leave it out.")
        self.evaluation_format = Format(only or entries()[variant_name].layouts[0])
        self.written = written or self.evaluation_format
        self.out, self.folder = out, run_folder(out)
        state = checkpoints.newest(self.folder / "checkpoints")
        if state is not None:
            data = preflight.data_of_run(data, state["data"], out, progress.note)
        resolved, self.config, self.prompts = preflight.resolve_and_check(
            variant_name=variant_name,
            recipe=recipe,
            target=target,
            data=data,
            processes=accelerator.num_processes,
            written=self.written,
            prompts=prompts,
            earlier=None if state is None else state["identity"],
            other_answers=other_answers,
        )
        documents, self.variant = resolved.documents, resolved.variant
        self.recipe = recipe = self.variant.recipe
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer is not None else None
        network = self.variant.network(self.config, vocabulary).to(target.device)
        self.variant.fit_data(network, data)
        self.variant.fit_head(network, target)
        bits = recipe.qat_bits
        self.rounded = [] if bits is None else rounded_layers(network, self.variant.is_rounded, bits)
        if note := preflight.init_note(recipe, target):
            progress.note(note)
        if accelerator.is_main_process:
            clear_remains(out)
            clear_remains(self.folder / "measured")
        self.is_new = not self.folder.exists()
        preflight.check_folder(out, self.folder, network, recipe)
        identity = preflight.identity(variant_name, target, data, recipe, self.variant.free_fields)
        if state is not None:
            preflight.check_same(self.folder, state["identity"], identity)
        self.identity, self.manifest = identity, data.manifest
        notes = preflight.data_notes(documents, len(resolved.trained), len(resolved.held_out))
        for note in [*notes, *resolved.notes]:
            progress.note(note)
        slots = self.variant.taught_slots
        self.batches = Batches(documents, resolved.trained, recipe, slots, self.variant.alone)
        self.begin = 0 if state is None else int(state["step"])
        self.schedule = Schedule(self.batches.steps(), recipe, None if state is None else state["schedule"])
        self._plan_steps(more)
        assert recipe.batch is not None
        # Number of rows that one process has on its device at a time.
        self.rows = recipe.batch // (accelerator.num_processes * recipe.accumulation)
        self.fixed = Batches(documents, resolved.held_out, recipe, slots).fixed(self.rows)
        if self.prompts is None:
            self.prompts = held_out_prompts(documents, resolved.held_out, recipe.eval_prompts)
        self.target_layers = target_layers = self.config.target_layers
        if self.variant.needs_teacher:
            if target.num_layers not in target_layers:
                self.target_layers = target_layers = (*target_layers, target.num_layers)
            preflight.check_teacher(target, documents[resolved.trained[0]].tokens)
        self.width = len(target_layers) * target.hidden_size
        if self.begin < self.schedule.end:
            alone = accelerator.num_processes == 1
            self.source = open_source(
                recipe.hidden_states,
                target,
                data,
                documents,
                target_layers,
                beside=self.folder,
                reserved=preflight.disk_bytes(network, recipe) if alone else None,
                progress=progress,
            )

        module = DraftLoss(network, self.variant, target)
        named = [(name.removeprefix("network."), parameter) for name, parameter in module.named_parameters()]
        optimizers = make_optimizers(named, self.variant, recipe)
        size = sum(parameter.numel() for _, parameter in named)
        share = f"{accelerator.num_processes} processes ({accelerator.distributed_type.value})"
        alone = accelerator.num_processes == 1
        progress.note(f"{size:,} parameters, taps {self.config.target_layers}, {'one process' if alone else share}")
        self.module, *wrapped = accelerator.prepare(module, *optimizers)
        self.optimizers = [cast(torch.optim.Optimizer, getattr(one, "optimizer", one)) for one in wrapped]
        if state is not None:
            checkpoints.restore_state(self.module, self.optimizers, state)
        self.log = RunLog(self.folder, self.begin) if accelerator.is_main_process else None

    def run(self) -> list[dict[str, Any]]:
        recipe, accelerator, progress = self.recipe, self.accelerator, self.progress
        if accelerator.is_main_process:
            (self.folder / "recipe.toml").write_text(as_toml(recipe), encoding="utf-8")
            begin_trackers(accelerator, self.out.name, self.folder, recipe)
        if self.begin == self.schedule.end:  # a finished run may be asked for another format
            self._export(self.out, self.written)
        with self.stops.deferred():
            self._train()
        if accelerator.is_main_process:
            shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
        clear_finish_request(self.folder, accelerator)
        if self.log is not None and not draw_curves(self.log, self.folder / "curves.png"):
            progress.note("The curves are not drawn, because matplotlib is not installed.")
        self._end()
        return self.log.lines if self.log is not None else []

    def _end(self) -> None:
        """Leave the other processes. No step can follow."""
        meshes = {getattr(one, "device_mesh", None) for one in self.module.parameters()} - {None}
        del self.module, self.optimizers, self.rounded
        end_processes(self.accelerator, meshes)

    def _train(self) -> None:
        """Do the steps of the run that are left, with evaluations and checkpoints."""
        recipe, accelerator, progress = self.recipe, self.accelerator, self.progress
        began, tokens, tau, step, self.saved = time.monotonic(), 0, "", self.begin, (self.begin, time.monotonic())
        stream = self.batches.run(step)
        progress.report(f"step {step + 1} of {self.schedule.end}", 0, self.schedule.end - step)
        while step < self.schedule.end:
            if not self.schedule.finishing and finish_requested(self.folder, accelerator):
                self.schedule.finish(step)
                progress.note(f"Told to finish: the rates fall until step {self.schedule.end}, which is the last.")
            epoch, batch = next(stream)
            moment = time.monotonic()
            metrics = {"step": step + 1, "epoch": epoch, **self._step(batch, step)}
            step += 1
            count = int((batch.tensors.documents_BS >= 0).sum())
            metrics |= {"tokens": count, "tokens_per_second": count / (time.monotonic() - moment)}
            tokens += count
            end = step == self.schedule.end
            if end or (recipe.eval_every and step % recipe.eval_every == 0):
                metrics |= self._evaluate_unless_stopped(step, end)
                tau = f", tau {metrics['tau']:.2f}" if "tau" in metrics else ""
            if self.log is not None:
                self.log.add(metrics)
                track(accelerator, metrics)
            late = recipe.save_minutes > 0 and time.monotonic() - self.saved[1] >= 60 * recipe.save_minutes
            late, stopped = agreed(accelerator, late, self.stops.number is not None)
            if end or late or (recipe.save_every and step % recipe.save_every == 0):
                self._save(step)
            if stopped:
                self._save_and_stop(step)
            speed = tokens / (time.monotonic() - began)
            stage = f"step {step} of {self.schedule.end}, loss {metrics['loss']:.3f}, {speed:,.0f} tokens/s{tau}"
            progress.report(stage, step - self.begin, self.schedule.end - self.begin)
            if step == 1 and (note := preflight.loss_note(metrics["loss"], self.target)):
                progress.note(note)

    def timed_step(self, rows: int) -> float:
        """Do the first step with so many rows of its batch, and return the seconds that it took."""
        batch, whole = next(self.batches.run(0))[1].rows(0, rows), self.rows
        wait_for(self.target.device)
        self.rows, began = rows, time.perf_counter()
        self._step(batch, 0)
        wait_for(self.target.device)
        self.rows = whole
        return time.perf_counter() - began

    def write(self, folder: Path) -> None:
        """Write the drafter as it is now."""
        self._export(folder, self.evaluation_format, with_embedding=False)

    def _save_and_stop(self, step: int) -> NoReturn:
        """End the run after a signal, with a checkpoint of the steps that are done."""
        if step > self.saved[0]:
            self._save(step)
        self._end()
        raise Stopped(self.stops.number or signal.SIGTERM)  # another process may have got the signal

    def _step(self, batch: Batch, done: int) -> dict[str, Any]:
        """One optimizer step on a batch, that of all processes together. `done` steps came before it.

        Raises:
            Stopped: A signal came before the weights changed.
        """
        recipe, accelerator, processes = self.recipe, self.accelerator, self.accelerator.num_processes
        share = self.schedule.rate(done)
        set_rate(self.optimizers, share)
        weights = total_weights(self.variant, [batch])
        stopped = False
        with self._rounding(done):  # a second signal while it ends is no reason to save what is still rounded
            try:
                with self.stops.deferred(processes > 1):  # several processes stop together, between steps
                    found = self._gradients(batch, weights)
            except Stopped:
                if processes > 1:
                    raise
                stopped = True
        if stopped:
            self.module.zero_grad()
            self._save_and_stop(done)  # the weights have not changed yet
        norm = accelerator.clip_grad_norm_(self.module.parameters(), recipe.clip or math.inf)
        metrics = step_metrics(self.variant, found, weights, accelerator)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(float(norm)):
            raise self._not_finite(batch, done, metrics["loss"], float(norm))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {"rate": share, "gradient_norm": float(norm), **metrics}

    def _rounding(self, done: int) -> contextlib.AbstractContextManager[None]:
        """Round the weights, as the recipe says, for the step that `done` steps came before."""
        bits = self.recipe.qat_bits
        if bits is None or done % 2 == 0:
            return contextlib.nullcontext()
        if isinstance(self.module, FSDPModule):
            self.module.reshard()  # an evaluation leaves gathered weights, which the step would use as they are
        return rounded_weights(self.rounded, bits)

    def _gradients(self, batch: Batch, weights: Sequence[float]) -> list[Sums]:
        """Run forward and backward over this process's rows of a batch, and return the sums of each part."""
        recipe, accelerator, processes = self.recipe, self.accelerator, self.accelerator.num_processes
        self.module.train()
        found: list[Sums] = []
        for part in range(recipe.accumulation):
            begin = (part * processes + accelerator.process_index) * self.rows
            rows = batch.rows(begin, begin + self.rows)
            syncing = part == recipe.accumulation - 1
            with contextlib.nullcontext() if syncing else accelerator.no_sync(self.module):
                sums = self._forward(rows)
                # Wrappers for many processes average their gradients, but the sum is needed.
                accelerator.backward(total_loss(self.variant, sums.terms_T, weights) * processes)
            found.append(Sums(*(one.detach() for one in sums)))
        return found

    @torch.no_grad()
    def _not_finite(self, batch: Batch, done: int, loss: float, norm: float) -> NumbersError:
        """Error for a failed step. Removes the run's folder if this was the first step of a new run."""
        target = self.target
        parts = [batch.rows(begin, begin + self.rows) for begin in range(0, len(batch.contents), self.rows)]
        outputs = [batch_hidden_states(part, self.source, self.width, target) for part in parts]
        outputs.append(target.head(torch.ones(1, target.hidden_size, dtype=target.dtype, device=target.device)))
        if done == 0 and self.is_new:
            self.accelerator.end_training()
            if self.accelerator.is_main_process:
                shutil.rmtree(self.folder)
        return not_finite(outputs, done, loss, norm)

    def _forward(self, rows: Batch) -> Sums:
        hidden_states = batch_hidden_states(rows, self.source, self.width, self.target)
        size, teacher = self.target.hidden_size, None
        target_layer_numbers = len(self.config.target_layers) * size
        if self.variant.needs_teacher:
            begin = self.target_layers.index(self.target.num_layers) * size
            teacher = hidden_states[:, :, begin : begin + size]
        sums: Sums = self.module(hidden_states[:, :, :target_layer_numbers], teacher, *rows.on(self.target.device))
        return Sums(*sums)

    def _evaluate_unless_stopped(self, step: int, end: bool) -> dict[str, Any]:
        """Metrics of `_evaluate`; none if a signal interrupts it, unless it is the last one, which is finished."""
        hurried = not end and self.accelerator.num_processes == 1
        if hurried and self.stops.number is not None:
            return {}
        try:
            with self.stops.deferred(not hurried):
                return self._evaluate(step)
        except Stopped:
            if not hurried:
                raise
            self.progress.note(f"The evaluation of step {step} is left out.")
            return {}

    @torch.no_grad()
    def _evaluate(self, step: int) -> dict[str, Any]:
        """Metrics on the held-out documents, and tau of the drafter as it is written."""
        metrics: dict[str, Any] = {}
        if self.fixed:
            self.module.eval()
            processes, index = self.accelerator.num_processes, self.accelerator.process_index
            empty = self.batches.batch([()] * self.rows, torch.Generator(), self.variant.taught_slots)
            padded = self.fixed + [empty] * (-len(self.fixed) % processes)
            weights = total_weights(self.variant, self.fixed)
            sums = [self._forward(batch) for batch in padded[index::processes]]
            found = step_metrics(self.variant, sums, weights, self.accelerator)
            metrics = {f"held_out_{name}": value for name, value in found.items()}
        if self.prompts:
            measured, recipe = self.folder / "measured", self.recipe
            self._export(measured, self.evaluation_format, with_embedding=False)
            if self.accelerator.is_main_process:
                done, total = step - self.begin, self.schedule.end - self.begin
                self.progress.report(f"step {step}: measuring tau", done, total)
                metrics["tau"] = measure_tau(
                    measured, self.target, self.prompts, tokens=recipe.eval_tokens, temperature=recipe.eval_temperature
                )
            self.accelerator.wait_for_everyone()
        return metrics

    def _export(self, folder: Path, written: Format, with_embedding: bool = True) -> None:
        """Write the drafter as it is now; see `export`."""
        tensors = checkpoints.gather_weights(self.module)
        if self.accelerator.is_main_process:
            named = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            tensors = self.variant.saved(named)
            kept, bits = self.variant.kept, self.recipe.qat_bits
            export(folder, written, self.config, tensors, self.target, kept, with_embedding, bits)

    def _save(self, step: int) -> None:
        """Write the drafter and then a checkpoint, in this order: with the last checkpoint a run has nothing to do."""
        self._export(self.out, self.written)
        state = checkpoints.gather_state(self.module, self.optimizers)
        if self.accelerator.is_main_process:
            state |= {"step": step, "identity": self.identity, "schedule": self.schedule.saved(), "data": self.manifest}
            checkpoints.save(self.folder / "checkpoints", step, state, self.recipe.keep)
        self.accelerator.wait_for_everyone()
        self.saved = step, time.monotonic()

    def _plan_steps(self, more: int) -> None:
        """Fix the number of steps, and say so where there is something to say."""
        steps = self.batches.steps()
        if self.begin in (0, self.schedule.end):
            clear_finish_request(self.folder, self.accelerator)
        self.schedule.go_on(self.begin, steps, more)
        if note := preflight.steps_note(self.begin, self.schedule.end, steps, self.recipe, self.folder):
            self.progress.note(note)
