"""Sources of a batch's features: the target in the loop, memory, or a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
import torch
from torch import Tensor

from blockdraft.data.documents import TokenData
from blockdraft.data.features import read_features
from blockdraft.data.taps import tapped_features
from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft.training.batches import Batch, Documents

GROUP = 32  # documents per target forward where all features are computed in advance

# Features `[S, F]` of the documents with these indices. A document's features may go beyond its end in the row.
Source: TypeAlias = Callable[[Sequence[int]], list[Tensor]]


def open_source(
    where: str | None,
    target: Target,
    data: TokenData,
    documents: Documents,
    taps: tuple[int, ...],
    report: Callable[[str, int, int], None],
) -> Source:
    """Open the source that a recipe names in its field `features`.

    Args:
        taps: Layers whose outputs are needed; `target.num_layers` is the input of the head.
        report: Called with the stage, the documents done and those to do.

    Raises:
        UsageError: Stored features belong to another target, other data or other taps, or memory does not suffice.
    """
    if where is None:
        return lambda chosen: tapped_features(target, taps, [documents[i].tokens for i in chosen])
    if where == "memory":
        return _memory(target, documents, taps, report)
    features = read_features(Path(where))
    features.check(target, data, taps)
    return lambda chosen: [features[i] for i in chosen]


def _memory(
    target: Target, documents: Documents, taps: tuple[int, ...], report: Callable[[str, int, int], None]
) -> Source:
    needed = 2 * documents.tokens * len(taps) * target.hidden_size
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"The features of {documents.tokens} tokens take {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} "
            'GiB are free; leave out features = "memory", or store them with `blockdraft features`.'
        )
    kept: dict[int, Tensor] = {}
    # Groups are always the same, because the last bits of a document's features depend on the others in its batch.
    order = sorted(documents.usable, key=lambda i: documents.lengths[i])
    for begin in range(0, len(order), GROUP):
        group = order[begin : begin + GROUP]
        found = tapped_features(target, taps, [documents[i].tokens for i in group])
        kept |= {i: features.to("cpu", torch.bfloat16) for i, features in zip(group, found, strict=True)}
        report("features", len(kept), len(order))
    return lambda chosen: [kept[i] for i in chosen]


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
