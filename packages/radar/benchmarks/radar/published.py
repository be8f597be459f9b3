"""Schema of `published.toml`: speeds that others published."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockdraft_radar.devices import DeviceClass, find

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

FILE = Path(__file__).with_name("published.toml")

Positive = Annotated[float, Field(gt=0)]
What = Literal["plain", "drafted", "speedup"]


class Measured(BaseModel):
    """Speeds of one device and model; the head of `published.toml` says what each key means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    model: str
    weights: str
    context: Annotated[int, Field(ge=1)]
    batch: Annotated[int, Field(ge=1)]
    task: str
    method: str
    engine: str
    block_size: Annotated[int, Field(ge=2)] | None = None
    tau: Annotated[float, Field(ge=1)] | None = None
    plain: Positive | None = None
    drafted: Positive | None = None
    speedup: Positive | None = None
    source: Annotated[str, Field(pattern=r"^https://\S+$")]

    @model_validator(mode="after")
    def _holds_together(self) -> Measured:
        if (self.method == "plain") != (self.drafted is None and self.speedup is None):
            raise ValueError(f"{self.method} does not go with what was measured")
        if self.method == "plain" and self.plain is None:
            raise ValueError("nothing was measured")
        if self.drafted is not None and self.speedup is not None:
            raise ValueError("speedup is told by plain and drafted already")
        if self.tau is not None and (self.block_size is None or self.tau > self.block_size):
            raise ValueError(f"tau {self.tau} is more than a block holds")
        return self

    @property
    def kind(self) -> DeviceClass:
        """Class of its device."""
        return find(self.device).kind

    @property
    def fitted(self) -> bool:
        """Whether it belongs to the half that constants are fitted on: all of a source and model, or nothing of it."""
        digest = hashlib.sha256(f"{self.source} {self.device} {self.model}".encode()).digest()
        return digest[0] % 2 == 0

    def figures(self) -> Iterator[Figure]:
        """Return the figures that it measured."""
        for what in ("plain", "drafted", "speedup"):
            value = getattr(self, what)
            if value is not None:
                yield Figure(self, what, value)


class Figure(NamedTuple):
    """One published figure.

    Attributes:
        what: Tokens per second, plain or drafted, or the ratio of the two.
    """

    measured: Measured
    what: What
    value: float


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    measured: tuple[Measured, ...]


def read_published(text: str) -> tuple[Measured, ...]:
    """Read the measurements of a table in TOML.

    Raises:
        ValueError: It is no TOML, or does not follow the schema.
    """
    return _Table.model_validate_json(json.dumps(tomllib.loads(text))).measured


def published() -> tuple[Measured, ...]:
    """Return all measurements of the table."""
    return read_published(FILE.read_text(encoding="utf-8"))
