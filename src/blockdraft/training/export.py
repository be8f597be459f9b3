"""Drafters in the formats of other engines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters import entries
from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.formats import (
    Borrowed,
    Checkpoint,
    Layout,
    check_fits,
    clear_remains,
    find_layout,
    layouts,
    read_config,
    read_drafter,
)
from blockdraft.formats.gguf import is_gguf, open_gguf
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.targets import Target, embedding_and_head

USUAL = "zlab"


@dataclass(frozen=True)
class Format:
    """How a drafter is written.

    Attributes:
        name: A file of `formats/`.
        target_name: Folder or hub name under which readers find the target, for formats that name it.
        target_architectures: As in the target's config.json; likewise.
    """

    name: str
    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """Raises ValueError where there is none of this name."""
        return find_layout(self.name)

    def check(self, config: Any) -> None:
        """Raise a ValueError where the format has no words for this configuration."""
        self.layout.check(config, self.target_name, self.target_architectures)

    def write(self, out: str | Path, checkpoint: Checkpoint) -> None:
        """Write a folder; see `Layout.write`."""
        self.layout.write(out, checkpoint, self.target_name, self.target_architectures)


def format_for(
    name: str, target: Target, target_path: str | None, target_name: str | None = None, revision: str | None = None
) -> Format:
    """The format of this name for a target's drafters.

    Args:
        target_path, revision: From where the target was loaded.
        target_name: See `Format`; None is where the target lies.
    """
    find_layout(name)
    place = str(target_path) if target.path is None else str(target.path.resolve())  # a hub name has no folder
    architectures = target.architecture.get("architectures") or []
    return Format(name, target_name or place, tuple(architectures))


def usual_format(drafter: str | Path) -> str:
    """The format that a drafter is written in unless another is asked for: what training writes of its kind. Raises
    ValueError where it has no config.json that can be read."""
    if is_gguf(drafter):
        return kind_in(open_gguf(drafter)).layout
    named = read_config(drafter).get("architectures")
    known = (entry.layouts for entry in entries().values() if {*(named or ())} & {*entry.architectures})
    return next((layouts[0] for layouts in known if layouts), USUAL)


def formats_for(config: Any) -> list[str]:
    """The formats that have words for a configuration."""
    found = []
    for name, layout in layouts().items():
        with suppress(UsageError):
            layout.check(config, None, ())
            found.append(name)
    return found


def export(out: str | Path, written: Format, config: Any, tensors: Mapping[str, Tensor], target: Target) -> None:
    """Write a drafter's folder, which appears whole or not at all.

    Args:
        out: A new or empty folder, or a draft model's, which is replaced.
        config: Of the draft network.
        tensors: Of the draft network.
        target: What it was trained for; some formats hold copies of its embedding and head.

    Raises:
        ValueError: The drafter does not fit the target, the format cannot express it, or `out` is taken.
    """
    _write(out, written, Checkpoint(config, tensors, trained_for=target.source_fingerprint), target)


def _write(out: str | Path, written: Format, drafter: Checkpoint, target: Target) -> None:
    """Write a drafter with the whole of the target's vocabulary."""
    fits = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    check_fits(drafter.config, **fits)
    borrowed = Borrowed(*embedding_and_head(target), kept=None) if written.layout.borrows else None
    written.write(out, replace(drafter, borrowed=borrowed))


def convert(drafter: str | Path, out: str | Path, written: Format, target: Target) -> None:
    """Write the drafter of one folder, in any format, to another. As `export`; it stays one for the target that it was
    trained for.

    Raises:
        ValueError: As `export`; also where `drafter` cannot be read, is `out` itself, or has a reduced vocabulary,
            which only the speculators format can say.
    """
    if Path(drafter).resolve() == Path(out).resolve():
        raise UsageError(f"{out} is the drafter's own folder; choose another to write to.")
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
    found = read_drafter(drafter, vocabulary, target.num_layers)
    try:
        written.check(found.config)
    except UsageError as error:
        raise UsageError(f"{error} Formats that hold it: {', '.join(formats_for(found.config)) or 'none'}.") from error
    with held(Path(out), "exporting"), torch.no_grad():
        clear_remains(out)
        if found.borrowed is None or found.borrowed.kept is None:
            _write(out, written, found, target)
            return
        embedding = embedding_and_head(target)[0]
        own = replace(found.borrowed, embedding=embedding)  # a reduced head may have been trained
        written.write(out, replace(found, borrowed=own))
