"""Trains a small language model on the steps that drafters are trained on: the same rows, the same tokens taught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from benchmarks.rivals.kinds import SmallLMRecipe, small_lm_config
from blockdraft.data.documents import TokenData
from blockdraft.targets import Target
from blockdraft.training import checkpoints
from blockdraft.training.batches import Batch, Batches, Documents, split
from blockdraft.training.optimizers import Muon, set_rate
from blockdraft.training.recipe import Recipe
from blockdraft.training.schedule import rate

Progress = Callable[[str, int, int], None]


def batches(data: TokenData, recipe: Recipe, slots: int = 1) -> tuple[Batches, int]:
    """The steps that our trainer would take of these data with a recipe whose length, batch and held_out are set, and
    the tokens that it trains on in one epoch."""
    assert recipe.length is not None and recipe.held_out is not None
    documents = Documents(data, recipe.length)
    trained, _ = split(documents, recipe.held_out, recipe.seed)
    recipe = replace(recipe, anchors=recipe.anchors or 1)  # which change no row
    return Batches(documents, trained, recipe, slots), sum(documents.lengths[i] for i in trained)


def train(target: Target, data: TokenData, out: Path, recipe: SmallLMRecipe, progress: Progress) -> None:
    """Write a model to `out`; an interrupted run goes on from its last checkpoint."""
    assert recipe.steps is not None and target.tokenizer is not None
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(small_lm_config(recipe, target))
    optimizers = _optimizers(model, recipe)
    kept = out.with_name(f"{out.name}.run") / "checkpoints"
    state = checkpoints.newest(kept)
    begin = 0
    if state is not None:
        begin = state["step"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    model.train()
    steps = batches(data, recipe)[0].run(begin)
    for step in range(begin, recipe.steps):
        set_rate(optimizers, rate(step, recipe.steps, recipe))
        value = loss(model, data, next(steps)[1])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done, saving = step + 1, recipe.save_every
        if saving and done % saving == 0 and done < recipe.steps:
            saved = {"step": done, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            checkpoints.save(kept, done, saved, recipe.keep)
        progress(f"step {done} of {recipe.steps}, loss {value.item():.3f}", done - begin, recipe.steps - begin)
    model.to(getattr(torch, recipe.save_dtype)).save_pretrained(out)
    target.tokenizer.save_pretrained(out)


def loss(model: Qwen3ForCausalLM, data: TokenData, batch: Batch) -> Tensor:
    """Mean cross-entropy of the supervised tokens, each given those before it in its document."""
    rows = batch.tensors
    documents = rows.documents_BS
    mask = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().unsqueeze(1)
    mask = mask | torch.eye(documents.size(1), dtype=torch.bool)
    logits = model(rows.tokens_BS, attention_mask=mask, position_ids=rows.positions_BS, use_cache=False).logits
    taught = torch.zeros_like(documents, dtype=torch.bool)
    for row, supervised in enumerate(_supervised(data, batch)):
        taught[row, : len(supervised)] = supervised
    taught = taught & (rows.positions_BS > 0)  # nothing stands before a document's first token
    return F.cross_entropy(logits[:, :-1][taught[:, 1:]].float(), rows.tokens_BS[:, 1:][taught[:, 1:]])


def _supervised(data: TokenData, batch: Batch) -> Iterator[Tensor]:
    length = batch.tensors.tokens_BS.size(1)
    for row in batch.contents:
        parts = [data[index].supervised[:length] for index in row]
        yield torch.cat([torch.zeros(0, dtype=torch.bool), *parts])


def _optimizers(model: nn.Module, recipe: SmallLMRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest; AdamW for all where the recipe says so."""
    named = list(model.named_parameters())
    muon = [p for name, p in named if recipe.optimizer == "muon" and p.ndim == 2 and "embed" not in name]
    rest = [p for _, p in named if all(p is not other for other in muon)]
    found: list[torch.optim.Optimizer] = []
    if muon:
        found.append(Muon(muon, recipe.muon_learning_rate, weight_decay=recipe.muon_weight_decay))
    found.append(torch.optim.AdamW(rest, recipe.learning_rate, weight_decay=recipe.weight_decay))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found
