"""Sources of a batch's hidden states: the target in the loop, a computed store, or a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.machine import free_bytes
from blockdraft.targets import Target
from blockdraft_train.batches import Batch, Documents
from blockdraft_train.data.documents import TokenData
from blockdraft_train.data.hidden_states import HiddenStates, plan_hidden_states, read_hidden_states, size
from blockdraft_train.data.settings import HiddenStateSettings
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.progress import Progress

STAGE = "hidden states, tokens"  # of the progress while they are computed
FOLDER = "hidden_states"  # of hidden states that are stored beside a run
SHARE_OF_DEVICE = 0.5  # of a GPU's free memory, for hidden states

# Returns hidden states `[S, F]` of the documents with these indices, which may reach beyond a document's cut end.
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
        beside: Folder of the run, where computed hidden states are stored for a resumed run.
        reserved: Bytes of the disk that the run needs for other files; None stores no hidden states there.

    Raises:
        UsageError: Stored hidden states belong to another target, other data or other target layers, or memory does
            not suffice.
    """

    def computed(indices: Sequence[int]) -> list[Tensor]:
        return target_hidden_states(target, target_layers, [documents[i].tokens for i in indices])

    if where is None:
        return computed
    if where == "memory" and target.device.type != "cpu":
        room = free_bytes(target.device) * SHARE_OF_DEVICE
        progress.note(f"The target's hidden states stay on {target.device} once computed, up to {size(int(room))}.")
        return StoredHiddenStates(computed, room)
    if where != "memory":
        hidden_states = read_hidden_states(Path(where))
        hidden_states.check(target, data, target_layers)
    else:
        hidden_states = _computed(target, data, documents.longest, target_layers, beside / FOLDER, reserved, progress)
    return lambda indices: [hidden_states.of(i, target_layers) for i in indices]


class StoredHiddenStates:
    """Source that computes hidden states on first use and stores them on their device.

    On a GPU, computing them takes half of a step.

    Args:
        source: Source that computes.
        room: Bytes that may be stored. Hidden states beyond them are computed anew each time.
    """

    def __init__(self, source: Source, room: float) -> None:
        self._source, self._room = source, room
        self._stored: dict[int, Tensor] = {}

    def __call__(self, indices: Sequence[int]) -> list[Tensor]:
        new = [i for i in indices if i not in self._stored]
        computed = dict(zip(new, self._source(new) if new else (), strict=True))
        for i, hidden_states in computed.items():
            if hidden_states.nbytes <= self._room:
                self._room -= hidden_states.nbytes
                self._stored[i] = hidden_states.clone()  # a view would hold the memory of its whole batch
        return [self._stored[i] if i in self._stored else computed[i] for i in indices]


def _computed(
    target: Target,
    data: TokenData,
    longest: int,
    target_layers: tuple[int, ...],
    folder: Path,
    reserved: int | None,
    progress: Progress,
) -> HiddenStates:
    """Return the hidden states of all documents, reading from `folder` what an earlier run stored there."""
    try:
        plan = plan_hidden_states(folder, target, data, target_layers, HiddenStateSettings(), longest)
    except UsageError:  # hidden states of something else
        shutil.rmtree(folder)
        plan = plan_hidden_states(folder, target, data, target_layers, HiddenStateSettings(), longest)
    # The hidden states may take half of the disk that the run leaves free.
    store = reserved is not None and plan.need <= (plan.free - reserved) / 2
    free = psutil.virtual_memory().available
    if not store and plan.need > free:
        raise UsageError(
            f"The hidden states need {size(plan.need)} of memory and {size(free)} are free, and the disk is too small "
            'to store them; leave out hidden_states = "memory", or store them elsewhere with `blockdraft '
            "hidden-states`."
        )
    if plan.need and store:
        progress.note(f"The target's hidden states are stored in {folder} ({size(plan.need)}) until the run ends.")
    if plan.need:
        progress.report(STAGE, 0, sum(map(sum, plan.manifest["lengths"])))
    hidden_states, failure = plan.in_memory(store, lambda done, total: progress.report(STAGE, done, total))
    if failure is not None:
        progress.note(f"Not all hidden states are stored, so a resumed run computes them again: {failure}")
    return hidden_states


def batch_hidden_states(batch: Batch, source: Source, width: int, target: Target) -> Tensor:
    """Return hidden states `[B, S, width]` in the target's dtype, each document's at its place in the sequence.

    They are 0 after the last document.
    """
    of_documents = iter(source([i for contents in batch.contents for i in contents]) if any(batch.contents) else ())
    hidden_states = torch.zeros(*batch.tensors.tokens_BS.shape, width, dtype=target.dtype, device=target.device)
    for row, contents in enumerate(batch.contents):
        begin = 0
        for number in range(len(contents)):
            length = int((batch.tensors.documents_BS[row] == number).sum())
            hidden_states[row, begin : begin + length] = next(of_documents)[:length].to(target.device)
            begin += length
    return hidden_states
