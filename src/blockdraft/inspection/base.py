"""What is found out about a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from blockdraft.formats.starting import Start


@dataclass(frozen=True)
class Check:
    """Whether a drafter goes with a target, in one respect.

    Attributes:
        holds: None where it is not known.
        said: What was found, in words.
    """

    name: str
    holds: bool | None
    said: str


@dataclass(frozen=True)
class Report:
    """A checkpoint. All values but `config` are such that JSON can spell them; lengths are in tokens.

    Attributes:
        what: "drafter", "target", "adapter" or "block-diffusion model".
        layout: How it lies: a file of `formats`, "gguf", "transformers" or "peft".
        about: What it is, and how large.
        wants: The target that a drafter or an adapter is for.
        conventions: Of a drafter, everything that readers may take differently, as it was resolved.
        fits: Whether it goes with a given target; empty where none was given.
        starts: How each engine is started with it.
        config: Of a drafter's network, for `formats`.
    """

    path: str
    what: str
    layout: str
    about: Mapping[str, Any]
    wants: Mapping[str, Any] = field(default_factory=dict)
    conventions: Mapping[str, Any] = field(default_factory=dict)
    fits: tuple[Check, ...] = ()
    starts: Mapping[str, Start] = field(default_factory=dict)
    config: Any = None

    def as_dict(self) -> dict[str, Any]:
        """All but `config`."""
        return {name: value for name, value in asdict(self).items() if name != "config"}
