"""The trainer of drafters: steps, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from blockdraft.drafters import entries
from blockdraft.errors import NumbersError, UsageError
from blockdraft.folders import clear_remains
from blockdraft.formats import check_writable
from blockdraft.machine import wait_for
from blockdraft_tools.export import ExportFormat, export
from blockdraft_train import checkpoints, preflight
from blockdraft_train.batches import Batch, Batches
from blockdraft_train.graceful_shutdown import Stopped, StopSignals, clear_finish_request
from blockdraft_train.hidden_state_sources import FOLDER, batch_hidden_states, open_source
from blockdraft_train.job import TrainingJob
from blockdraft_train.loss import DraftLoss, Sums
from blockdraft_train.metrics import (
    held_out_prompts,
    measure_tau,
    not_finite,
    step_metrics,
    total_loss,
    total_weights,
)
from blockdraft_train.optimizers import make_optimizers, set_rate
from blockdraft_train.progress import Progress, RunLog, draw_curves, run_folder
from blockdraft_train.quantized_weights import quantized_layers, quantized_weights
from blockdraft_train.run import TrainingRun, claimed
from blockdraft_train.schedule import Schedule
from blockdraft_train.variant import find_variant


def train(job: TrainingJob) -> list[dict[str, Any]]:
    """Train a drafter, or resume a run: one that was interrupted, or one that ended and is extended.

    A file `finish` in the run's folder (see `run_folder`) ends the run within a few steps. SIGTERM and SIGINT end it at
    once, after a checkpoint of all steps that are done.

    Returns:
        Metrics of all steps, as in log.jsonl; empty in all processes but the main one.

    Raises:
        UsageError: Data, target, recipe, disk or an earlier run in the same folder do not fit together, or another
            process is training there. All of it is checked before the first step and reported together where possible.
        NumbersError: The target's outputs or the loss are not finite. A run that fails at its first step leaves no
            files.
        Stopped: A signal ended the run. The same call resumes it.
    """
    if not job.accelerator.is_main_process:
        job = replace(job, progress=Progress())
    stops = StopSignals(job.progress.note)
    with claimed(job.out, job.accelerator, stops):
        return Trainer(job, stops).run()


class Trainer(TrainingRun):
    """Trainer of one run. Making it checks and loads everything; `run` trains.

    Args:
        job: The run.
        stops: Signals that end it; None listens to none.
    """

    def __init__(self, job: TrainingJob, stops: StopSignals | None = None) -> None:
        self.target, self.accelerator, self.progress = job.target, job.accelerator, job.progress
        self.stops = stops or StopSignals(job.progress.note)
        target, accelerator, progress, data, out = job.target, job.accelerator, job.progress, job.data, job.out
        only = find_variant(job.variant).layout(job.recipe, target)
        if only is not None and job.written is not None and job.written.name != only:
            raise UsageError(
                f"format must be {only} for this recipe and target, got {job.written.name}: no other format can hold "
                "such a drafter. Leave it out."
            )
        self.evaluation_format = ExportFormat(only or entries()[job.variant].layouts[0])
        self.written = job.written or self.evaluation_format
        self.out, self.folder = out, run_folder(out)
        state = checkpoints.newest(self.folder / "checkpoints") or {}
        if state:
            data = preflight.data_of_run(data, state["data"], out, progress.note)
        resolved, self.config, self.prompts = preflight.resolve_and_check(
            job, data, self.written, state.get("identity")
        )
        documents, self.variant = resolved.documents, resolved.variant
        self.recipe = recipe = self.variant.recipe
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer is not None else None
        network = self.variant.network(self.config, vocabulary).to(target.device)
        self.variant.fit_data(network, data)
        self.variant.fit_head(network, target)
        self.quantized = []
        if recipe.qat_bits is not None:
            self.quantized = quantized_layers(network, self.variant.is_quantized, recipe.qat_bits)
        if note := preflight.init_note(recipe, target):
            progress.note(note)
        if accelerator.is_main_process:
            clear_remains(out)
            clear_remains(self.folder / "measured")
        self.is_new = not self.folder.exists()
        preflight.check_folder(out, self.folder, network, recipe.keep)
        check_writable(out)
        identity = preflight.identity(job.variant, target, data, recipe, self.variant.free_fields)
        if state:
            preflight.check_same(self.folder, state["identity"], identity)
        self.identity, self.manifest = identity, data.manifest
        notes = preflight.data_notes(documents, len(resolved.trained), len(resolved.held_out))
        for note in [*notes, *resolved.notes]:
            progress.note(note)
        slots = self.variant.taught_slots
        self.batches = Batches(documents, resolved.trained, recipe, slots, self.variant.alone)
        self.begin = int(state.get("step", 0))
        self.schedule = Schedule(self.batches.steps(), recipe, state.get("schedule"))
        self._plan_steps(job.more)
        assert recipe.batch is not None
        self.sequences = recipe.batch // (accelerator.num_processes * recipe.accumulation)  # on a device at a time
        self.fixed = Batches(documents, resolved.held_out, recipe, slots).fixed(self.sequences)
        if self.prompts is None:
            self.prompts = held_out_prompts(documents, resolved.held_out, recipe.eval_prompts)
        self.target_layers = self.config.target_layers
        if self.variant.needs_teacher:
            if target.num_layers not in self.target_layers:
                self.target_layers = (*self.target_layers, target.num_layers)
            preflight.check_teacher(target, documents[resolved.trained[0]].tokens)
        self.width = len(self.target_layers) * target.hidden_size
        alone = accelerator.num_processes == 1
        if self.begin < self.schedule.end:
            self.source = open_source(
                recipe.hidden_states,
                target,
                data,
                documents,
                self.target_layers,
                beside=self.folder,
                reserved=preflight.disk_bytes(network, recipe.keep) if alone else None,
                progress=progress,
            )

        module = DraftLoss(network, self.variant, target)
        named = [(name.removeprefix("network."), parameter) for name, parameter in module.named_parameters()]
        optimizers = make_optimizers(named, self.variant, recipe)
        size = sum(parameter.numel() for _, parameter in named)
        several = f"{accelerator.num_processes} processes ({accelerator.distributed_type.value})"
        layers, processes = self.config.target_layers, "one process" if alone else several
        progress.note(f"{size:,} parameters, target layers {layers}, {processes}")
        self.module, *wrapped = accelerator.prepare(module, *optimizers)
        self.optimizers = [cast(torch.optim.Optimizer, getattr(wrap, "optimizer", wrap)) for wrap in wrapped]
        if state:
            checkpoints.restore_state(self.module, self.optimizers, state)
        self.log = RunLog(self.folder, self.begin) if accelerator.is_main_process else None

    def run(self) -> list[dict[str, Any]]:
        """Train until the run ends, and return the metrics of all steps."""
        if self.begin == self.schedule.end:  # a finished run may be exported in another format
            self._export(self.out, self.written)
        self._stream = self.batches.run(self.begin)
        with self.stops.deferred():
            self.run_steps()
        if self.log is not None:
            shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
            if not draw_curves(self.log, self.folder / "curves.png"):
                self.progress.note("The curves are not drawn, because matplotlib is not installed.")
        self.close()
        return self.log.lines if self.log is not None else []

    @property
    def end(self) -> int:
        return self.schedule.end

    def close(self) -> None:
        self.quantized = []
        super().close()

    def finish(self, step: int) -> None:
        if not self.schedule.finishing:
            self.schedule.finish(step)
            self.progress.note(f"Finishing: the learning rates fall until step {self.end}, which is the last.")

    def step(self, done: int) -> dict[str, Any]:
        epoch, batch = next(self._stream)
        metrics = {"epoch": epoch, **self._step(batch, done)}
        if done == 0 and (note := preflight.loss_note(metrics["loss"], self.target)):
            self.progress.note(note)
        return metrics | {"tokens": int((batch.tensors.documents_BS >= 0).sum())}

    def timed_step(self, sequences: int) -> float:
        """Do the first step with this number of sequences of its batch, and return the seconds that it took."""
        batch, whole = next(self.batches.run(0))[1].part(0, sequences), self.sequences
        wait_for(self.target.device)
        self.sequences, began = sequences, time.perf_counter()
        self._step(batch, 0)
        wait_for(self.target.device)
        self.sequences = whole
        return time.perf_counter() - began

    def write(self, folder: Path) -> None:
        """Write the drafter as it is now."""
        self._export(folder, self.evaluation_format, with_embedding=False)

    def _step(self, batch: Batch, done: int) -> dict[str, Any]:
        """Do one optimizer step on a batch, that of all processes together, after `done` steps.

        Raises:
            Stopped: A signal came before the weights changed.
        """
        recipe, accelerator, processes = self.recipe, self.accelerator, self.accelerator.num_processes
        share = self.schedule.rate(done)
        set_rate(self.optimizers, share)
        weights = total_weights(self.variant, [batch])
        stopped = False
        with self._quantization(done):  # ends outside of `try`, so that a signal then saves no quantized weights
            try:
                with self.stops.deferred(processes > 1):  # several processes stop together, between steps
                    sums = self._gradients(batch, weights)
            except Stopped:
                if processes > 1:
                    raise
                stopped = True
        if stopped:
            self.module.zero_grad()
            self.save_and_stop(done)  # the weights have not changed yet
        norm = accelerator.clip_grad_norm_(self.module.parameters(), recipe.clip or math.inf)
        metrics = step_metrics(self.variant, sums, weights, accelerator)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(float(norm)):
            raise self._not_finite(batch, done, metrics["loss"], float(norm))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {"rate": share, "gradient_norm": float(norm), **metrics}

    def _quantization(self, done: int) -> contextlib.AbstractContextManager[None]:
        """Return a context that quantizes the weights, if the recipe says so, for the step after `done` steps."""
        bits = self.recipe.qat_bits
        if bits is None or done % 2 == 0:
            return contextlib.nullcontext()
        if isinstance(self.module, FSDPModule):
            self.module.reshard()  # an evaluation leaves gathered weights, which the step would use as they are
        return quantized_weights(self.quantized, bits)

    def _gradients(self, batch: Batch, weights: Sequence[float]) -> list[Sums]:
        """Run forward and backward over this process's sequences of a batch, and return the sums of each part."""
        recipe, accelerator, processes = self.recipe, self.accelerator, self.accelerator.num_processes
        self.module.train()
        parts: list[Sums] = []
        for number in range(recipe.accumulation):
            begin = (number * processes + accelerator.process_index) * self.sequences
            syncing = number == recipe.accumulation - 1
            with contextlib.nullcontext() if syncing else accelerator.no_sync(self.module):
                sums = self.forward_sums(batch.part(begin, begin + self.sequences))
                # Wrappers for many processes average their gradients, but the sum is needed.
                accelerator.backward(total_loss(self.variant, sums.terms_T, weights) * processes)
            parts.append(Sums(*(value.detach() for value in sums)))
        return parts

    @torch.no_grad()
    def _not_finite(self, batch: Batch, done: int, loss: float, norm: float) -> NumbersError:
        """Return the error for a failed step. Remove the run's folder if this was the first step of a new run."""
        target = self.target
        parts = [batch.part(begin, begin + self.sequences) for begin in range(0, len(batch.contents), self.sequences)]
        outputs = [batch_hidden_states(part, self.source, self.width, target) for part in parts]
        outputs.append(target.head(torch.ones(1, target.hidden_size, dtype=target.dtype, device=target.device)))
        if done == 0 and self.is_new:
            self.accelerator.end_training()
            if self.accelerator.is_main_process:
                shutil.rmtree(self.folder)
        return not_finite(outputs, done, loss, norm)

    def forward_sums(self, batch: Batch) -> Sums:
        hidden_states = batch_hidden_states(batch, self.source, self.width, self.target)
        size, teacher = self.target.hidden_size, None
        width = len(self.config.target_layers) * size
        if self.variant.needs_teacher:
            begin = self.target_layers.index(self.target.num_layers) * size
            teacher = hidden_states[:, :, begin : begin + size]
        sums: Sums = self.module(hidden_states[:, :, :width], teacher, *batch.on(self.target.device))
        return Sums(*sums)

    @torch.no_grad()
    def evaluate(self, step: int) -> tuple[dict[str, Any], str]:
        """Return metrics on the held-out documents, and tau of the drafter as it is written."""
        metrics: dict[str, Any] = {}
        if self.fixed:
            self.module.eval()
            processes, index = self.accelerator.num_processes, self.accelerator.process_index
            empty = self.batches.batch([()] * self.sequences, torch.Generator(), self.variant.taught_slots)
            padded = self.fixed + [empty] * (-len(self.fixed) % processes)
            weights = total_weights(self.variant, self.fixed)
            sums = [self.forward_sums(batch) for batch in padded[index::processes]]
            held_out = step_metrics(self.variant, sums, weights, self.accelerator)
            metrics = {f"held_out_{name}": value for name, value in held_out.items()}
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
        return metrics, f", tau {metrics['tau']:.2f}" if "tau" in metrics else ""

    def _export(self, folder: Path, written: ExportFormat, with_embedding: bool = True) -> None:
        """Write the drafter as it is now; see `export`."""
        tensors = checkpoints.gather_weights(self.module)
        if self.accelerator.is_main_process:
            named = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            tensors = self.variant.saved(named)
            kept, bits = self.variant.kept, self.recipe.qat_bits
            export(folder, written, self.config, tensors, self.target, kept, with_embedding, bits)

    def save(self, step: int) -> None:
        """Write the drafter and then a checkpoint, in this order: a run with its last checkpoint has nothing to do."""
        self._export(self.out, self.written)
        state = checkpoints.gather_state(self.module, self.optimizers)
        if self.accelerator.is_main_process:
            state |= {"step": step, "identity": self.identity, "schedule": self.schedule.saved(), "data": self.manifest}
            checkpoints.save(self.folder / "checkpoints", step, state, self.recipe.keep)
        self.accelerator.wait_for_everyone()

    def _plan_steps(self, more: int) -> None:
        """Fix the number of steps, and print a note about it if there is one."""
        steps = self.batches.steps()
        if self.begin in (0, self.schedule.end):
            clear_finish_request(self.folder, self.accelerator)
        self.schedule.go_on(self.begin, steps, more)
        if note := preflight.steps_note(self.begin, self.schedule.end, steps, self.recipe, self.folder):
            self.progress.note(note)
