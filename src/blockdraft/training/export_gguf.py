"""Drafters and their targets as GGUF files, for llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, check_fits, read_drafter
from blockdraft.formats.engines import llama_cpp_line
from blockdraft.formats.gguf import is_gguf, new_files
from blockdraft.formats.gguf.drafter import write_drafter
from blockdraft.targets import (
    OpenCheckpoint,
    TargetText,
    gguf_architecture,
    load_target_text,
    open_checkpoint,
    tokenizer_metadata,
    write_gguf_target,
)
from blockdraft.types import GGUFWeights

DRAFTED = ("llama", "qwen3")  # architectures of ours that llama.cpp drafts for


@dataclass(frozen=True)
class GGUFSource:
    """A target that is written as a GGUF file, and whose drafters are.

    Attributes:
        name: Folder or hub name.
        tokenizer: As values by their keys.
        note: What to tell the user of them.
    """

    name: str
    checkpoint: OpenCheckpoint
    text: TargetText
    tokenizer: Mapping[str, Any]
    note: str | None

    def read_drafter(self, path: str | Path) -> Checkpoint:
        """One of its drafters, in any format. Raises ValueError where it cannot be read or does not fit."""
        wanted = self.checkpoint.wanted
        layers = len(wanted.layers)
        found = read_drafter(path, self.text.tokenizer.get_vocab() if self.text.tokenizer else None, layers)
        check_fits(found.config, hidden_size=wanted.hidden_size, num_layers=layers, vocab_size=wanted.vocab_size)
        return found

    def write_target(self, path: Path, weights: GGUFWeights) -> None:
        """See `write_gguf_target`."""
        write_gguf_target(path, self.checkpoint, {**self.tokenizer, "general.name": self.name}, weights)

    def write_drafter(self, path: Path, drafter: Checkpoint, weights: GGUFWeights) -> None:
        """See the function of this name."""
        write_drafter(path, drafter, {**self.tokenizer, "general.name": f"drafter of {self.name}"}, weights)


@contextmanager
def gguf_source(
    target: str | Path, revision: str | None = None, adapter: str | Path | None = None
) -> Iterator[GGUFSource]:
    """A target, of a family that the native decoder knows, by folder or hub name, without reading its weights whole.

    Raises:
        ValueError: It cannot be read, or its tokenizer cannot be written.
    """
    text = load_target_text(target, revision)
    with open_checkpoint(target, revision, adapter, "exported") as checkpoint:
        said = tokenizer_metadata(text, checkpoint.wanted.vocab_size, gguf_architecture(checkpoint))
        yield GGUFSource(Path(target).name, checkpoint, text, *said)


@dataclass(frozen=True)
class ExportedGGUF:
    """Attributes:
    target, drafter: The files.
    notes: What to tell the user of them.
    line: What starts llama.cpp with them.
    """

    target: Path
    drafter: Path
    notes: tuple[str, ...]
    line: str


def export_gguf(
    drafter: str | Path,
    out: str | Path,
    target: str | Path,
    weights: GGUFWeights,
    revision: str | None = None,
    adapter: str | Path | None = None,
) -> ExportedGGUF:
    """Write a drafter and its target as `drafter-WEIGHTS.gguf` and `target-WEIGHTS.gguf`, which appear together or not
    at all, over files of the same names.

    Args:
        drafter: In any format that is read.
        out: A folder, new or not.
        target, revision, adapter: As in `gguf_source`.
        weights: What matrices are rounded to; see `blockdraft.formats.gguf.write_gguf`.

    Raises:
        ValueError: The drafter does not fit the target, llama.cpp cannot run one of the two, or nothing can be written.
    """
    if weights not in get_args(GGUFWeights):
        raise UsageError(f"type is {weights!r}; it must be one of {', '.join(get_args(GGUFWeights))}.")
    if is_gguf(target):
        raise UsageError(f"{target} is a GGUF file already; give the folder that it was made from.")
    of_target, of_drafter = (Path(out) / f"{part}-{weights}.gguf" for part in ("target", "drafter"))
    with gguf_source(target, revision, adapter) as source:
        found = source.read_drafter(drafter)
        with new_files(Path(out)) as folder:
            source.write_drafter(folder / of_drafter.name, found, weights)
            source.write_target(folder / of_target.name, weights)
        architecture, fingerprint = gguf_architecture(source.checkpoint), source.checkpoint.source_fingerprint
    notes = [] if source.note is None else [source.note]
    if found.trained_for not in (None, fingerprint):
        notes.append(
            f"{drafter} was trained for another target (fingerprint {found.trained_for}) than {target} "
            f"({fingerprint}); fewer of its guesses may be accepted."
        )
    if architecture not in DRAFTED:
        notes.append(
            f"llama.cpp may not draft for this target: in its release of October 2026 its {architecture} models do not "
            f"hand out what a drafter reads, as {' and '.join(DRAFTED)} do. Each file decodes by itself."
        )
    line = llama_cpp_line(found.config, str(of_drafter), str(of_target))
    return ExportedGGUF(of_target, of_drafter, tuple(notes), line)
