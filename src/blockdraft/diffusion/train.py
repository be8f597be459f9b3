"""Training of a block-diffusion model: steps, measurements, checkpoints."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockdraft.diffusion.folder import write_model
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.model import DiffusionModel, losses
from blockdraft.diffusion.noise import training_noise
from blockdraft.diffusion.settings import DiffusionRecipe, LikelihoodSettings
from blockdraft.diffusion.text import Tokens, row_length
from blockdraft.errors import NumbersError, UsageError
from blockdraft.folders import held
from blockdraft.settings import as_toml
from blockdraft.targets import weights_fingerprint
from blockdraft.training import checkpoints
from blockdraft.training.records import Records, run_folder
from blockdraft.training.start import check_same
from blockdraft.training.trainer import Telling

BETAS = (0.9, 0.999)
EVAL_DRAWS = 4
# Fields that may change when a run goes on: they say how often, not what is learned.
FREE = {"eval_every", "save_every", "keep", "save_dtype"}


def train(
    model: DiffusionModel,
    texts: Sequence[Tokens],
    steps: int,
    out: Path,
    recipe: DiffusionRecipe = DiffusionRecipe(),  # noqa: B008 (frozen)
    telling: Telling = Telling(),  # noqa: B008 (frozen)
) -> list[dict[str, Any]]:
    """Train a model, or go on with a run: one that was interrupted, or one that has ended if there are more steps now.

    A run that was interrupted, at whatever moment, comes to the same weights as one that was not: order and noise of a
    step depend on the seed and its number alone.

    Args:
        model: In float32. Its network is changed.
        texts: They are joined, in their order, and cut into rows.
        out: Folder of the trained model; log and checkpoints lie beside it, in `out`.run.

    Returns:
        The figures of all steps, as in log.jsonl.

    Raises:
        UsageError: Too little text, blocks or rows longer than the context, another run or something else in the
            folder, another process training there, or a full disk.
        NumbersError: The loss is not finite.
    """
    with held(out, "training"):
        return _Training(model, texts, steps, out, recipe, telling).run()


class _Training:
    def __init__(
        self,
        model: DiffusionModel,
        texts: Sequence[Tokens],
        steps: int,
        out: Path,
        recipe: DiffusionRecipe,
        telling: Telling,
    ) -> None:
        self.recipe, self.steps, self.out, self.telling = recipe, steps, out, telling
        size, length = recipe.block_size or model.config.block_size, row_length(model, recipe.length)
        if size > length:
            raise UsageError(f"block_size is {size} and rows have {length} tokens; make blocks smaller or rows longer.")
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
        identity = {
            "model": weights_fingerprint(self.network.named_parameters()),
            "data": hashlib.sha256(self.rows.ids.numpy().tobytes()).hexdigest()[:16],
            **{name: value for name, value in asdict(recipe).items() if name not in FREE},
        }
        if state is not None:
            check_same(self.folder, state["identity"], identity)
        if self.begin > steps:
            raise UsageError(f"The run in {self.folder} has done {self.begin} steps, and {steps} are asked for.")
        self.identity = identity
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), recipe.learning_rate, BETAS, weight_decay=recipe.weight_decay
        )
        self.ema = {name: weight.detach().clone() for name, weight in self.network.named_parameters()}
        if state is not None:
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            for name, weight in state["ema"].items():
                self.ema[name].copy_(weight)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.records = Records(self.folder, self.begin)

    def run(self) -> list[dict[str, Any]]:
        recipe, note = self.recipe, self.telling.note
        (self.folder / "recipe.toml").write_text(as_toml(recipe), encoding="utf-8")
        length, weights = self.rows.ids.size(1), sum(weight.numel() for weight in self.network.parameters())
        note(f"{self.trained} rows of {length} tokens to train on, {self.held_out} held out; {weights:,} parameters")
        if self.begin == self.steps:
            note(f"The run has done its {self.steps} steps; more --steps go on.")
        elif self.begin:
            note(f"Going on from step {self.begin}; delete {self.folder} to begin afresh.")
        measured = ""
        for step in range(self.begin, self.steps):
            began, end = time.monotonic(), step + 1 == self.steps
            figures: dict[str, Any] = {"step": step + 1, **self._step(step)}
            figures["tokens_per_second"] = recipe.batch * length / (time.monotonic() - began)
            if self.held_out and (end or (recipe.eval_every and (step + 1) % recipe.eval_every == 0)):
                figures["held_out_bits"] = self._measure()
                measured = f", held out {figures['held_out_bits']:.3f} bits a token"
            self.records.add(figures)
            if end or (recipe.save_every and (step + 1) % recipe.save_every == 0):
                self._save(step + 1)
            told = f"step {step + 1} of {self.steps}, loss {figures['loss']:.3f}{measured}"
            self.telling.progress(told, step + 1 - self.begin, self.steps - self.begin)
        self.network.load_state_dict(self.ema)
        self.network.eval().requires_grad_(False)
        return self.records.lines

    def _step(self, step: int) -> dict[str, float]:
        recipe, device = self.recipe, self.network.device
        ids, eligible = self._batch(step)
        generator = torch.Generator().manual_seed(_seed(recipe.seed, 1, step))
        clip = (recipe.low, recipe.high)
        block_size = self.model.config.block_size
        noise = training_noise(eligible, block_size, recipe.schedule, clip, generator, recipe.complementary)
        times = 2 if recipe.complementary else 1
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = losses(self.model, ids.repeat(times, 1).to(device), noise)
        loss = found.sum() / max(int(eligible.sum()) * times, 1)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), recipe.clip or math.inf)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise NumbersError(
                f"Loss {loss.item()} and gradient norm {norm.item()} at step {step + 1} are not both finite; lower the "
                "learning rate. The newest checkpoint stays as it is."
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
        return {"loss": loss.item(), "rate": rate, "gradient_norm": norm.item()}

    def _batch(self, step: int) -> Tokens:
        """The rows of a step: all of them once in each epoch, in an order of its own."""
        places = []
        for number in range(step * self.recipe.batch, (step + 1) * self.recipe.batch):
            epoch, place = divmod(number, self.trained)
            places.append(_order(self.recipe.seed, epoch, self.trained)[place])
        return Tokens(self.rows.ids[places], self.rows.eligible[places])

    def _measure(self) -> float:
        """Bits per token of the held-out rows, by the weights that would be written now."""
        texts = [Tokens(*row) for row in zip(*(each[self.trained :] for each in self.rows), strict=True)]
        settings = LikelihoodSettings(length=self.rows.ids.size(1), draws=EVAL_DRAWS, batch=self.recipe.batch)
        self.network.eval()
        with self._averaged():
            found = likelihood(self.model, texts, settings).bits_per_token
        self.network.train()
        return found

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Exchange the weights with their running mean for a while."""
        own = {name: weight.detach().clone() for name, weight in self.network.named_parameters()}
        self.network.load_state_dict(self.ema)
        yield
        self.network.load_state_dict(own)

    def _save(self, step: int) -> None:
        """Write the model and then a checkpoint, so that a run whose last checkpoint is there has nothing to do."""
        dtype = getattr(torch, self.recipe.save_dtype)
        write_model(self.model, {name: weight.to("cpu", dtype) for name, weight in self.ema.items()}, self.out)
        state = {"step": step, "identity": self.identity, "network": self.network.state_dict()}
        state |= {"ema": self.ema, "optimizer": self.optimizer.state_dict()}
        checkpoints.save(self.folder / "checkpoints", step, state, self.recipe.keep)


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
