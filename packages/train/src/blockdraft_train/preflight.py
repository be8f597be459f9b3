"""Checks before the first step of a run, and the notes that it prints first."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.decode.proposal import chain
from blockdraft.errors import UsageError, counted
from blockdraft.formats import Trained, check_writable, read_config
from blockdraft.formats.gguf import is_gguf, open_gguf
from blockdraft.formats.gguf.drafter import gguf_trained
from blockdraft.targets import Target, other_target_warning, target_fingerprint
from blockdraft_tools.export import ExportFormat
from blockdraft_train.batches import Documents
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import TokenData, grown_since, read_state
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.defaults import Resolved, resolve
from blockdraft_train.hidden_state_sources import FOLDER
from blockdraft_train.job import TrainingJob
from blockdraft_train.metrics import encode_prompts
from blockdraft_train.recipe import Recipe, begun_with, with_place

FEW_STEPS = 100  # fewer than these get a note
# Recipe fields that may change when a run resumes, because they do not change what is learned. `Schedule` checks steps
# and epochs.
FREE_FIELDS = {
    "accumulation",
    "chunk",
    "compile",
    "dtype",
    "epochs",
    "eval_every",
    "eval_prompts",
    "eval_tokens",
    "eval_temperature",
    "hidden_states",
    "keep",
    "save_dtype",
    "save_every",
    "save_minutes",
    "steps",
    "trackers",
}


def data_notes(documents: Documents, trained: int, held_out: int) -> list[str]:
    """Return sentences on the training data."""
    notes = [
        f"{counted(trained, 'document')} to train on, {held_out} held out; {documents.supervised:,} of "
        f"{documents.tokens:,} tokens supervised"
    ]
    if documents.cut:
        notes.append(f"{counted(documents.cut, 'document')} longer than a sequence, cut there; see --length")
    if documents.useless:
        notes.append(f"{counted(documents.useless, 'document')} without two adjacent supervised tokens, left out")
    return notes


def data_of_run(data: TokenData, began_with: dict[str, Any], out: Path, note: Callable[[str], None]) -> TokenData:
    """Return the data as they were when a run began, if they have grown since.

    `check_same` reports data that changed otherwise.

    Args:
        began_with: Manifest of the data when the run began.
    """
    grown = grown_since(data, began_with["fingerprint"])
    if data.fingerprint == began_with["fingerprint"] or grown is None:
        return data
    note(
        f"{data.folder} has grown by {grown[0]:,} documents ({grown[1]:,} tokens) since the run began. The run goes on "
        f"without them. To learn from all, start another run from its drafter: --init {out} --out FOLDER"
    )
    return read_state(data.folder, began_with)


def resolve_and_check(
    job: TrainingJob, data: TokenData, written: ExportFormat, earlier: Mapping[str, Any] | None
) -> tuple[Resolved, Any, list[list[int]] | None]:
    """Fill in what the recipe leaves open, and check that everything fits together.

    Args:
        job: The training run that is about to start or resume.
        data: Documents of the run, which may be fewer than those of the job.
        written: Format of the drafter.
        earlier: Recipe fields of the run that is resumed; see `resolve`.

    Returns:
        The resolved recipe, the network's configuration, and the prompts as token ids (None if there are none).

    Raises:
        UsageError: Data, target, recipe and format do not fit together. The message lists all that does not fit.
    """
    target, complaints, config, tokens = job.target, Complaints(), None, None
    with complaints.noting():
        data.check_tokenizer(target.tokenizer)
    if not job.other_responses:
        with complaints.noting():
            check_author(data, target)
    resolved = resolve(
        job.variant, with_place(job.recipe, target), target, data, job.accelerator.num_processes, complaints, earlier
    )
    if resolved is not None:
        with complaints.noting():
            config = resolved.variant.config(target)
            written.check(config)
    if job.prompts is not None:
        with complaints.noting():
            tokens = encode_prompts(job.prompts, target, job.recipe.eval_tokens)
    complaints.check()
    assert resolved is not None
    return resolved, config, tokens


def check_author(data: TokenData, target: Target) -> None:
    """Raise UsageError if another model wrote the responses."""
    written = data.manifest.get("written_by", {})
    if written.get("writer") == "target" and written["author"] != target_fingerprint(target):
        raise UsageError(
            f"The responses in {data.folder} were written by another model (fingerprint {written['author']}) than this "
            f"target ({target_fingerprint(target)}), and a drafter should learn from its own target's; make data with "
            "this target (blockdraft data --regenerate), or add --other-responses to learn from these."
        )


def init_note(recipe: Recipe, target: Target) -> str | None:
    """Return a note if training starts from a drafter of another target, else None."""
    init = begun_with(recipe)
    if init is None:
        return None
    trained = gguf_trained(open_gguf(init)) if is_gguf(init) else Trained.read(read_config(init))
    return other_target_warning(init, trained.target, target)


def steps_note(begin: int, end: int, planned: int, recipe: Recipe, folder: Path) -> str | None:
    """Return a note on the number of steps, or None if there is nothing to report.

    Args:
        begin: Number of steps that are done.
        end: Number of steps after which the run ends.
        planned: Number of steps that follows from data and recipe.
    """
    if begin == end:
        return f"The run has done its {counted(begin, 'step')}; a larger --steps or --epochs, or --extend N, adds some."
    if begin:
        return f"Resuming from step {begin}; delete {folder} to start over."
    if recipe.steps is None and planned < FEW_STEPS:
        epochs, made = counted(recipe.epochs, "epoch"), counted(planned, "step")
        return f"{epochs} of these documents: {made}, which is little; more documents, epochs or steps add some"
    return None


def loss_note(loss: float, target: Target) -> str | None:
    """Return a note if the loss of the first step is high, else None."""
    uniform = math.log(target.vocab_size)
    if loss <= 1.2 * uniform:
        return None
    return (
        f"The loss starts at {loss:.1f}, above the {uniform:.1f} of a uniform prediction. This is normal: the target's "
        "head predicts confidently from any output of a new drafter. The loss falls within the first tens of steps."
    )


def check_folder(out: Path, folder: Path, network: nn.Module, keep: int) -> None:
    """Raise UsageError if `out` is of no run, the run's folder cannot be written, or the disk is too small."""
    if out.exists() and not folder.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is no run of this command; choose another --out, or delete it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / "measured")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); choose another --out.") from error
    needed, have, used = disk_bytes(network, keep), shutil.disk_usage(folder), _bytes_used(folder)
    if needed > have.free + used:
        raise UsageError(
            f"The run needs up to {needed / 2**30:.1f} GiB at {folder} and {(have.free + used) / 2**30:.1f} GiB are "
            "free; free some, or choose another --out."
        )


def _bytes_used(folder: Path) -> int:
    """Return the bytes of a run's files, hidden states not counted.

    Other processes of the run may write and delete files in the folder meanwhile.
    """
    used = 0
    for place, _, names in os.walk(folder):  # passes over folders that are gone
        for name in [] if Path(place).name == FOLDER else names:
            with suppress(FileNotFoundError):
                used += Path(place, name).stat().st_size
    return used


def disk_bytes(network: nn.Module, keep: int) -> int:
    """Return the bytes of a run's files with `keep` checkpoints, hidden states not counted.

    A checkpoint holds float32 weights and two moments. One more exists while it is written, and so does the drafter.
    """
    return 12 * sum(parameter.numel() for parameter in network.parameters()) * (keep + 2)


def identity(
    variant: str, target: Target, data: TokenData, recipe: Recipe, free: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the values that must stay the same for a run to resume.

    Args:
        free: Fields of the variant's own recipe that may change.
    """
    fixed = {name: value for name, value in asdict(recipe).items() if name not in FREE_FIELDS | free}
    fixed["objective"] = dict(recipe.objective)
    return {"variant": variant, "target": target_fingerprint(target), "data": data.fingerprint, **fixed}


def check_same(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise UsageError unless a run with the identity `theirs` can resume with the identity `ours`."""
    changed = [f"{name} = {theirs.get(name)!r} (now {ours[name]!r})" for name in ours if theirs.get(name) != ours[name]]
    if changed:
        raise UsageError(
            f"{folder} holds a run with {', '.join(changed)}; give the former values to resume it, choose another "
            "--out, or delete the folder."
        )


@torch.no_grad()
def check_teacher(target: Target, tokens: Tensor) -> None:
    """Raise UsageError unless the target's head on its last hidden state gives its logits, as teachers assume.

    Args:
        tokens: `[S]` int64; some text to check it on.
    """
    tokens = tokens[:32].to(target.device)
    [hidden] = target_hidden_states(target, (target.num_layers,), [tokens])
    proposal = chain(tokens[None])
    logits = target.forward(proposal.tokens, proposal.parents, target.new_cache(1, len(tokens))).logits[0]
    ours, theirs = (x.float().softmax(dim=-1) for x in (target.head(hidden), logits))
    gap = float((ours - theirs).abs().max())
    if gap > 0.05:
        raise UsageError(
            f"The target's probabilities differ by {gap:.2f} from those of its head on its last hidden state, so it "
            "scales or caps its logits; choose objectives that learn from tokens, such as decay or dpace."
        )
