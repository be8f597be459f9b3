"""What is checked before the first step, and what is said about it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.data.documents import TokenData, grown_since, read_state
from blockdraft.data.taps import tapped_features
from blockdraft.decode.proposal import chain
from blockdraft.errors import Complaints, UsageError, counted
from blockdraft.formats import check_writable, read_config, trained_for
from blockdraft.targets import Target, other_target_warning, target_fingerprint
from blockdraft.training.batches import Documents
from blockdraft.training.export import Format
from blockdraft.training.measure import encoded
from blockdraft.training.recipe import Recipe
from blockdraft.training.settle import FEW_STEPS, Settled, settle
from blockdraft.types import Prompt

# Recipe fields that may change when a run goes on: they say how and how often, not what is learned.
FREE = {
    "eval_every",
    "eval_prompts",
    "eval_tokens",
    "eval_temperature",
    "save_every",
    "keep",
    "trackers",
    "save_dtype",
    "features",
}
FREE |= {"accumulation", "chunk", "compile", "dtype", "steps", "epochs"}  # of the last two the schedule takes care


def data_notes(documents: Documents, trained: int, held_out: int) -> list[str]:
    """Sentences on what is trained on."""
    found = [
        f"{counted(trained, 'document')} to train on, {held_out} held out; {documents.supervised:,} of "
        f"{documents.tokens:,} tokens supervised"
    ]
    if documents.cut:
        found.append(f"{counted(documents.cut, 'document')} longer than a row, cut there; see --length")
    if documents.useless:
        found.append(f"{counted(documents.useless, 'document')} without two supervised tokens side by side, left out")
    return found


def data_of_run(data: TokenData, began_with: dict[str, Any], out: Path, note: Callable[[str], None]) -> TokenData:
    """The data as they were when a run began, if they have grown since; others are left to `check_same`.

    Args:
        began_with: Their manifest then.
    """
    grown = grown_since(data, began_with["fingerprint"])
    if data.fingerprint == began_with["fingerprint"] or grown is None:
        return data
    note(
        f"{data.folder} has grown by {grown[0]:,} documents ({grown[1]:,} tokens) since the run began, which goes on "
        f"with those it began with. To learn from all, begin another run with its drafter: --init {out} --out FOLDER"
    )
    return read_state(data.folder, began_with)


def checked(
    variant_name: str,
    recipe: Recipe,
    target: Target,
    data: TokenData,
    processes: int,
    written: Format,
    prompts: Sequence[Prompt] | None,
    earlier: Mapping[str, Any] | None,
    other_answers: bool,
) -> tuple[Settled, Any, list[list[int]] | None]:
    """What the recipe leaves open, settled; the network's configuration; the prompts as tokens, None where there are
    none. Arguments as in `train` and `settle`.

    Raises:
        ValueError: Data, target, recipe and format do not fit together. All that does not is told at once.
    """
    complaints, config, tokens = Complaints(), None, None
    with complaints.noting():
        data.check_tokenizer(target.tokenizer)
    if not other_answers:
        with complaints.noting():
            check_answers(data, target)
    settled = settle(variant_name, recipe, target, data, processes, complaints, earlier)
    if settled is not None:
        with complaints.noting():
            config = settled.variant.config(target)
            written.check(config)
    if prompts is not None:
        with complaints.noting():
            tokens = encoded(prompts, target, recipe.eval_tokens)
    complaints.check()
    assert settled is not None
    return settled, config, tokens


def check_answers(data: TokenData, target: Target) -> None:
    """Raises ValueError where another model wrote the answers."""
    written = data.manifest.get("written_by", {})
    if written.get("writer") == "target" and written["author"] != target_fingerprint(target):
        raise UsageError(
            f"The answers in {data.folder} were written by another model (fingerprint {written['author']}) than this "
            f"target ({target_fingerprint(target)}), and a drafter should learn from its own target's; make data with "
            "this target (blockdraft data --regenerate), or add --other-answers to learn from these."
        )


def init_note(recipe: Recipe, target: Target) -> str | None:
    """What to say where training begins with a drafter of another target."""
    init = getattr(recipe, "init", None)  # only some variants can begin with a drafter
    return None if init is None else other_target_warning(init, trained_for(read_config(init)), target)


def steps_note(begin: int, end: int, planned: int, recipe: Recipe, folder: Path) -> str | None:
    """What to say where a run begins with step `begin` of `end`, and its data and recipe make `planned`."""
    if begin == end:
        return f"The run has done its {counted(begin, 'step')}; a larger --steps or --epochs, or --extend N, goes on."
    if begin:
        return f"Going on from step {begin}; delete {folder} to begin afresh."
    if recipe.steps is None and planned < FEW_STEPS:
        epochs, made = counted(recipe.epochs, "epoch"), counted(planned, "step")
        return f"{epochs} of these documents: {made}, which is little; see --epochs, --steps"
    return None


def loss_note(loss: float, target: Target) -> str | None:
    """What to say of the loss of the first step, where it may frighten."""
    even = math.log(target.vocab_size)
    if loss <= 1.2 * even:
        return None
    return (
        f"The loss begins at {loss:.1f}, above the {even:.1f} of even guessing, which is normal: the target's head "
        "makes definite guesses of whatever a new drafter says. It falls within the first tens of steps."
    )


def check_folder(out: Path, folder: Path, network: nn.Module, recipe: Recipe) -> None:
    """Raises ValueError where the drafter's folder belongs to something else or cannot be written, or the disk is too
    small."""
    if out.exists() and not folder.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is no run of this command; choose another --out, or delete it.")
    try:
        check_writable(out)
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / "measured")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); choose another --out.") from error
    weights = sum(parameter.numel() for parameter in network.parameters())
    # Float32 weights with two moments, in one more file than are kept; and the drafter, written beside its old self.
    needed = 12 * weights * (recipe.keep + 1) + 12 * weights
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
    """Raises ValueError where a run of these values cannot go on with these."""
    changed = [f"{name} = {theirs.get(name)!r} (now {ours[name]!r})" for name in ours if theirs.get(name) != ours[name]]
    if changed:
        raise UsageError(
            f"{folder} holds a run with {', '.join(changed)}; give the former to go on with it, choose another --out, "
            "or delete the folder."
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
            f"The target's distributions differ by {gap:.2f} from what its head makes of its last hidden state, so it "
            "scales or caps its logits; choose objectives that learn from tokens, such as decay or dpace."
        )
