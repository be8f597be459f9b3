"""Drafters in the formats of other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.formats import speculators, zlab
from blockdraft.formats.speculators import Borrowed
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.targets import Target, embedding_and_head

FORMATS = ("zlab", "speculators")


def check_format(name: str) -> None:
    """Raise a ValueError for an unknown format."""
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}; it must be one of {', '.join(FORMATS)}.")


def export(
    out: str | Path,
    to_format: str,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    target: Target,
    target_name: str | None,
    target_architectures: Sequence[str],
) -> None:
    """Write a drafter's folder, which appears whole or not at all.

    Args:
        out: A new or empty folder, or a draft model's, which is replaced.
        to_format: One of `FORMATS`.
        config: Of the draft network.
        tensors: Of the draft network, under the names of z-lab's layout.
        target: What it drafts for; the speculators format holds copies of its embedding and head.
        target_name: Folder or hub name under which readers of the speculators format find the target.
        target_architectures: As in the target's config.json.

    Raises:
        ValueError: The drafter does not fit the target, the format cannot express it, or `out` is taken.
    """
    check_format(to_format)
    fits = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    zlab.check_fits(config, **fits)
    if to_format == "zlab":
        zlab.write_checkpoint(out, config, tensors)
    else:
        borrowed = Borrowed(*embedding_and_head(target), kept=None)
        speculators.write_checkpoint(out, config, tensors, borrowed, target_name, target_architectures)


def convert(
    drafter: str | Path,
    out: str | Path,
    to_format: str,
    target: Target,
    target_name: str | None,
    target_architectures: Sequence[str],
) -> None:
    """Write the drafter of one folder, in either format, to another. As `export`.

    Raises:
        ValueError: As `export`; also where `drafter` cannot be read, is `out` itself, or has a reduced vocabulary,
            which only the speculators format can say.
    """
    check_format(to_format)
    if Path(drafter).resolve() == Path(out).resolve():
        raise ValueError(f"{out} is the drafter's own folder; choose another to write to.")
    if not speculators.recognises(drafter):
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
        config, tensors = zlab.read_checkpoint(drafter, vocabulary)
        export(out, to_format, config, tensors, target, target_name, target_architectures)
        return
    config, tensors, borrowed = speculators.read_checkpoint(drafter, target.num_layers)
    if borrowed.kept is None:
        export(out, to_format, config, tensors, target, target_name, target_architectures)
        return
    if to_format == "zlab":
        kept = f"{len(borrowed.kept)} of {config.vocab_size} tokens"
        raise ValueError(f"{drafter} guesses among {kept}, which z-lab's layout cannot say; export to speculators.")
    with torch.no_grad():
        embedding = embedding_and_head(target)[0]
    own = Borrowed(embedding, borrowed.head, borrowed.kept)  # a reduced head may have been trained
    speculators.write_checkpoint(out, config, tensors, own, target_name, target_architectures)
