"""The loop of every training run: steps, evaluations, checkpoints, and early ends."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import nn

from blockdraft.folders import held
from blockdraft_train import checkpoints
from blockdraft_train.devices import begin_trackers, end_processes, track
from blockdraft_train.graceful_shutdown import Stopped, StopSignals, agreed, clear_finish_request, finish_requested
from blockdraft_train.progress import Progress, RunLog, run_folder
from blockdraft_train.settings_files import as_toml


@contextmanager
def claimed(out: Path, accelerator: Accelerator, stops: StopSignals) -> Iterator[None]:
    """Claim the folder of a run, listen to signals, and name the newest checkpoint if the disk is full.

    Raises:
        UsageError: Another process trains there, or the disk is full.
    """
    main = accelerator.is_main_process
    with (
        held(out, "training") if main else nullcontext(),
        stops.listening(),
        checkpoints.named_when_full(run_folder(out)),
    ):
        yield


class TrainingRun(ABC):
    """Runs the steps of a training run. A subclass sets the attributes and trains one kind of model.

    Attributes:
        recipe: Its fields `eval_every`, `save_every` and `save_minutes` say when to evaluate and to save.
        out: Folder of the trained model; `folder` holds recipe, log and checkpoints.
        stops: Signals that end the run.
        begin: Number of steps that are done.
        log: Metrics of all steps; None except in the main process.
        module, optimizers: As wrapped by the accelerator.
    """

    recipe: Any
    accelerator: Accelerator
    progress: Progress
    stops: StopSignals
    out: Path
    folder: Path
    begin: int
    log: RunLog | None
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @property
    @abstractmethod
    def end(self) -> int:
        """Number of steps after which the run ends."""

    @abstractmethod
    def step(self, done: int) -> dict[str, Any]:
        """Do one optimizer step after `done` steps. Return its metrics, "loss" and "tokens" (a count) among them."""

    @abstractmethod
    def evaluate(self, step: int) -> tuple[dict[str, Any], str]:
        """Return metrics on held-out data, and a few words on them."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Write the model, and then a checkpoint."""

    @abstractmethod
    def finish(self, step: int) -> None:
        """Bring `end` closer, because the run was asked to finish."""

    def close(self) -> None:
        """Leave the other processes. No step can follow."""
        meshes = {getattr(parameter, "device_mesh", None) for parameter in self.module.parameters()} - {None}
        del self.module, self.optimizers
        end_processes(self.accelerator, meshes)

    def save_and_stop(self, step: int) -> NoReturn:
        """End the run after a signal, with a checkpoint of the steps that are done."""
        if step > self._saved:
            self.save(step)
        self.close()
        raise Stopped(self.stops.number or signal.SIGTERM)  # another process may have got the signal

    def run_steps(self) -> None:
        """Do the remaining steps, with evaluations and checkpoints."""
        recipe, accelerator = self.recipe, self.accelerator
        if self.log is not None:
            (self.folder / "recipe.toml").write_text(as_toml(recipe), encoding="utf-8")
            begin_trackers(accelerator, self.out.name, self.folder, recipe)
        began = saved_at = time.monotonic()
        step, tokens, evaluated, self._saved = self.begin, 0, "", self.begin
        self.progress.report(f"step {step + 1} of {self.end}", 0, self.end - step)
        while step < self.end:
            if finish_requested(self.folder, accelerator):
                self.finish(step)
            moment = time.monotonic()
            metrics = {"step": step + 1, **self.step(step)}
            step += 1
            metrics["tokens_per_second"] = metrics["tokens"] / (time.monotonic() - moment)
            tokens += metrics["tokens"]
            at_end = step == self.end
            if at_end or (recipe.eval_every and step % recipe.eval_every == 0):
                measured, evaluated = self._evaluate_unless_stopped(step, at_end)
                metrics |= measured
            if self.log is not None:
                self.log.add(metrics)
                track(accelerator, metrics)
            late = recipe.save_minutes > 0 and time.monotonic() - saved_at >= 60 * recipe.save_minutes
            late, stopped = agreed(accelerator, late, self.stops.number is not None)
            if at_end or late or (recipe.save_every and step % recipe.save_every == 0):
                self.save(step)
                self._saved, saved_at = step, time.monotonic()
            if stopped:
                self.save_and_stop(step)
            speed = tokens / (time.monotonic() - began)
            stage = f"step {step} of {self.end}, loss {metrics['loss']:.3f}, {speed:,.0f} tokens/s{evaluated}"
            self.progress.report(stage, step - self.begin, self.end - self.begin)
        clear_finish_request(self.folder, accelerator)

    def _evaluate_unless_stopped(self, step: int, at_end: bool) -> tuple[dict[str, Any], str]:
        """Evaluate, unless a signal interrupts it. The last evaluation is finished first."""
        hurried = not at_end and self.accelerator.num_processes == 1
        if hurried and self.stops.number is not None:
            return {}, ""
        try:
            with self.stops.deferred(not hurried):
                return self.evaluate(step)
        except Stopped:
            if not hurried:
                raise
            self.progress.note(f"The evaluation of step {step} is skipped.")
            return {}, ""
