"""Sources of a batch's features: the target in the loop, features computed once, or a folder of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
import torch
from torch import Tensor

from blockdraft.data.documents import TokenData
from blockdraft.data.hidden_states import HiddenStates, plan_hidden_states, read_hidden_states, size
from blockdraft.data.settings import HiddenStateSettings
from blockdraft.data.target_layers import target_hidden_states
from blockdraft.errors import UsageError
from blockdraft.machine import free_bytes
from blockdraft.targets import Target
from blockdraft.training.batches import Batch, Documents
from blockdraft.training.progress import Progress

FOLDER = "hidden_states"  # of features that are kept beside a run
SHARE_OF_DEVICE = 0.5  # of the memory that a GPU has free, for features

# Features `[S, F]` of the documents with these indices. A document's features may go beyond its end in the row.
Source: TypeAlias = Callable[[Sequence[int]], list[Tensor]]


def open_source(
    where: str | None,
    target: Target,
    data: TokenData,
    documents: Documents,
    target_layers: tuple[int, ...],
    beside: Path,
    reserved: int | None,
    progress: Progress,
) -> Source:
    """Open the source that a recipe names in its field `hidden_states`.

    Args:
        target_layers: Layers whose outputs are needed; `target.num_layers` is the input of the head.
        beside: Folder of the run, where computed features are kept for a resumed run.
        reserved: Bytes of the disk that the run needs for other files; None keeps no features there.

    Raises:
        UsageError: Stored features belong to another target, other data or other taps, or memory does not suffice.
    """

    def computed(chosen: Sequence[int]) -> list[Tensor]:
        return target_hidden_states(target, target_layers, [documents[i].tokens for i in chosen])

    if where is None:
        return computed
    if where == "memory" and target.device.type != "cpu":
        room = free_bytes(target.device) * SHARE_OF_DEVICE
        progress.note(f"The target's features stay on {target.device} once computed, up to {size(int(room))}.")
        return StoredHiddenStates(computed, room)
    if where != "memory":
        hidden_states = read_hidden_states(Path(where))
        hidden_states.check(target, data, target_layers)
    else:
        hidden_states = _computed(target, data, documents.longest, target_layers, beside / FOLDER, reserved, progress)
    return lambda chosen: [hidden_states.of(i, target_layers) for i in chosen]


class StoredHiddenStates:
    """Source that computes features when they are first asked for, and keeps them where they are. On a GPU computing
    them takes half of a step.

    Args:
        source: Source that computes.
        room: Bytes that may be kept. Features beyond them are computed anew each time.
    """

    def __init__(self, source: Source, room: float) -> None:
        self._source, self._room = source, room
        self._kept: dict[int, Tensor] = {}

    def __call__(self, chosen: Sequence[int]) -> list[Tensor]:
        new = [i for i in chosen if i not in self._kept]
        found = dict(zip(new, self._source(new) if new else (), strict=True))
        for i, hidden_states in found.items():
            if hidden_states.nbytes <= self._room:
                self._room -= hidden_states.nbytes
                self._kept[i] = hidden_states.clone()  # the others of its batch are freed
        return [self._kept[i] if i in self._kept else found[i] for i in chosen]


def _computed(
    target: Target,
    data: TokenData,
    longest: int,
    target_layers: tuple[int, ...],
    folder: Path,
    reserved: int | None,
    progress: Progress,
) -> HiddenStates:
    """Features of all documents, read from `folder` as far as an earlier run has left them there."""
    try:
        plan = plan_hidden_states(folder, target, data, target_layers, HiddenStateSettings(), longest)
    except UsageError:  # features of something else
        shutil.rmtree(folder)
        plan = plan_hidden_states(folder, target, data, target_layers, HiddenStateSettings(), longest)
    # The features may take half of the disk that the run leaves free.
    store = reserved is not None and plan.need <= (plan.free - reserved) / 2
    free = psutil.virtual_memory().available
    if not store and plan.need > free:
        raise UsageError(
            f"The features need {size(plan.need)} of memory and {size(free)} are free, and the disk is too small to "
            'keep them; leave out features = "memory", or store them elsewhere with `blockdraft hidden-states`.'
        )
    if plan.need and store:
        progress.note(f"The target's features are kept in {folder} ({size(plan.need)}) until the run ends.")
    if plan.need:
        progress.report("features, tokens", 0, sum(map(sum, plan.manifest["lengths"])))
    hidden_states, failure = plan.in_memory(store, lambda done, total: progress.report("features, tokens", done, total))
    if failure is not None:
        progress.note(f"Not all features are kept beside the run, so a resumed run computes them again: {failure}")
    return hidden_states


def batch_hidden_states(batch: Batch, source: Source, width: int, target: Target) -> Tensor:
    """Features `[B, S, width]` in the target's dtype, each document's where it lies in its row; 0 after the last."""
    found = iter(source([i for row in batch.contents for i in row]) if any(batch.contents) else ())
    hidden_states = torch.zeros(*batch.tensors.tokens_BS.shape, width, dtype=target.dtype, device=target.device)
    for row, contents in enumerate(batch.contents):
        begin = 0
        for number in range(len(contents)):
            length = int((batch.tensors.documents_BS[row] == number).sum())
            hidden_states[row, begin : begin + length] = next(found)[:length].to(target.device)
            begin += length
    return hidden_states
