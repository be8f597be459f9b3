"""Layouts, the on-disk forms of drafters: their protocol, their content, and the list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.starting import Start
from blockdraft.formats.trained import UNKNOWN, Trained
from blockdraft.nn.draft_config import need
from blockdraft.plugins import parts, plugins

Raw: TypeAlias = Mapping[str, Any]  # a parsed config.json


@dataclass(frozen=True)
class Borrowed:
    """Copies of the target's weights in a drafter's checkpoint.

    Attributes:
        embedding: `[V, H]`; None uses the target's.
        head: `[Vd, H]`, output projection of the draft vocabulary. A reduced vocabulary requires it.
        kept: `[Vd]` int64, ascending: ids of the draft vocabulary in the target. None is all tokens.
    """

    embedding: Tensor | None
    head: Tensor | None
    kept: Tensor | None


@dataclass(frozen=True)
class Checkpoint:
    """Configuration and tensors of a drafter, on the CPU.

    Attributes:
        config: Configuration of the network, with at least `hidden_size`, `num_target_layers`, `vocab_size` and
            `target_layers`.
        tensors: Tensors of the network by name.
        borrowed: Copies of the target's weights; None in a layout without them.
        trained: How it was trained.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    borrowed: Borrowed | None = None
    trained: Trained = UNKNOWN


@dataclass(frozen=True)
class DrafterTarget:
    """Facts about a drafter's target; None or empty if unknown.

    Attributes:
        name: Folder or hub name under which readers of the drafter find it.
        architectures: `architectures` of its config.json.
        vocabulary: Its tokens and their ids.
        num_layers: Number of its layers.
    """

    name: str | None = None
    architectures: tuple[str, ...] = ()
    vocabulary: Mapping[str, int] | None = None
    num_layers: int | None = None


NO_TARGET = DrafterTarget()


class Layout(Protocol):
    """On-disk form of drafters.

    A file of this package that defines an object `LAYOUT` of this type is a layout for several kinds of drafters, and
    is named after it. The `layout.py` of a drafter's folder may define `LAYOUT`, a layout of that kind alone, named
    after the kind, and `SPECULATORS`, one in the speculators format, with the suffix `_speculators`.

    Attributes:
        borrows: Whether it holds copies of the target's embedding and head.
        pickle: File of a folder that holds the tensors if there is no safetensors file.
    """

    borrows: bool = False
    pickle: str = "pytorch_model.bin"

    def recognises(self, raw: Raw) -> bool:
        """Return whether a parsed config.json has this layout."""

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[Any, bool]:
        """Return the configuration of a parsed config.json, and whether its number of target layers is known.

        If it is unknown, it is the minimum that the target layers need.

        Args:
            tensors: Tensors of the folder by name; only their shapes are read.

        Raises:
            ValueError: The file lacks a value or asks for something unsupported.
        """

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start] | None:
        """Return the commands of other engines for a drafter, or None if they depend on its architecture.

        llama.cpp is left out if it reads such drafters from GGUF files.

        Args:
            export: Function that returns the command which converts the drafter to another layout.
        """
        return None

    def checkpoint(self, raw: Raw, config: Any, tensors: dict[str, Tensor]) -> Checkpoint:
        """Return the drafter of a parsed config.json, its configuration, and all tensors, a dictionary to keep.

        Raises:
            ValueError: The tensors do not fit the configuration.
        """

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        """Raise a ValueError if the layout cannot express this configuration."""

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        """Write a folder. It appears completely or not at all, and replaces the folder of an earlier drafter.

        Raises:
            ValueError: The tensors do not fit the configuration, the layout cannot express it, or the folder does not
                hold a drafter.
        """


def check_kind(config: Any, kind: type) -> None:
    """Raise a UsageError unless a configuration is of the class that a layout holds."""
    limit = f"{kind.__name__}, the only one that this layout holds; write the drafter in a layout of its own kind"
    need(isinstance(config, kind), "the configuration", type(config).__name__, limit)


def check_fits(
    config: Any, *, hidden_size: int, num_layers: int, vocab_size: int, max_context: int | None = None
) -> None:
    """Raise a ValueError unless a drafter fits the target's sizes, and supports contexts of `max_context` tokens."""
    for name, theirs in (("hidden_size", hidden_size), ("num_target_layers", num_layers), ("vocab_size", vocab_size)):
        ours = getattr(config, name)
        need(ours == theirs, f"the drafter's {name}", ours, f"the target's, {theirs}; use a drafter made for it")
    if max_context is not None:
        limit = config.max_position_embeddings
        need(max_context <= limit, "max_context", max_context, f"at most the drafter's positions, {limit}")


def layouts() -> dict[str, Layout]:
    """Return all layouts by name. Those for a single kind of drafter come first, since they take precedence."""
    layouts_by_name = {name: module.LAYOUT for name, module in parts("layout").items() if hasattr(module, "LAYOUT")}
    layouts_by_name |= {
        f"{n}_speculators": m.SPECULATORS for n, m in parts("layout").items() if hasattr(m, "SPECULATORS")
    }
    shared = plugins("blockdraft.formats")
    return layouts_by_name | {name: module.LAYOUT for name, module in shared.items() if hasattr(module, "LAYOUT")}


def find_layout(name: str) -> Layout:
    """Return the layout with this name. Raise a UsageError if there is none."""
    if name not in layouts():
        raise UsageError(f"format must be one of {', '.join(sorted(layouts(), reverse=True))}, got {name!r}.")
    return layouts()[name]


def layout_of(raw: Any) -> Layout | None:
    """Return the layout of a parsed config.json, or None if it does not describe a drafter."""
    if not isinstance(raw, Mapping):
        return None
    return next((layout for layout in layouts().values() if layout.recognises(raw)), None)
