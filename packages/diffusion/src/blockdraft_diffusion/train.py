"""Training of block-diffusion models."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from blockdraft.errors import UsageError, counted
from blockdraft.targets import weights_fingerprint
from blockdraft_diffusion.denoiser import Denoiser
from blockdraft_diffusion.folder import write_model
from blockdraft_diffusion.likelihood import likelihood
from blockdraft_diffusion.losses import losses
from blockdraft_diffusion.model import DiffusionModel
from blockdraft_diffusion.noise import Noise, training_noise
from blockdraft_diffusion.settings import DiffusionRecipe, LikelihoodSettings
from blockdraft_diffusion.text import PackedTexts, TextTokens, seed_of, sequence_length
from blockdraft_train import checkpoints, preflight
from blockdraft_train.checkpoints import gather_state, restore_state
from blockdraft_train.devices import make_accelerator
from blockdraft_train.graceful_shutdown import StopSignals, clear_finish_request
from blockdraft_train.metrics import not_finite
from blockdraft_train.progress import Progress, RunLog, run_folder
from blockdraft_train.run import TrainingRun, claimed

BETAS = (0.9, 0.999)
EVAL_DRAWS = 4
MAX_GRADIENT_NORM = 1.0
KEPT = 2  # newest checkpoints
GPU_BATCH, CPU_BATCH = 16, 4
# Recipe fields that may change when a run resumes, since they do not affect the weights.
MUTABLE = {"eval_every", "save_every", "save_minutes", "dtype", "trackers"}


def train(
    model: DiffusionModel,
    texts: Sequence[TextTokens],
    steps: int,
    out: Path,
    recipe: DiffusionRecipe = DiffusionRecipe(),  # noqa: B008 (frozen)
    progress: Progress = Progress(),  # noqa: B008 (frozen)
    accelerator: Accelerator | None = None,
) -> list[dict[str, Any]]:
    """Train a model, or resume a run that was interrupted or needs more steps.

    A resumed run reaches the same weights as an uninterrupted one: the order of the sequences and the noise of a step
    depend only on the seed and the step number. Creating the file `finish` in the run's folder ends the run after the
    next step, with a complete model and a checkpoint. SIGTERM and SIGINT end it after the current step.

    Args:
        model: Float32 model on the accelerator's device. Its network is trained in place.
        texts: Texts, packed in this order into sequences.
        steps: Total number of optimizer steps, including those of earlier calls.
        out: Folder of the trained model. The log and checkpoints are next to it, in `out`.run.
        accelerator: From `make_accelerator`; None uses this process alone, on the model's device.

    Returns:
        Metrics of all steps, as in log.jsonl; empty except in the main process.

    Raises:
        UsageError: The text is too short, blocks or sequences are longer than the context, the batch is not divisible
            by the number of processes, the weights are sharded (FSDP), the folder has another run or other files,
            another process trains there, or the disk is full.
        NumbersError: The loss, or a weight of the model, is not finite.
        Stopped: A signal ended the run. The same call resumes it.
    """
    accelerator = accelerator or make_accelerator(recipe, run_folder(out), model.network.device.type)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise UsageError("This training takes no weights in shards (FSDP); use --multi_gpu in place of --use_fsdp.")
    progress = progress if accelerator.is_main_process else Progress()
    stops = StopSignals(progress.note)
    with claimed(out, accelerator, stops), stops.deferred():
        return _DiffusionRun(model, texts, steps, out, recipe, progress, accelerator, stops).run()


class _Losses(nn.Module):
    """Module whose forward computes `losses`, so that Accelerate can distribute it over processes."""

    def __init__(self, model: DiffusionModel) -> None:
        super().__init__()
        self.network, self._model = model.network, model

    def forward(self, ids: Tensor, masked: Tensor, weights: Tensor) -> Tensor:
        return losses(self._model, ids, Noise(masked, weights))


class _DiffusionRun(TrainingRun):
    """A training run; see `train` for the arguments."""

    def __init__(
        self,
        model: DiffusionModel,
        texts: Sequence[TextTokens],
        steps: int,
        out: Path,
        recipe: DiffusionRecipe,
        progress: Progress,
        accelerator: Accelerator,
        stops: StopSignals,
    ) -> None:
        self.out, self.progress, self.accelerator, self.stops = out, progress, accelerator, stops
        self._end = steps
        size, length = recipe.block_size or model.config.block_size, sequence_length(model, recipe.length)
        if size > length:
            raise UsageError(f"block_size must be at most {length}, the length of sequences, got {size}.")
        self.batch = recipe.batch or (GPU_BATCH if model.network.device.type == "cuda" else CPU_BATCH)
        if self.batch % accelerator.num_processes:
            raise UsageError(
                f"batch must be a multiple of the number of processes, {accelerator.num_processes}, got {self.batch}."
            )
        self.recipe = recipe = replace(recipe, batch=self.batch)
        self.model = replace(model, config=replace(model.config, block_size=size))
        self.model.check_weights()
        self.data = PackedTexts(texts, length, recipe.held_out, recipe.seed)
        self.network = self.model.network.train().requires_grad_(True)
        self.folder = run_folder(out)
        self.is_new = not self.folder.exists()
        state = checkpoints.newest(self.folder / "checkpoints")
        self.begin = 0 if state is None else int(state["step"])
        self.identity = {
            "model": weights_fingerprint(self.network.named_parameters()),
            "data": hashlib.sha256(self.data.all.ids.numpy().tobytes()).hexdigest()[:16],
            **{name: value for name, value in asdict(recipe).items() if name not in MUTABLE},
        }
        if state is not None:
            preflight.check_same(self.folder, state["identity"], self.identity)
        if self.begin > steps:
            raise UsageError(
                f"steps must be at least {self.begin}, the steps of the run in {self.folder}, got {steps}."
            )
        preflight.check_folder(out, self.folder, self.network, KEPT)
        optimizer = torch.optim.AdamW(self.network.parameters(), recipe.learning_rate, BETAS, weight_decay=0.0)
        self.module, wrapped = accelerator.prepare(_Losses(self.model), optimizer, device_placement=[False, False])
        self.optimizers = [cast(torch.optim.Optimizer, getattr(wrapped, "optimizer", wrapped))]
        self.average = _moving_average(self.network, recipe.ema, self.begin)
        if state is not None:
            restore_state(self.module, self.optimizers, state)
            self.average.module.load_state_dict(state["ema"], strict=False)
        self.log = RunLog(self.folder, self.begin) if accelerator.is_main_process else None

    @property
    def end(self) -> int:
        return self._end

    def run(self) -> list[dict[str, Any]]:
        clear_finish_request(self.folder, self.accelerator)
        self._report_start()
        self.run_steps()
        self.network.load_state_dict(self.average.module.state_dict())
        self.network.eval().requires_grad_(False)
        self.close()
        return self.log.lines if self.log is not None else []

    def finish(self, step: int) -> None:
        self._end = step + 1
        self.progress.note(f"Finishing with step {self._end}, as requested; the same command resumes the run.")

    def _report_start(self) -> None:
        note, data = self.progress.note, self.data
        size = sum(weight.numel() for weight in self.network.parameters())
        processes = self.accelerator.num_processes
        share = f", {processes} processes ({self.accelerator.distributed_type.value})" if processes > 1 else ""
        note(
            f"{data.num_train} training sequences of {data.length} tokens, {data.num_held_out} held out; "
            f"{size:,} parameters; {counted(self.batch, 'sequence')} a step{share}"
        )
        if data.num_skipped:
            note(f"{counted(data.num_skipped, 'sequence')} without a token to learn, left out")
        if self.begin == self.end:
            note(f"The run has done its {self.end} steps; increase --steps to continue.")
        elif self.begin:
            note(f"Resuming from step {self.begin}; delete {self.folder} to start over.")

    def step(self, done: int) -> dict[str, Any]:
        recipe, accelerator, device = self.recipe, self.accelerator, self.network.device
        ids, eligible = self.data.batch(done, self.batch)
        generator = torch.Generator().manual_seed(seed_of(recipe.seed, 1, done))
        noise = training_noise(eligible, self.model.config.block_size, (recipe.low, recipe.high), generator)
        # Each process samples the noise of the whole batch and uses its share, so that only the seed decides the noise.
        share = self.batch // accelerator.num_processes
        own = slice(accelerator.process_index * share, (accelerator.process_index + 1) * share)
        own_losses = self.module(*(part[own].to(device) for part in (ids, *noise)))
        # Distributed wrappers average the gradients over processes, but the loss needs their sum.
        total = own_losses.sum() / max(int(eligible.sum()), 1)
        accelerator.backward(total * accelerator.num_processes)
        norm = float(accelerator.clip_grad_norm_(self.module.parameters(), MAX_GRADIENT_NORM))
        loss = float(cast(Tensor, accelerator.reduce(total.detach(), "sum")))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if done == 0 and self.is_new and accelerator.is_main_process:
                shutil.rmtree(self.folder)
            raise not_finite((), done, loss, norm)
        rate = recipe.learning_rate * min(1.0, (done + 1) / (recipe.warmup + 1))
        [optimizer] = self.optimizers
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.average.update_parameters(self.network)
        return {"loss": loss, "rate": rate, "gradient_norm": norm, "tokens": ids.numel()}

    def evaluate(self, step: int) -> tuple[dict[str, Any], str]:
        """Return the bits per token of the held-out sequences with the averaged weights."""
        if not self.data.num_held_out:
            return {}, ""
        settings = LikelihoodSettings(length=self.data.length, draws=EVAL_DRAWS, batch=self.batch)
        averaged = replace(self.model, network=cast(Denoiser, self.average.module.eval()))
        with self.accelerator.autocast():
            bits = likelihood(averaged, self.data.held_out(), settings).bits_per_token
        return {"held_out_bits": bits}, f", held out {bits:.3f} bits a token"

    def save(self, step: int) -> None:
        ema = {name: weight.to("cpu", copy=True) for name, weight in self.average.module.named_parameters()}
        state = gather_state(self.module, self.optimizers)
        if self.log is not None:
            buffers = {name: buffer.detach().cpu() for name, buffer in self.network.named_buffers()}
            for name, bound in (("sampling_eps_min", self.recipe.low), ("sampling_eps_max", self.recipe.high)):
                if name in buffers:  # as in the paper's checkpoints
                    buffers[name] = torch.tensor(bound)
            write_model(self.model, buffers | ema, self.out)
            state |= {"step": step, "identity": self.identity, "ema": ema}
            checkpoints.save(self.folder / "checkpoints", step, state, KEPT)
        self.accelerator.wait_for_everyone()


def _moving_average(network: nn.Module, decay: float, steps: int) -> AveragedModel:
    """Return the moving average of a network's parameters, which has seen `steps` steps.

    The decay is smaller in early steps, and 0 if `decay` is.
    """

    def average(averaged: Tensor, weight: Tensor, seen: Tensor | int) -> Tensor:
        step = int(seen) - 1
        return averaged.lerp(weight, 1 - (min(decay, (1 + step) / (10 + step)) if decay else 0.0))

    model = AveragedModel(network, avg_fn=average).requires_grad_(False)
    model.n_averaged.fill_(1 + steps)  # at 0 it would copy the weights of the first step
    return model
