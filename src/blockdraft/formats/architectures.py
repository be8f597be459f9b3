"""Architectures that z-lab's layout and the speculators format hold: `ARCHITECTURE` in a drafter's `layout.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.plugins import parts

Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Speculator:
    """How an architecture is written in the speculators format.

    Attributes:
        model_type: Its `speculators_model_type`.
        name: Its name under `architectures`.
        from_anchor: Whether the anchor's slot guesses too, as it does in DSpark.
        rows: Names of its own tensors that have a row for each token of the draft vocabulary.
    """

    model_type: str
    name: str
    from_anchor: bool = False
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class LlamaCpp:
    """How llama.cpp has an architecture, beside what all of them have.

    Attributes:
        speculator: Its `--spec-type`.
        names: Names of its own tensors, by ours; of layers without `blk.N.` and `layers.N.`.
        written: Its own values, by keys without the architecture. Raises UsageError for what llama.cpp cannot run.
        read: The fields of its own of a configuration, from such values and the shapes of all tensors; None where the
            file is of another kind. Raises UsageError for the unsupported.
    """

    speculator: str
    names: Mapping[str, str] = field(default_factory=dict)
    written: Callable[[Any], dict[str, Any]] = lambda config: {}
    read: Callable[[Mapping[str, Any], Shapes], dict[str, Any] | None] = lambda values, shapes: {}


@dataclass(frozen=True)
class Architecture:
    """What is an architecture's own in config.json and among the tensors.

    Attributes:
        names: Its spellings under `architectures`; the first one is written.
        config: Its configuration. The fields are keys of config.json, at the top level or in `dflash_config`.
        shapes: Name and shape of every tensor of a checkpoint.
        nested: Fields that are written in `dflash_config` and nowhere else.
        adapted: From tensors as other writers name and shape them to ours.
        marks: What `dflash_config` says of such a model besides.
        inert: Values of further keys that go with this architecture, as in `zlab.INERT`.
        training: Keys of `dflash_config` that matter to training only.
        speculator: What it is in the speculators format; None where that has no word for it.
        llama_cpp: What it is in GGUF files; None where llama.cpp does not read it.
        vllm, sglang, tensorrt_llm: What these engines call it in z-lab's layout; None where they do not read it so.
    """

    names: tuple[str, ...]
    config: type[DraftConfig]
    shapes: Callable[[Any], Shapes]
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

    def guesses(self, config: DraftConfig) -> int:
        """Most guesses of a block."""
        return config.block_size - (self.speculator is None or not self.speculator.from_anchor)

    def own_keys(self) -> set[str]:
        """Keys of config.json that DFlash v1 does not have."""
        return {field.name for field in fields(self.config)} - {field.name for field in fields(DraftConfig)}


def by_name() -> dict[str, Architecture]:
    """Every architecture, by each of its spellings under `architectures`."""
    found = [module.ARCHITECTURE for module in parts("layout").values() if hasattr(module, "ARCHITECTURE")]
    return {name: architecture for architecture in found for name in architecture.names}


def find_architecture(config: object) -> Architecture | None:
    """The architecture that a configuration belongs to; None where these layouts do not hold it."""
    return next((one for one in by_name().values() if one.config is type(config)), None)


def architecture_of(config: object) -> Architecture:
    """The architecture that a configuration belongs to. Raises ValueError where it is none of these."""
    if (found := find_architecture(config)) is not None:
        return found
    raise UsageError(
        f"{type(config).__name__} is a configuration for which z-lab's layout and the speculators format have no "
        "words; write the drafter in a layout of its own."
    )


def tensor_shapes(config: object) -> Shapes:
    """Name and shape of every tensor of a checkpoint with this configuration."""
    return architecture_of(config).shapes(config)
