"""What is checked before the first step."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.data.documents import TokenData
from blockdraft.data.features import tapped_features
from blockdraft.errors import UsageError
from blockdraft.formats import read_config, trained_for
from blockdraft.proposal import chain
from blockdraft.targets import Target, target_fingerprint, told_of_other_target
from blockdraft.training.recipe import Recipe

# Recipe fields that may change when a run goes on: they say how and how often, not what is learned.
FREE = {"eval_every", "eval_prompts", "eval_tokens", "save_every", "keep", "trackers", "save_dtype", "features"}
FREE |= {"accumulation", "chunk", "compile", "dtype"}


def check_data(data: TokenData, target: Target, recipe: Recipe, processes: int) -> None:
    """Raises ValueError where data, target, recipe and the number of processes do not fit together."""
    data.check_tokenizer(target.tokenizer)
    if recipe.length > target.max_context:
        raise UsageError(
            f"length is {recipe.length} and the target's context is {target.max_context} tokens; choose at most that."
        )
    if recipe.batch % (processes * recipe.accumulation):
        raise UsageError(
            f"batch is {recipe.batch}; it must be a multiple of {processes} processes times accumulation "
            f"{recipe.accumulation}."
        )


def told_of_init(recipe: Recipe, target: Target) -> str | None:
    """What to say where training begins with a drafter of another target."""
    init = getattr(recipe, "init", None)  # only some variants can begin with a drafter
    return None if init is None else told_of_other_target(init, trained_for(read_config(init)), target)


def check_folder(out: Path, folder: Path, network: nn.Module, recipe: Recipe) -> None:
    """Raises ValueError where the drafter's folder belongs to something else, or the disk is too small."""
    if out.exists() and not folder.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is no run of this command; choose another --out, or delete it.")
    weights = sum(parameter.numel() for parameter in network.parameters())
    # Float32 weights with two moments, in one more file than are kept; and the drafter, written beside its old self.
    needed = 12 * weights * (recipe.keep + 1) + 12 * weights
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({error.strerror}); choose another --out.") from error
    have = shutil.disk_usage(folder)
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if needed > have.free + used:
        raise UsageError(
            f"The run needs up to {needed / 2**30:.1f} GiB at {folder} and {(have.free + used) / 2**30:.1f} GiB are "
            "free; free some, keep fewer checkpoints (--keep), or choose another --out."
        )


def identity(
    variant: str, target: Target, data: TokenData, recipe: Recipe, free: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """What must be the same for a run to go on; `free` names fields of the variant's own that need not."""
    fixed = {name: value for name, value in asdict(recipe).items() if name not in FREE | free}
    fixed["objective"] = dict(recipe.objective)
    return {"variant": variant, "target": target_fingerprint(target), "data": data.fingerprint, **fixed}


def check_same(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise UsageError(
                f"{folder} holds a run with {name} = {theirs.get(name)!r}, and {ours[name]!r} is asked for now; give "
                "the former to go on with it, choose another --out, or delete the folder."
            )


@torch.no_grad()
def check_teacher(target: Target, tokens: Tensor) -> None:
    """Check that the target's head on its last hidden state gives its logits, which the objectives that learn from them
    rely on. Raises ValueError where it does something else to them."""
    tokens = tokens[:32].to(target.device)
    [hidden] = tapped_features(target, (target.num_layers,), [tokens])
    proposal = chain(tokens[None])
    logits = target.forward(proposal.tokens, proposal.parents, target.new_cache(1, len(tokens))).logits[0]
    ours, theirs = (x.float().softmax(dim=-1) for x in (target.head(hidden), logits))
    gap = float((ours - theirs).abs().max())
    if gap > 0.05:
        raise UsageError(
            f"The target's laws differ by {gap:.2f} from what its head makes of its last hidden state, so it scales or "
            "caps its logits; choose objectives that learn from tokens, such as decay or dpace."
        )
