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
from blockdraft.data.features import Features, plan_features, read_features, size
from blockdraft.data.settings import FeatureSettings
from blockdraft.data.taps import tapped_features
from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft.training.batches import Batch, Documents
from blockdraft.training.progress import Progress

FOLDER = "features"  # of features that are kept beside a run

# Features `[S, F]` of the documents with these indices. A document's features may go beyond its end in the row.
Source: TypeAlias = Callable[[Sequence[int]], list[Tensor]]


def open_source(
    where: str | None,
    target: Target,
    data: TokenData,
    documents: Documents,
    taps: tuple[int, ...],
    beside: Path,
    reserved: int | None,
    progress: Progress,
) -> Source:
    """Open the source that a recipe names in its field `features`.

    Args:
        taps: Layers whose outputs are needed; `target.num_layers` is the input of the head.
        beside: Folder of the run, where computed features are kept for a resumed run.
        reserved: Bytes of the disk that the run needs for other files; None keeps no features there.

    Raises:
        UsageError: Stored features belong to another target, other data or other taps, or memory does not suffice.
    """
    if where is None:
        return lambda chosen: tapped_features(target, taps, [documents[i].tokens for i in chosen])
    if where != "memory":
        features = read_features(Path(where))
        features.check(target, data, taps)
    else:
        features = _computed(target, data, documents.longest, taps, beside / FOLDER, reserved, progress)
    return lambda chosen: [features.of(i, taps) for i in chosen]


def _computed(
    target: Target,
    data: TokenData,
    longest: int,
    taps: tuple[int, ...],
    folder: Path,
    reserved: int | None,
    progress: Progress,
) -> Features:
    """Features of all documents, read from `folder` as far as an earlier run has left them there."""
    try:
        plan = plan_features(folder, target, data, taps, FeatureSettings(), longest)
    except UsageError:  # features of something else
        shutil.rmtree(folder)
        plan = plan_features(folder, target, data, taps, FeatureSettings(), longest)
    # The features may take half of the disk that the run leaves free.
    store = reserved is not None and plan.need <= (plan.free - reserved) / 2
    free = psutil.virtual_memory().available
    if not store and plan.need > free:
        raise UsageError(
            f"The features need {size(plan.need)} of memory and {size(free)} are free, and the disk is too small to "
            'keep them; leave out features = "memory", or store them elsewhere with `blockdraft features`.'
        )
    if plan.need and store:
        progress.note(f"The target's features are kept in {folder} ({size(plan.need)}) until the run ends.")
    if plan.need:
        progress.report("features, tokens", 0, sum(map(sum, plan.manifest["lengths"])))
    features, failure = plan.in_memory(store, lambda done, total: progress.report("features, tokens", done, total))
    if failure is not None:
        progress.note(f"Not all features are kept beside the run, so a resumed run computes them again: {failure}")
    return features


def batch_features(batch: Batch, source: Source, width: int, target: Target) -> Tensor:
    """Features `[B, S, width]` in the target's dtype, each document's where it lies in its row; 0 after the last."""
    found = iter(source([i for row in batch.contents for i in row]) if any(batch.contents) else ())
    features = torch.zeros(*batch.tensors.tokens_BS.shape, width, dtype=target.dtype, device=target.device)
    for row, contents in enumerate(batch.contents):
        begin = 0
        for number in range(len(contents)):
            length = int((batch.tensors.documents_BS[row] == number).sum())
            features[row, begin : begin + length] = next(found)[:length].to(target.device)
            begin += length
    return features
