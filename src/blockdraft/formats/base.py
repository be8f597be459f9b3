"""Layouts, the ways to keep drafters on disk: their protocol, what they read, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.starting import Start
from blockdraft.formats.stored import Stored
from blockdraft.nn.draft_config import need
from blockdraft.plugins import parts, plugins


@dataclass(frozen=True)
class Borrowed:
    """What a checkpoint holds of its target.

    Attributes:
        embedding: `[V, H]`; None where the file leaves it to the target.
        head: `[Vd, H]`, the output projection of the kept tokens; None likewise, never with a reduced vocabulary.
        kept: `[Vd]` int64, ascending: the target's ids of the tokens that the drafter can guess. None is all.
    """

    embedding: Tensor | None
    head: Tensor | None
    kept: Tensor | None


@dataclass(frozen=True)
class Checkpoint:
    """A drafter on the CPU.

    Attributes:
        config: Of its network, with `hidden_size`, `num_target_layers`, `vocab_size` and `taps` at least.
        tensors: Of its network.
        borrowed: None in a layout that holds nothing of the target.
        trained_for: `Target.source_fingerprint` of its target, which config.json has under a key that other engines
            ignore; None where it is not known.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    borrowed: Borrowed | None = None
    trained_for: str | None = None


class Layout(Protocol):
    """A way to keep drafters on disk. A file of this package that defines `LAYOUT`, an object of this kind, holds a
    layout for several kinds of drafters and names it. `layout.py` of a drafter's folder does so for that kind alone,
    under the kind's name, and `speculators.py` there for the speculators format, under the kind's name with
    `_speculators`.

    Attributes:
        borrows: Whether it holds copies of the target's embedding and head.
        pickle: File of a folder that holds its tensors where no safetensors file does.
    """

    borrows: bool
    pickle: str

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        """Whether a parsed config.json is of this layout."""

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Stored],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[Any, bool]:
        """The configuration of a parsed config.json, and whether the number of target layers in it is known: where the
        file does not say it, None stands for as many as the taps need. For the others see `read`.

        Args:
            tensors: Of the folder; their shapes are looked at.

        Raises:
            ValueError: The file lacks a value, or asks for the unsupported.
        """

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start] | None:
        """How other engines are started with a drafter of this layout; None where that depends on its architecture.
        llama.cpp is left out where it reads such drafters as GGUF files.

        Args:
            export: Gives the command that writes it in another layout.
        """

    def read(self, path: Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
        """Read a folder.

        Args:
            vocabulary: The target's tokens and their ids.
            num_target_layers: Of the target.

        Raises:
            ValueError: It is incomplete or broken, or asks for the unsupported.
        """

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        """Raise a ValueError where the layout has no words for this configuration."""

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        """Write a folder, which appears whole or not at all and replaces the whole of a drafter's folder.

        Args:
            target_name: Folder or hub name under which readers find the target.
            target_architectures: As in the target's config.json.

        Raises:
            ValueError: The tensors do not fit the configuration, the layout has no words for it, or the folder holds
                something else than a drafter.
        """


def check_fits(
    config: Any, *, hidden_size: int, num_layers: int, vocab_size: int, max_context: int | None = None
) -> None:
    """Check a drafter against its target, whose embedding, head and features it borrows, and against the longest
    context to be decoded, in tokens (None is not checked). Raises ValueError where they do not fit."""
    for name, theirs in (("hidden_size", hidden_size), ("num_target_layers", num_layers), ("vocab_size", vocab_size)):
        ours = getattr(config, name)
        need(ours == theirs, f"the drafter's {name}", ours, f"the target's, {theirs}; use a drafter made for it")
    if max_context is not None:
        limit = config.max_position_embeddings
        need(max_context <= limit, "max_context", max_context, f"at most the drafter's positions, {limit}")


def layouts() -> dict[str, Layout]:
    """All layouts by name. Those of a single kind of drafter come first: they are asked first whether a folder is
    theirs."""
    found = {name: module.LAYOUT for name, module in parts("layout").items() if hasattr(module, "LAYOUT")}
    found |= {f"{name}_speculators": module.LAYOUT for name, module in parts("speculators").items()}
    shared = plugins("blockdraft.formats")
    return found | {name: module.LAYOUT for name, module in shared.items() if hasattr(module, "LAYOUT")}


def find_layout(name: str) -> Layout:
    """The layout of this name. Raises ValueError where there is none."""
    if name not in layouts():
        raise UsageError(f"format is {name!r}; it must be one of {', '.join(sorted(layouts(), reverse=True))}.")
    return layouts()[name]


def layout_of(raw: Any) -> Layout | None:
    """The layout of a parsed config.json; None where it is no drafter's."""
    if not isinstance(raw, Mapping):
        return None
    return next((layout for layout in layouts().values() if layout.recognises(raw)), None)
