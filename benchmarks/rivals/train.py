"""Trains one drafter in a process of its own, so that its memory is known: `python -m benchmarks.rivals.train JSON`.

A small language model is trained here, on the steps of drafters: the same text, the same tokens taught.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from benchmarks.harness import process
from benchmarks.harness.command import in_words
from benchmarks.rivals.kinds import (
    KINDS,
    Kind,
    SmallLMRecipe,
    new_network,
    parameters,
    recipe_of,
    small_lm_config,
    weights_read,
)
from benchmarks.rivals.records import Trained
from blockdraft.cli.display import progress
from blockdraft.data.documents import TokenData, read_data
from blockdraft.data.folder import write_file
from blockdraft.targets import Target, load_target
from blockdraft.training import checkpoints
from blockdraft.training.batches import Batch, Batches, Documents, split
from blockdraft.training.devices import make_accelerator
from blockdraft.training.optimizers import Muon, set_rate
from blockdraft.training.progress import Progress, run_folder
from blockdraft.training.recipe import Recipe
from blockdraft.training.schedule import rate
from blockdraft.training.trainer import train as train_variant
from blockdraft.training.variant import find_variant

CLOCK_SECONDS = 5.0  # of training whose time a killed process loses at most
FINISHED = "trained.json"


@dataclass(frozen=True)
class Task:
    """A drafter to train.

    Attributes:
        values: Of its recipe, the size and the seed among them.
        tokens: Positions to train on, in whole steps.
        out: Folder of the drafter; what belongs to the run lies beside it.
    """

    kind: str
    values: dict[str, Any]
    target: str | None
    data: str
    tokens: int
    out: str
    threads: int


def batches(data: TokenData, recipe: Recipe, slots: int = 1) -> tuple[Batches, int]:
    """Steps that our trainer would take of these data with a recipe whose length, batch and held_out are set, and the
    tokens that it trains on in one epoch."""
    assert recipe.length is not None and recipe.held_out is not None
    documents = Documents(data, recipe.length)
    trained, _ = split(documents, recipe.held_out, recipe.seed)
    recipe = replace(recipe, anchors=recipe.anchors or 1)  # which change no text
    return Batches(documents, trained, recipe, slots), sum(documents.lengths[i] for i in trained)


def run(task: Task, target: Target, tell: process.Progress) -> Trained:
    """Train, or go on with what an earlier process left."""
    kind, out, data = KINDS[task.kind], Path(task.out), read_data(task.data)
    recipe = recipe_of(kind, task.values)
    steps, of_epoch = batches(data, recipe)
    # Whole steps of about as many tokens; the text of an epoch is spread evenly over its steps.
    recipe = replace(recipe, steps=max(1, round(task.tokens * steps.steps_of(0) / of_epoch)))
    clock = Clock(run_folder(out) / "clock.json")

    def told(stage: str, done: int, total: int) -> None:
        clock.tick(last=done == total)
        tell(f"{kind.title}: {stage}", done, total)

    if isinstance(recipe, SmallLMRecipe):
        train_small_lm(target, data, out, recipe, told)
    else:
        accelerator = make_accelerator(recipe, run_folder(out))
        train_variant(kind.name, target, data, out, recipe, accelerator, progress=Progress(told))
    passed, observed = _weights_read(kind, recipe, target)
    return Trained(
        kind=kind.name,
        seed=recipe.seed,
        parameters=parameters(kind, recipe, target),
        steps=recipe.steps,
        tokens=round(of_epoch * recipe.steps / batches(data, recipe)[0].steps_of(0)),
        seconds=clock.seconds,
        peak_bytes=process.peak_bytes(os.getpid()),
        passed=passed,
        observed=observed,
    )


def _weights_read(kind: Kind, recipe: Recipe, target: Target) -> tuple[int, int]:
    with torch.device("meta"):
        network = new_network(kind, recipe, target)
    draft_tokens = 0 if isinstance(recipe, SmallLMRecipe) else find_variant(kind.name)(recipe).taught_slots
    return weights_read(kind, network, draft_tokens, target)


class Clock:
    """Seconds of all processes that worked on a task, on disk. Steps that are done twice count twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds = json.loads(path.read_text()) if path.exists() else 0.0
        self._last = self._written = time.monotonic()

    def tick(self, last: bool = False) -> None:
        now = time.monotonic()
        self.seconds += now - self._last
        self._last = now
        if last or now - self._written >= CLOCK_SECONDS:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, json.dumps(self.seconds).encode())
            self._written = now


def train_small_lm(target: Target, data: TokenData, out: Path, recipe: SmallLMRecipe, tell: process.Progress) -> None:
    """Write a model to `out`; an interrupted run goes on from its last checkpoint."""
    assert recipe.steps is not None and target.tokenizer is not None
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(small_lm_config(recipe, target))
    optimizers = _optimizers(model, recipe)
    kept = run_folder(out) / "checkpoints"
    state, begin = checkpoints.newest(kept), 0
    if state is not None:
        begin = state["step"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    model.train()
    steps = batches(data, recipe)[0].run(begin)
    for done in range(begin + 1, recipe.steps + 1):
        set_rate(optimizers, rate(done - 1, recipe.steps, recipe))
        value = loss(model, data, next(steps)[1])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if recipe.save_every and done % recipe.save_every == 0 and done < recipe.steps:
            saved = {"step": done, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            checkpoints.save(kept, done, saved, recipe.keep)
        tell(f"step {done} of {recipe.steps}, loss {value.item():.3f}", done - begin, recipe.steps - begin)
    model.to(getattr(torch, recipe.save_dtype)).save_pretrained(out)
    target.tokenizer.save_pretrained(out)


def loss(model: Qwen3ForCausalLM, data: TokenData, batch: Batch) -> Tensor:
    """Mean cross-entropy of the supervised tokens, each given those before it in its document."""
    rows = batch.tensors
    documents_BS = rows.documents_BS
    mask_B1SS = (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)).tril().unsqueeze(1)
    mask_B1SS = mask_B1SS | torch.eye(documents_BS.size(1), dtype=torch.bool)
    logits_BSV = model(rows.tokens_BS, attention_mask=mask_B1SS, position_ids=rows.positions_BS, use_cache=False).logits
    taught_BS = torch.zeros_like(documents_BS, dtype=torch.bool)
    for row, supervised in enumerate(_supervised(data, batch)):
        taught_BS[row, : len(supervised)] = supervised
    taught_BS = taught_BS & (rows.positions_BS > 0)  # nothing stands before a document's first token
    return F.cross_entropy(logits_BSV[:, :-1][taught_BS[:, 1:]].float(), rows.tokens_BS[:, 1:][taught_BS[:, 1:]])


def _supervised(data: TokenData, batch: Batch) -> Iterator[Tensor]:
    length = batch.tensors.tokens_BS.size(1)
    for row in batch.contents:
        parts = [data[index].supervised[:length] for index in row]
        yield torch.cat([torch.zeros(0, dtype=torch.bool), *parts])


def _optimizers(model: nn.Module, recipe: SmallLMRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest; AdamW for all where the recipe says so."""
    named, found = list(model.named_parameters()), list[torch.optim.Optimizer]()
    muon = [p for name, p in named if recipe.optimizer == "muon" and p.ndim == 2 and "embed" not in name]
    rest = [p for _, p in named if all(p is not other for other in muon)]
    if muon:
        found.append(Muon(muon, recipe.muon_learning_rate, weight_decay=recipe.muon_weight_decay))
    found.append(torch.optim.AdamW(rest, recipe.learning_rate, weight_decay=recipe.weight_decay))
    for group in (group for optimizer in found for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    return found


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    with in_words():
        target = load_target(task.target)
        torch.set_num_threads(task.threads)
        with progress("steps") as tell:
            found = run(task, target, tell)
        write_file(run_folder(Path(task.out)) / FINISHED, json.dumps(asdict(found)).encode())


if __name__ == "__main__":
    main()
