"""Export of drafters in the formats of other engines, as folders and as GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from blockdraft.drafters import entries
from blockdraft.errors import UsageError
from blockdraft.folders import clear_remains, held
from blockdraft.formats import (
    Borrowed,
    Checkpoint,
    DrafterTarget,
    Layout,
    Trained,
    check_fits,
    find_layout,
    layouts,
    read_config,
    read_drafter,
)
from blockdraft.formats.base import NO_TARGET
from blockdraft.formats.gguf import is_gguf, open_gguf
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.models import located, model_of
from blockdraft.targets import (
    Target,
    TargetText,
    embedding_and_head,
    load_target_text,
)
from blockdraft_tools.checkpoint import OpenCheckpoint, open_checkpoint
from blockdraft_tools.engines import llama_cpp_line
from blockdraft_tools.gguf import MatrixType
from blockdraft_tools.gguf.drafters import write_drafter
from blockdraft_tools.gguf.files import new_files
from blockdraft_tools.gguf.targets import gguf_architecture, write_gguf_target
from blockdraft_tools.gguf.tokenizers import tokenizer_metadata

USUAL = "zlab"
LLAMA_CPP_DRAFTS = ("llama", "qwen3")  # architectures that llama.cpp drafts for


@dataclass(frozen=True)
class ExportFormat:
    """Format in which a drafter is written.

    Attributes:
        name: File name of the layout in `formats/`.
        target: Name and architectures of the target, for formats that store them.
    """

    name: str
    target: DrafterTarget = NO_TARGET

    @property
    def layout(self) -> Layout:
        """Layout of this name. Raises UsageError if there is none."""
        return find_layout(self.name)

    def check(self, config: Any) -> None:
        """Raise UsageError unless the format can express this configuration."""
        self.layout.check(config, self.target)

    def write(self, out: str | Path, checkpoint: Checkpoint) -> None:
        """Write a folder; see `Layout.write`."""
        self.layout.write(out, checkpoint, self.target)


def format_for(
    name: str, target: Target, target_path: str | None, target_name: str | None = None, revision: str | None = None
) -> ExportFormat:
    """Return the format of this name for drafters of a target.

    Args:
        target_path, revision: Folder or hub name that the target was loaded from, and its revision.
        target_name: Name under which readers find the target; None is where the target was loaded from, or the hub name
            of a model of the catalogue.
    """
    find_layout(name)
    place = str(target_path) if target.path is None else str(target.path.resolve())  # a hub name has no folder
    if (model := model_of(target.path)) is not None:
        place = model.hub
    architectures = target.architecture.get("architectures") or []
    return ExportFormat(name, DrafterTarget(target_name or place, tuple(architectures)))


def usual_format(drafter: str | Path) -> str:
    """Return the format in which training writes drafters of this kind. Raise UsageError if it cannot be read."""
    if is_gguf(drafter):
        return kind_in(open_gguf(drafter)).layout
    named = read_config(drafter).get("architectures")
    known = (entry.layouts for entry in entries().values() if {*(named or ())} & {*entry.architectures})
    return next((layouts[0] for layouts in known if layouts), USUAL)


def formats_for(config: Any) -> list[str]:
    """Return the names of the formats that can express a configuration."""
    names = []
    for name, layout in layouts().items():
        with suppress(UsageError):
            layout.check(config)
            names.append(name)
    return names


def export(
    out: str | Path,
    written: ExportFormat,
    config: Any,
    tensors: Mapping[str, Tensor],
    target: Target,
    kept: Tensor | None = None,
    with_embedding: bool = True,
    qat_bits: int | None = None,
) -> None:
    """Write a drafter's folder, which appears whole or not at all.

    Args:
        out: A new or empty folder, or a draft model's folder, which is replaced.
        written: Format to write.
        config: Configuration of the draft network.
        tensors: Weights of the draft network.
        target: Target that the drafter was trained for; some formats hold copies of its embedding and head.
        kept: `[Vd]` int64, ascending, tokens that the drafter can propose by the target's head; None is all tokens.
        with_embedding: Whether a drafter with a reduced vocabulary gets a copy of the target's whole embedding. Other
            engines read it, and `load_drafter` does not need it.
        qat_bits: As in `Trained`.

    Raises:
        UsageError: The drafter does not fit the target, the format cannot express it, or `out` holds something else.
    """
    trained = Trained(target.source_fingerprint, qat_bits)
    _write(out, written, Checkpoint(config, tensors, trained=trained), target, kept, with_embedding)


def _write(
    out: str | Path,
    written: ExportFormat,
    drafter: Checkpoint,
    target: Target,
    kept: Tensor | None = None,
    with_embedding: bool = True,
) -> None:
    """Write a drafter with the target's head, cut to the `kept` tokens."""
    fits = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    check_fits(drafter.config, **fits)
    borrowed = None
    if written.layout.borrows and (with_embedding or kept is not None):
        embedding, head = embedding_and_head(target)
        if kept is None:
            borrowed = Borrowed(embedding, head, None)
        else:
            borrowed = Borrowed(embedding if with_embedding else None, head[kept], kept)
    written.write(out, replace(drafter, borrowed=borrowed))


def convert(drafter: str | Path, out: str | Path, written: ExportFormat, target: Target) -> None:
    """Write the drafter of one folder to another folder, in any format, for the target that it was trained for.

    Arguments are those of `export`.

    Raises:
        UsageError: As in `export`. Also if `drafter` cannot be read, is `out` itself, or has a reduced vocabulary,
            which only the speculators format can express.
    """
    if Path(drafter).resolve() == Path(out).resolve():
        raise UsageError(f"{out} is the drafter's own folder; choose another to write to.")
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
    checkpoint = read_drafter(drafter, vocabulary, target.num_layers)
    try:
        written.check(checkpoint.config)
    except UsageError as error:
        names = ", ".join(formats_for(checkpoint.config)) or "none"
        raise UsageError(f"{error} Formats that hold it: {names}.") from error
    with held(Path(out), "exporting"), torch.no_grad():
        clear_remains(out)
        if checkpoint.borrowed is None or checkpoint.borrowed.kept is None:
            _write(out, written, checkpoint, target)
            return
        embedding = embedding_and_head(target)[0]
        own = replace(checkpoint.borrowed, embedding=embedding)  # the reduced head stays: it may have been trained
        written.write(out, replace(checkpoint, borrowed=own))


@dataclass(frozen=True)
class GGUFSource:
    """Target whose GGUF file, and whose drafters' GGUF files, can be written.

    Attributes:
        name: Folder or hub name.
        checkpoint: Weights, read when they are written.
        text: Tokenizer and limits.
        tokenizer: Metadata of the tokenizer, values by their GGUF keys.
        note: Sentence for the user on the tokenizer; None if there is nothing to report.
    """

    name: str
    checkpoint: OpenCheckpoint
    text: TargetText
    tokenizer: Mapping[str, Any]
    note: str | None

    def read_drafter(self, path: str | Path) -> Checkpoint:
        """Read a drafter of this target, in any format. Raise UsageError if it does not fit."""
        wanted = self.checkpoint.wanted
        layers = len(wanted.layers)
        drafter = read_drafter(path, self.text.tokenizer.get_vocab() if self.text.tokenizer else None, layers)
        check_fits(drafter.config, hidden_size=wanted.hidden_size, num_layers=layers, vocab_size=wanted.vocab_size)
        return drafter

    def write_target(self, path: Path, weights: MatrixType) -> None:
        """Write the target; see `write_gguf_target`."""
        write_gguf_target(path, self.checkpoint, {**self.tokenizer, "general.name": self.name}, weights)

    def write_drafter(self, path: Path, drafter: Checkpoint, weights: MatrixType, with_tokenizer: bool = True) -> None:
        """Write a drafter; see `blockdraft_tools.gguf.drafters.write_drafter`."""
        tokenizer = self.tokenizer if with_tokenizer else {}
        write_drafter(path, drafter, {**tokenizer, "general.name": f"drafter of {self.name}"}, weights)


@contextmanager
def gguf_source(
    target: str | Path, revision: str | None = None, adapter: str | Path | None = None
) -> Iterator[GGUFSource]:
    """Open a target, by folder, hub name or GGUF file, without loading its weights.

    The native decoder must know its family.

    Raises:
        UsageError: The target cannot be read, or GGUF cannot express its tokenizer.
    """
    text = load_target_text(target, revision)
    with open_checkpoint(target, revision, adapter, "exported") as checkpoint:
        if is_gguf(target):
            metadata = open_gguf(target).metadata
            tokenizer, note = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}, None
        else:
            tokenizer, note = tokenizer_metadata(text, checkpoint.wanted.vocab_size, gguf_architecture(checkpoint))
        yield GGUFSource(name=Path(target).name, checkpoint=checkpoint, text=text, tokenizer=tokenizer, note=note)


@dataclass(frozen=True)
class ExportedGGUF:
    """GGUF files of a target and its drafter.

    Attributes:
        target, drafter: Paths of the files.
        notes: Sentences for the user about them.
        line: Command that starts llama.cpp with them, or None if it cannot run the drafter.
    """

    target: Path
    drafter: Path
    notes: tuple[str, ...]
    line: str | None


def export_gguf(
    drafter: str | Path,
    out: str | Path,
    target: str | Path,
    weights: MatrixType,
    revision: str | None = None,
    adapter: str | Path | None = None,
    with_tokenizer: bool = True,
) -> ExportedGGUF:
    """Write a drafter and its target as `drafter-WEIGHTS.gguf` and `target-WEIGHTS.gguf`.

    Both appear together or not at all, and replace files of the same names. A target that is already a GGUF file is not
    written.

    Args:
        drafter: Drafter in any format that can be read.
        out: A folder, new or not.
        target, revision, adapter: As in `gguf_source`.
        weights: Number format of the matrices; see `blockdraft_tools.gguf.files.write_gguf`.
        with_tokenizer: Whether the drafter's file gets a copy of the target's tokenizer.

    Raises:
        UsageError: The drafter does not fit the target, llama.cpp cannot run one of the two, or `out` cannot be
            written.
    """
    if weights not in get_args(MatrixType):
        raise UsageError(f"type must be one of {', '.join(get_args(MatrixType))}, got {weights!r}.")
    target = located(target)
    target_file, drafter_file = (Path(out) / f"{part}-{weights}.gguf" for part in ("target", "drafter"))
    if is_gguf(target):
        target_file = Path(target)
    with gguf_source(target, revision, adapter) as source:
        checkpoint = source.read_drafter(drafter)
        with new_files(Path(out)) as folder:
            source.write_drafter(folder / drafter_file.name, checkpoint, weights, with_tokenizer)
            if not is_gguf(target):
                source.write_target(folder / target_file.name, weights)
        architecture, fingerprint = gguf_architecture(source.checkpoint), source.checkpoint.source_fingerprint
    notes = [] if source.note is None else [source.note]
    if checkpoint.trained.target not in (None, fingerprint):
        notes.append(
            f"{drafter} was trained for another target (fingerprint {checkpoint.trained.target}) than {target} "
            f"({fingerprint}); fewer of its draft tokens may be accepted."
        )
    if architecture not in LLAMA_CPP_DRAFTS:
        notes.append(
            f"llama.cpp may not draft for this target: in its release of October 2026 its {architecture} models do not "
            f"return what a drafter reads, as {' and '.join(LLAMA_CPP_DRAFTS)} do. Each file decodes by itself."
        )
    line = None
    try:
        line = llama_cpp_line(checkpoint.config, str(drafter_file), str(target_file))
    except UsageError as refused:
        notes.append(f"llama.cpp cannot run this drafter: {refused}. `blockdraft serve` does.")
    return ExportedGGUF(target=target_file, drafter=drafter_file, notes=tuple(notes), line=line)
