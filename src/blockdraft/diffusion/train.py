"""Training of a block-diffusion model: steps, measurements, checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from blockdraft.diffusion.folder import write_model
from blockdraft.diffusion.intervals import steadiest
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.model import DiffusionModel, losses
from blockdraft.diffusion.noise import Noise, noise_at, stratified, training_noise
from blockdraft.diffusion.settings import DiffusionRecipe, LikelihoodSettings
from blockdraft.diffusion.text import Tokens, row_length
from blockdraft.errors import NumbersError, UsageError
from blockdraft.folders import held
from blockdraft.settings import as_toml
from blockdraft.targets import weights_fingerprint
from blockdraft.training import checkpoints
from blockdraft.training.finish import forget_finish, told_to_finish
from blockdraft.training.records import Records, run_folder
from blockdraft.training.start import check_same
from blockdraft.training.trainer import WHOLE, Telling

BETAS = (0.9, 0.999)
EVAL_DRAWS = 4
GPU_BATCH, CPU_BATCH = 16, 4
TIMED = 3  # steps after which it is told how long a run takes; the first one is no measure
# Fields that may change when a run goes on: they say how, or how often, not what is learned.
FREE = {"eval_every", "save_every", "keep", "dtype", "save_dtype", "trackers"}


def train(
    model: DiffusionModel,
    texts: Sequence[Tokens],
    steps: int,
    out: Path,
    recipe: DiffusionRecipe = DiffusionRecipe(),  # noqa: B008 (frozen)
    telling: Telling = Telling(),  # noqa: B008 (frozen)
    accelerator: Accelerator | None = None,
) -> list[dict[str, Any]]:
    """Train a model, or go on with a run: one that was interrupted, or one that has ended if there are more steps now.

    A run that was interrupted, at whatever moment, comes to the same weights as one that was not: order and noise of a
    step depend on the seed and its number alone. A file `finish` in the run's folder makes it end behind the step at
    hand, with all that belongs to an end.

    Args:
        model: In float32, on the accelerator's device. Its network is changed.
        texts: They are joined, in their order, and cut into rows.
        out: Folder of the trained model; log and checkpoints lie beside it, in `out`.run.
        accelerator: From `make_accelerator`; None is this process alone, on the device that the model is on.

    Returns:
        The figures of all steps, as in log.jsonl; empty in all processes but the main one.

    Raises:
        UsageError: Too little text, blocks or rows longer than the context, a batch that the processes cannot share,
            or that hold shards of the weights, another run or something else in the folder, another process training
            there, or a full disk.
        NumbersError: The loss is not finite.
    """
    if accelerator is None:
        on_gpu = model.network.device.type == "cuda"
        accelerator = Accelerator(
            cpu=not on_gpu, mixed_precision="bf16" if on_gpu and recipe.dtype != "float32" else "no"
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        raise UsageError("Weights in shards (FSDP) are not for this training; use --multi_gpu in place of --use_fsdp.")
    main = accelerator.is_main_process
    with held(out, "training") if main else contextlib.nullcontext():
        return _Training(model, texts, steps, out, recipe, telling if main else Telling(), accelerator).run()


class _Losses(nn.Module):
    """`losses` as the forward of a module, which is what Accelerate can spread over processes."""

    def __init__(self, model: DiffusionModel) -> None:
        super().__init__()
        self.network, self._model = model.network, model

    def forward(self, ids: Tensor, masked: Tensor, weights: Tensor) -> Tensor:
        return losses(self._model, ids, Noise(masked, weights))


class _Training:
    def __init__(
        self,
        model: DiffusionModel,
        texts: Sequence[Tokens],
        steps: int,
        out: Path,
        recipe: DiffusionRecipe,
        telling: Telling,
        accelerator: Accelerator,
    ) -> None:
        self.steps, self.out, self.telling, self.accelerator = steps, out, telling, accelerator
        size, length = recipe.block_size or model.config.block_size, row_length(model, recipe.length)
        if size > length:
            raise UsageError(f"block_size is {size} and rows have {length} tokens; make blocks smaller or rows longer.")
        self.batch = recipe.batch or (GPU_BATCH if model.network.device.type == "cuda" else CPU_BATCH)
        if self.batch % accelerator.num_processes:
            raise UsageError(
                f"batch is {self.batch}; {accelerator.num_processes} processes share it, so give a multiple of these."
            )
        self.recipe = recipe = replace(recipe, batch=self.batch)
        self.model = replace(model, config=replace(model.config, block_size=size))
        self.rows = _rows(texts, length)
        count = len(self.rows.ids)
        self.held_out = math.ceil(recipe.held_out * count) if recipe.held_out else 0
        self.trained = count - self.held_out
        if self.trained < 1:
            found = sum(len(text.ids) for text in texts)
            raise UsageError(
                f"There are {found} tokens, which make {count} rows of {length}, {self.held_out} of them held out; "
                "give more text, or shorter rows (--length)."
            )
        self.network = self.model.network.train().requires_grad_(True)
        self.folder = run_folder(out)
        if out.exists() and not self.folder.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and is no run of this command; choose another --out, or delete it.")
        state = checkpoints.newest(self.folder / "checkpoints")
        self.begin = 0 if state is None else int(state["step"])
        self.identity = {
            "model": weights_fingerprint(self.network.named_parameters()),
            "data": hashlib.sha256(self.rows.ids.numpy().tobytes()).hexdigest()[:16],
            **{name: value for name, value in asdict(recipe).items() if name not in FREE},
        }
        if state is not None:
            check_same(self.folder, state["identity"], self.identity)
        if self.begin > steps:
            raise UsageError(f"The run in {self.folder} has done {self.begin} steps, and {steps} are asked for.")
        # At blocks of one token all times but the last add variance and nothing else.
        self.clip = (1.0, 1.0) if recipe.search_every and size == 1 else (recipe.low, recipe.high)
        optimizer = torch.optim.AdamW(
            self.network.parameters(), recipe.learning_rate, BETAS, weight_decay=recipe.weight_decay
        )
        self.module, wrapped = accelerator.prepare(_Losses(self.model), optimizer, device_placement=[False, False])
        self.optimizer = cast(torch.optim.Optimizer, getattr(wrapped, "optimizer", wrapped))
        if state is not None:
            self.clip = tuple(state["clip"])
            self._restore(state, state["network"] | {f"network.{name}": one for name, one in state["ema"].items()})
        self.ema = self._weights()
        if state is not None:
            self._restore(state, state["network"])
        if accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.records = Records(self.folder, self.begin) if accelerator.is_main_process else None

    def run(self) -> list[dict[str, Any]]:
        recipe, accelerator = self.recipe, self.accelerator
        forget_finish(self.folder, accelerator)
        if self.records is not None:
            (self.folder / "recipe.toml").write_text(as_toml(recipe), encoding="utf-8")
            if recipe.trackers:
                accelerator.init_trackers("blockdraft")
        self._tell_beginning()
        measured, began, step, told = "", time.monotonic(), self.begin, False
        while step < self.steps and not told:
            moment, step = time.monotonic(), step + 1
            figures: dict[str, Any] = {"step": step, **self._step(step - 1)}
            figures["tokens_per_second"] = self.batch * self.rows.ids.size(1) / (time.monotonic() - moment)
            if step == self.begin + 1:
                began = time.monotonic()
            told = told_to_finish(self.folder, accelerator)
            end = step == self.steps or told
            if self.held_out and (end or (recipe.eval_every and step % recipe.eval_every == 0)):
                figures["held_out_bits"] = self._measure()
                measured = f", held out {figures['held_out_bits']:.3f} bits a token"
            if recipe.search_every and step % recipe.search_every == 0 and self.model.config.block_size > 1:
                self.clip = figures["low"], figures["high"] = self._search(step)
            if self.records is not None:
                self.records.add(figures)
                accelerator.log({name: value for name, value in figures.items() if name != "step"}, step=step)
            if end or (recipe.save_every and step % recipe.save_every == 0):
                self._save(step)
            if step == self.begin + TIMED and not end:
                self._tell_pace((time.monotonic() - began) / (TIMED - 1), self.steps - step)
            line = f"step {step} of {self.steps}, loss {figures['loss']:.3f}{measured}"
            self.telling.progress(line, step - self.begin, self.steps - self.begin)
        if told:
            self.telling.note(f"Told to finish at step {step}; the same command goes on.")
        forget_finish(self.folder, accelerator)
        self._set(self.ema)
        self.network.eval().requires_grad_(False)
        if recipe.trackers:
            accelerator.end_training()
        return self.records.lines if self.records is not None else []

    def _tell_beginning(self) -> None:
        note, length = self.telling.note, self.rows.ids.size(1)
        size = sum(weight.numel() for weight in self.network.parameters())
        processes = self.accelerator.num_processes
        share = f", {processes} processes ({self.accelerator.distributed_type.value})" if processes > 1 else ""
        note(
            f"{self.trained} rows of {length} tokens to train on, {self.held_out} held out; {size:,} parameters; "
            f"{self.batch} row{'s' * (self.batch > 1)} a step{share}"
        )
        if self.begin == self.steps:
            note(f"The run has done its {self.steps} steps; more --steps go on.")
        elif self.begin:
            note(f"Going on from step {self.begin}; delete {self.folder} to begin afresh.")

    def _tell_pace(self, seconds: float, left: int) -> None:
        minutes = seconds * left / 60
        time_left = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{math.ceil(minutes)} min"
        self.telling.note(
            f"{seconds:.2f} s a step, so about {time_left} for the {left} steps left; touch {self.folder / 'finish'} "
            "to end earlier, with a whole model. --batch and --length make steps shorter."
        )

    def _step(self, step: int) -> dict[str, float]:
        recipe, accelerator = self.recipe, self.accelerator
        ids, eligible = self._batch(step)
        generator = torch.Generator().manual_seed(_seed(recipe.seed, 1, step))
        block_size = self.model.config.block_size
        noise = training_noise(eligible, block_size, recipe.schedule, self.clip, generator, recipe.complementary)
        times = 2 if recipe.complementary else 1
        # All processes draw the noise of all rows, and each takes its share.
        part = self.batch // accelerator.num_processes
        own = torch.arange(part) + accelerator.process_index * part
        places = torch.cat([own + self.batch * again for again in range(times)])
        found = self._losses(self.model, ids.repeat(times, 1)[places], Noise(*(each[places] for each in noise)))
        # Wrappers for many processes take the mean of their gradients, and the sum is wanted.
        total = found.sum() / max(int(eligible.sum()) * times, 1)
        accelerator.backward(total * accelerator.num_processes)
        norm = float(accelerator.clip_grad_norm_(self.module.parameters(), recipe.clip or math.inf))
        loss = float(cast(Tensor, accelerator.reduce(total.detach(), "sum")))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumbersError(
                f"Loss {loss} and gradient norm {norm} at step {step + 1} are not both finite; lower the learning "
                "rate. The newest checkpoint stays as it is."
            )
        rate = recipe.learning_rate * min(1.0, (step + 1) / (recipe.warmup + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # Of the first steps there is little that would be worth remembering.
        decay = min(recipe.ema, (1 + step) / (10 + step)) if recipe.ema else 0.0
        for name, weight in self.network.named_parameters():
            self.ema[name].lerp_(weight.detach(), 1 - decay)
        return {"loss": loss, "rate": rate, "gradient_norm": norm}

    def _losses(self, model: DiffusionModel, ids: Tensor, noise: Noise) -> Tensor:
        """`losses`, by the module that may be spread over processes."""
        device = self.network.device
        found: Tensor = self.module(ids.to(device), *(each.to(device) for each in noise))
        return found

    def _batch(self, step: int) -> Tokens:
        """The rows of a step: all of them once in each epoch, in an order of its own."""
        places = []
        for number in range(step * self.batch, (step + 1) * self.batch):
            epoch, place = divmod(number, self.trained)
            places.append(_order(self.recipe.seed, epoch, self.trained)[place])
        return Tokens(self.rows.ids[places], self.rows.eligible[places])

    def _measure(self) -> float:
        """Bits per token of the held-out rows, by the weights that would be written now."""
        texts = [Tokens(*row) for row in zip(*(each[self.trained :] for each in self.rows), strict=True)]
        settings = LikelihoodSettings(length=self.rows.ids.size(1), draws=EVAL_DRAWS, batch=self.batch)
        with self._averaged():
            return likelihood(self.model, texts, settings, compute=self._losses).bits_per_token

    @torch.no_grad()
    def _search(self, step: int) -> tuple[float, float]:
        """The times that the next steps draw from: where the loss of held-out blocks varies least."""
        size, generator = self.model.config.block_size, torch.Generator().manual_seed(_seed(self.recipe.seed, 2, step))
        first = self.trained if self.held_out else 0
        count = self.held_out or self.trained
        found_times, found_losses = [], []
        with self._averaged():
            for number in range(self.recipe.search_batches):
                places = [first + (number * self.batch + place) % count for place in range(self.batch)]
                ids, eligible = self.rows.ids[places], self.rows.eligible[places]
                times = stratified((self.batch, -(-ids.size(1) // size)), generator)
                noise = noise_at(times, eligible, size, self.recipe.schedule, generator)
                blocks = torch.arange(ids.size(1)) // size
                sums = torch.zeros(times.shape).index_add(1, blocks, self._losses(self.model, ids, noise).float().cpu())
                able = torch.zeros(times.shape).index_add(1, blocks, eligible.float())
                found_times.append(times[able > 0])
                found_losses.append((sums / able)[able > 0])
        low, high = steadiest(torch.cat(found_times), torch.cat(found_losses))
        self.telling.note(f"Step {step}: noise levels from {low:g} to {high:g} now, where the loss varies least")
        return low, high

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Exchange the weights with their running mean for a while."""
        own = self._weights()
        self._set(self.ema)
        self.network.eval()
        yield
        self.network.train()
        self._set(own)

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.network.named_parameters()}

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.network.named_parameters():
            weight.copy_(weights[name])

    def _save(self, step: int) -> None:
        """Write the model and then a checkpoint, so that a run whose last checkpoint is there has nothing to do."""
        ema = {name: weight.to("cpu", copy=True) for name, weight in self.ema.items()}
        network, optimizers = get_state_dict(self.module, self.optimizer, options=WHOLE)
        if self.records is not None:
            dtype = getattr(torch, self.recipe.save_dtype)
            buffers = {name: one.detach().cpu() for name, one in self.network.named_buffers()}
            for name, end in zip(("sampling_eps_min", "sampling_eps_max"), self.clip, strict=True):
                if name in buffers:  # as the paper's checkpoints say it
                    buffers[name] = torch.tensor(end)
            write_model(self.model, buffers | {name: weight.to(dtype) for name, weight in ema.items()}, self.out)
            state = {"step": step, "identity": self.identity, "clip": list(self.clip), "ema": ema}
            state |= {"network": network, "optimizers": optimizers}
            checkpoints.save(self.folder / "checkpoints", step, state, self.recipe.keep)
        self.accelerator.wait_for_everyone()

    def _restore(self, state: dict[str, Any], network: dict[str, Any]) -> None:
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=network,
            optim_state_dict=state["optimizers"],
            options=StateDictOptions(full_state_dict=True),
        )


def _rows(texts: Sequence[Tokens], length: int) -> Tokens:
    """All texts, joined and cut into rows `[R, length]`, whose first tokens are given. What is left at the end is left
    out."""
    ids, eligible = (torch.cat([*each, each[0][:0]]) for each in zip(*texts, strict=True))
    count = len(ids) // length
    cut = Tokens(ids[: count * length].view(count, length), eligible[: count * length].view(count, length).clone())
    cut.eligible[:, 0] = False
    return cut


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    found: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(_seed(seed, 0, epoch))).tolist()
    return found


def _seed(*parts: int) -> int:
    """A seed of its own for each of such numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
