"""Architectures in z-lab's layout and the speculators format, from `ARCHITECTURES` in the `layout.py` of drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, cast

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.draft_network import shapes_of
from blockdraft.plugins import parts

Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Speculator:
    """An architecture in the speculators format.

    Attributes:
        model_type: Value of `speculators_model_type`.
        name: Name under `architectures`.
        from_anchor: Whether the anchor's position drafts too, as in DSpark.
        rows: Names of its own tensors with a row for each token of the draft vocabulary.
    """

    model_type: str
    name: str
    from_anchor: bool = False
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class LlamaCpp:
    """What is specific to an architecture in llama.cpp's files.

    Attributes:
        speculator: Value of `--spec-type`.
        names: llama.cpp's names of its own tensors, by our names; in layers without `blk.N.` and `layers.N.`.
        written: Function from a configuration to the metadata specific to this architecture, by keys without the
            architecture. Raises UsageError for what llama.cpp cannot run.
        read: Function from such metadata and the shapes of all tensors to the specific fields of a configuration;
            returns None if the file holds another kind. Raises UsageError for what is unsupported.
    """

    speculator: str
    names: Mapping[str, str] = field(default_factory=dict)
    written: Callable[[Any], dict[str, Any]] = lambda config: {}
    read: Callable[[Mapping[str, Any], Shapes], dict[str, Any] | None] = lambda values, shapes: {}


@dataclass(frozen=True)
class Architecture:
    """An architecture: its part of config.json, its tensors, and its names in other engines.

    Attributes:
        names: Its names under `architectures`; the first one is written.
        network: Class of its network, whose tensors are a checkpoint. The fields of its `config_class` are keys
            of config.json, at the top level or in `dflash_config`.
        nested: Fields that are written in `dflash_config` only.
        adapted: Function that renames and reshapes the tensors of other writers to ours.
        marks: Additional keys and values that are written in `dflash_config`.
        inert: Additional keys and their accepted values, as in `zlab.INERT`.
        training: Keys of `dflash_config` that matter only to training.
        speculator: Its form in the speculators format; None if that format cannot hold it.
        llama_cpp: Its form in GGUF files; None if llama.cpp does not read it.
        vllm, sglang, tensorrt_llm: Its names in these engines in z-lab's layout; None if an engine does not read it.
        openvino: Whether OpenVINO GenAI drafts with it, converted from z-lab's layout.
    """

    names: tuple[str, ...]
    network: Any
    nested: tuple[str, ...] = ()
    adapted: Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]] = lambda config, tensors: dict(tensors)
    marks: Mapping[str, Any] = field(default_factory=dict)
    inert: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    training: tuple[str, ...] = ()
    speculator: Speculator | None = None
    llama_cpp: LlamaCpp | None = None
    vllm: str | None = None
    sglang: str | None = None
    tensorrt_llm: str | None = None
    openvino: bool = False

    @property
    def config(self) -> type[DraftConfig]:
        """Class of its configuration."""
        return cast("type[DraftConfig]", self.network.config_class)

    def shapes(self, config: Any) -> Shapes:
        """Return the names and shapes of all tensors of a checkpoint."""
        return shapes_of(lambda: self.network(config))

    def draft_tokens(self, config: DraftConfig) -> int:
        """Return the maximum number of draft tokens per block."""
        return config.block_size - (self.speculator is None or not self.speculator.from_anchor)

    def own_keys(self) -> set[str]:
        """Return the keys of config.json that DFlash v1 lacks."""
        return {field.name for field in fields(self.config)} - {field.name for field in fields(DraftConfig)}


def by_name() -> dict[str, Architecture]:
    """Return all architectures by each of their names under `architectures`."""
    known = [entry for module in parts("layout").values() for entry in getattr(module, "ARCHITECTURES", ())]
    return {name: architecture for architecture in known for name in architecture.names}


def find_architecture(config: object) -> Architecture | None:
    """Return the architecture of a configuration, or None if neither of these layouts can hold it."""
    return next((known for known in by_name().values() if known.config is type(config)), None)


def architecture_of(config: object) -> Architecture:
    """Return the architecture of a configuration. Raise a UsageError if neither of these layouts can hold it."""
    if (architecture := find_architecture(config)) is not None:
        return architecture
    raise UsageError(
        f"{type(config).__name__} is a configuration that z-lab's layout and the speculators format cannot hold; "
        "write the drafter in a layout of its own."
    )


def tensor_shapes(config: object) -> Shapes:
    """Return names and shapes of all tensors of a checkpoint with this configuration."""
    return architecture_of(config).shapes(config)
