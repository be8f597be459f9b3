"""Training loop of block-diffusion models."""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from blockdraft.diffusion.folder import write_model
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.losses import losses
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.noise import Noise, training_noise
from blockdraft.diffusion.settings import DiffusionRecipe, LikelihoodSettings
from blockdraft.diffusion.text import PackedTexts, Tokens, seed_of, sequence_length
from blockdraft.errors import NumbersError, UsageError, counted
from blockdraft.folders import held
from blockdraft.settings import as_toml
from blockdraft.targets import weights_fingerprint
from blockdraft.training import checkpoints
from blockdraft.training.checkpoints import gather_state, restore_state
from blockdraft.training.devices import end_processes, make_accelerator
from blockdraft.training.graceful_shutdown import agreed, clear_finish_request, finish_requested
from blockdraft.training.preflight import check_same
from blockdraft.training.progress import Progress, RunLog, run_folder

BETAS = (0.9, 0.999)
EVAL_DRAWS = 4
MAX_GRADIENT_NORM = 1.0
KEPT = 2  # newest checkpoints
GPU_BATCH, CPU_BATCH = 16, 4
TIMED = 3  # steps after which the remaining time is estimated; the first, slow step is not counted
# Recipe fields that may change when a run resumes, since they do not affect the weights.
MUTABLE = {"eval_every", "save_every", "save_minutes", "dtype", "trackers"}


def train(
    model: DiffusionModel,
    texts: Sequence[Tokens],
    steps: int,
    out: Path,
    recipe: DiffusionRecipe = DiffusionRecipe(),  # noqa: B008 (frozen)
    progress: Progress = Progress(),  # noqa: B008 (frozen)
    accelerator: Accelerator | None = None,
) -> list[dict[str, Any]]:
    """Train a model, or resume a run that was interrupted or needs more steps.

    A resumed run reaches the same weights as an uninterrupted one: the order of the sequences and the noise of a step
    depend only on the seed and the step number. Creating the file `finish` in the run's folder ends the run after the
    current step, with a complete model and a checkpoint.

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
    """
    accelerator = accelerator or make_accelerator(recipe, run_folder(out), model.network.device.type)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise UsageError("This training takes no weights in shards (FSDP); use --multi_gpu in place of --use_fsdp.")
    main = accelerator.is_main_process
    with held(out, "training") if main else contextlib.nullcontext():
        return _Training(
            model=model,
            texts=texts,
            steps=steps,
            out=out,
            recipe=recipe,
            progress=progress if main else Progress(),
            accelerator=accelerator,
        ).run()


class MovingAverage:
    """Exponential moving average (EMA) of a network's parameters, which training evaluates and saves.

    Args:
        decay: Decay per step; 0 tracks the parameters themselves.
        weights: Average to resume from, by parameter name; None begins with the parameters.
    """

    def __init__(self, network: nn.Module, decay: float, weights: Mapping[str, Tensor] | None = None) -> None:
        self._network, self._decay = network, decay
        self.weights = _copied(network)
        for name, weight in self.weights.items():
            if weights is not None:
                weight.copy_(weights[name])

    def update(self, step: int) -> None:
        """Add the parameters after a step, counted from 0. The decay is smaller in early steps."""
        decay = min(self._decay, (1 + step) / (10 + step)) if self._decay else 0.0
        for name, weight in self._network.named_parameters():
            self.weights[name].lerp_(weight.detach(), 1 - decay)

    def load_into_network(self) -> None:
        """Copy the average into the network's parameters."""
        _load(self._network, self.weights)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the average as the network's parameters within the context, in evaluation mode."""
        parameters = _copied(self._network)
        self.load_into_network()
        self._network.eval()
        yield
        self._network.train()
        _load(self._network, parameters)


def _copied(network: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}


@torch.no_grad()
def _load(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, weight in network.named_parameters():
        weight.copy_(weights[name])


class _Losses(nn.Module):
    """Module whose forward computes `losses`, so that Accelerate can distribute it over processes."""

    def __init__(self, model: DiffusionModel) -> None:
        super().__init__()
        self.network, self._model = model.network, model

    def forward(self, ids: Tensor, masked: Tensor, weights: Tensor) -> Tensor:
        return losses(self._model, ids, Noise(masked, weights))


class _Training:
    """State of a training run; see `train` for the arguments."""

    def __init__(
        self,
        *,
        model: DiffusionModel,
        texts: Sequence[Tokens],
        steps: int,
        out: Path,
        recipe: DiffusionRecipe,
        progress: Progress,
        accelerator: Accelerator,
    ) -> None:
        self.steps, self.out, self.progress, self.accelerator = steps, out, progress, accelerator
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
        self.fresh = not self.folder.exists()
        if out.exists() and self.fresh and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and was not written by this command; choose another --out, or delete it.")
        state = checkpoints.newest(self.folder / "checkpoints")
        self.begin = self.saved = 0 if state is None else int(state["step"])
        self.saved_at = time.monotonic()
        self.identity = {
            "model": weights_fingerprint(self.network.named_parameters()),
            "data": hashlib.sha256(self.data.all.ids.numpy().tobytes()).hexdigest()[:16],
            **{name: value for name, value in asdict(recipe).items() if name not in MUTABLE},
        }
        if state is not None:
            check_same(self.folder, state["identity"], self.identity)
        if self.begin > steps:
            raise UsageError(
                f"steps must be at least {self.begin}, the steps of the run in {self.folder}, got {steps}."
            )
        optimizer = torch.optim.AdamW(self.network.parameters(), recipe.learning_rate, BETAS, weight_decay=0.0)
        self.module, wrapped = accelerator.prepare(_Losses(self.model), optimizer, device_placement=[False, False])
        self.optimizer = cast(torch.optim.Optimizer, getattr(wrapped, "optimizer", wrapped))
        self.average = MovingAverage(self.network, recipe.ema, None if state is None else state["ema"])
        if state is not None:
            restore_state(self.module, self.optimizer, state)
        if accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.log = RunLog(self.folder, self.begin) if accelerator.is_main_process else None

    def run(self) -> list[dict[str, Any]]:
        recipe, accelerator = self.recipe, self.accelerator
        clear_finish_request(self.folder, accelerator)
        if self.log is not None:
            (self.folder / "recipe.toml").write_text(as_toml(recipe), encoding="utf-8")
            if recipe.trackers:
                accelerator.init_trackers("blockdraft")
        self._report_start()
        measured, began, step, finish = "", time.monotonic(), self.begin, False
        while step < self.steps and not finish:
            step_began, step = time.monotonic(), step + 1
            metrics: dict[str, Any] = {"step": step, **self._step(step - 1)}
            metrics["tokens_per_second"] = self.batch * self.data.length / (time.monotonic() - step_began)
            if step == self.begin + 1:
                began = time.monotonic()
            finish = finish_requested(self.folder, accelerator)
            end = step == self.steps or finish
            if self.data.num_held_out and (end or (recipe.eval_every and step % recipe.eval_every == 0)):
                metrics["held_out_bits"] = self._measure()
                measured = f", held out {metrics['held_out_bits']:.3f} bits a token"
            if self.log is not None:
                self.log.add(metrics)
                accelerator.log({name: value for name, value in metrics.items() if name != "step"}, step=step)
            is_due = recipe.save_minutes > 0 and time.monotonic() - self.saved_at >= 60 * recipe.save_minutes
            [is_due] = agreed(accelerator, is_due)
            if end or is_due or (recipe.save_every and step % recipe.save_every == 0):
                self._save(step)
            if step == self.begin + TIMED and not end:
                self._report_speed((time.monotonic() - began) / (TIMED - 1), self.steps - step)
            line = f"step {step} of {self.steps}, loss {metrics['loss']:.3f}{measured}"
            self.progress.report(line, step - self.begin, self.steps - self.begin)
        if finish:
            self.progress.note(f"Finished early at step {step}, as requested; the same command resumes the run.")
        clear_finish_request(self.folder, accelerator)
        self.average.load_into_network()
        self.network.eval().requires_grad_(False)
        del self.module, self.optimizer
        end_processes(accelerator)
        return self.log.lines if self.log is not None else []

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
        if self.begin == self.steps:
            note(f"The run has done its {self.steps} steps; increase --steps to continue.")
        elif self.begin:
            note(f"Resuming from step {self.begin}; delete {self.folder} to start over.")

    def _report_speed(self, seconds: float, left: int) -> None:
        minutes = seconds * left / 60
        time_left = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{math.ceil(minutes)} min"
        self.progress.note(
            f"{seconds:.2f} s a step, so about {time_left} for the {left} steps left; touch {self.folder / 'finish'} "
            "to end earlier, with a complete model. A smaller --batch or --length makes steps shorter."
        )

    def _step(self, step: int) -> dict[str, float]:
        recipe, accelerator = self.recipe, self.accelerator
        ids, eligible = self.data.batch(step, self.batch)
        generator = torch.Generator().manual_seed(seed_of(recipe.seed, 1, step))
        clip = self.recipe.low, self.recipe.high
        noise = training_noise(eligible, self.model.config.block_size, clip, generator)
        # Each process samples the noise of the whole batch and uses its share, so that only the seed decides the noise.
        share = self.batch // accelerator.num_processes
        own = slice(accelerator.process_index * share, (accelerator.process_index + 1) * share)
        own_losses = self._losses(self.model, ids[own], Noise(*(part[own] for part in noise)))
        # Distributed wrappers average the gradients over processes, but the loss needs their sum.
        total = own_losses.sum() / max(int(eligible.sum()), 1)
        accelerator.backward(total * accelerator.num_processes)
        norm = float(accelerator.clip_grad_norm_(self.module.parameters(), MAX_GRADIENT_NORM))
        loss = float(cast(Tensor, accelerator.reduce(total.detach(), "sum")))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._not_finite(step, loss, norm)
        rate = recipe.learning_rate * min(1.0, (step + 1) / (recipe.warmup + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(step)
        return {"loss": loss, "rate": rate, "gradient_norm": norm}

    def _not_finite(self, step: int, loss: float, norm: float) -> NumbersError:
        """Return the error of a failed step. Delete the run's folder if this was the first step of a new run."""
        problem = f"Loss {loss} and gradient norm {norm} at step {step + 1} are not both finite"
        is_bfloat16 = self.accelerator.mixed_precision == "bf16"
        if step == 0:
            if self.fresh and self.accelerator.is_main_process:
                shutil.rmtree(self.folder)
            remedy = "use dtype float32, or another model" if is_bfloat16 else "begin with another model"
            return NumbersError(f"{problem} before any training, so the model itself is at fault; {remedy}.")
        checkpoint = f" The checkpoint of step {self.saved} is intact." if self.saved else ""
        remedy = "lower the learning rate" + (", or use dtype float32" if is_bfloat16 else "")
        return NumbersError(f"{problem}; {remedy}.{checkpoint}")

    def _losses(self, model: DiffusionModel, ids: Tensor, noise: Noise) -> Tensor:
        """Compute `losses` with the module that may be distributed over processes."""
        device = self.network.device
        values: Tensor = self.module(ids.to(device), *(part.to(device) for part in noise))
        return values

    def _measure(self) -> float:
        """Return the bits per token of the held-out sequences with the averaged weights."""
        settings = LikelihoodSettings(length=self.data.length, draws=EVAL_DRAWS, batch=self.batch)
        with self.average.applied():
            return likelihood(self.model, self.data.held_out(), settings, compute=self._losses).bits_per_token

    def _save(self, step: int) -> None:
        """Write the model, then the checkpoint, so that every checkpoint has its model."""
        ema = {name: weight.to("cpu", copy=True) for name, weight in self.average.weights.items()}
        state = gather_state(self.module, self.optimizer)
        if self.log is not None:
            buffers = {name: buffer.detach().cpu() for name, buffer in self.network.named_buffers()}
            for name, end in (("sampling_eps_min", self.recipe.low), ("sampling_eps_max", self.recipe.high)):
                if name in buffers:  # as in the paper's checkpoints
                    buffers[name] = torch.tensor(end)
            write_model(self.model, buffers | ema, self.out)
            state |= {"step": step, "identity": self.identity, "ema": ema}
            checkpoints.save(self.folder / "checkpoints", step, state, KEPT)
        self.saved, self.saved_at = step, time.monotonic()
        self.accelerator.wait_for_everyone()
