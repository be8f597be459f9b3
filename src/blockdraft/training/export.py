"""Drafters in the formats of other engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from blockdraft.errors import UsageError
from blockdraft.formats import speculators, zlab
from blockdraft.formats.speculators import Borrowed
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.targets import Target, embedding_and_head

FORMATS = ("zlab", "speculators")


def check_format(name: str) -> None:
    """Raise a ValueError for an unknown format."""
    if name not in FORMATS:
        raise UsageError(f"format is {name!r}; it must be one of {', '.join(FORMATS)}.")


@dataclass(frozen=True)
class Format:
    """How a drafter is written.

    Attributes:
        name: One of `FORMATS`.
        target_name: Folder or hub name under which readers of the speculators format find the target.
        target_architectures: As in the target's config.json; for speculators as well.
    """

    name: str = "zlab"
    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_format(self.name)

    def check(self, config: DraftConfig) -> None:
        """Raise a ValueError where the format has no words for this configuration."""
        if self.name == "speculators":
            speculators.config_dict(config, self.target_name, self.target_architectures, config.vocab_size)


ZLAB = Format()


def format_for(name: str, target: Target, target_path: str | None, target_name: str | None = None) -> Format:
    """The format of this name for a target's drafters.

    Args:
        target_path: From where the target was loaded.
        target_name: See `Format`; None is where the target lies.
    """
    check_format(name)
    place = str(target_path) if target.path is None else str(target.path.resolve())  # a hub name has no folder
    architectures = AutoConfig.from_pretrained(place).architectures or []
    return Format(name, target_name or place, tuple(architectures))


def export(
    out: str | Path, written: Format, config: DraftConfig, tensors: Mapping[str, Tensor], target: Target
) -> None:
    """Write a drafter's folder, which appears whole or not at all.

    Args:
        out: A new or empty folder, or a draft model's, which is replaced.
        config: Of the draft network.
        tensors: Of the draft network, under the names of z-lab's layout.
        target: What it drafts for; the speculators format holds copies of its embedding and head.

    Raises:
        ValueError: The drafter does not fit the target, the format cannot express it, or `out` is taken.
    """
    fits = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    zlab.check_fits(config, **fits)
    if written.name == "zlab":
        zlab.write_checkpoint(out, config, tensors)
    else:
        borrowed = Borrowed(*embedding_and_head(target), kept=None)
        names = written.target_name, written.target_architectures
        speculators.write_checkpoint(out, config, tensors, borrowed, *names)


def convert(drafter: str | Path, out: str | Path, written: Format, target: Target) -> None:
    """Write the drafter of one folder, in either format, to another. As `export`.

    Raises:
        ValueError: As `export`; also where `drafter` cannot be read, is `out` itself, or has a reduced vocabulary,
            which only the speculators format can say.
    """
    if Path(drafter).resolve() == Path(out).resolve():
        raise UsageError(f"{out} is the drafter's own folder; choose another to write to.")
    if not speculators.recognises(drafter):
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
        export(out, written, *zlab.read_checkpoint(drafter, vocabulary), target)
        return
    config, tensors, borrowed = speculators.read_checkpoint(drafter, target.num_layers)
    if borrowed.kept is None:
        export(out, written, config, tensors, target)
        return
    if written.name == "zlab":
        kept = f"{len(borrowed.kept)} of {config.vocab_size} tokens"
        raise UsageError(f"{drafter} guesses among {kept}, which z-lab's layout cannot say; export to speculators.")
    with torch.no_grad():
        embedding = embedding_and_head(target)[0]
    own = Borrowed(embedding, borrowed.head, borrowed.kept)  # a reduced head may have been trained
    speculators.write_checkpoint(out, config, tensors, own, written.target_name, written.target_architectures)
