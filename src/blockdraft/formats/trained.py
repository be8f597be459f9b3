"""Training information in a drafter's file, under keys that other engines ignore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEYS = {"target": "target_fingerprint", "qat_bits": "qat_bits"}  # of config.json; those of GGUF have a prefix


@dataclass(frozen=True)
class Trained:
    """How a drafter was trained; None is unknown.

    Attributes:
        target: `Target.source_fingerprint` of the target.
        qat_bits: 4 or 8, bits of quantization-aware training, as in `Recipe`. Such a drafter loses little when it is
            quantized, and on CPUs is quantized to these bits with any target whose drafters are quantized.
    """

    target: str | None = None
    qat_bits: int | None = None

    @classmethod
    def read(cls, raw: Any, prefix: str = "") -> Trained:
        """Read a parsed config.json of any layout, or the metadata of a GGUF file, whose keys have a prefix."""
        if not isinstance(raw, Mapping):
            return cls()
        target, bits = (raw.get(prefix + key) for key in KEYS.values())
        known = isinstance(bits, int) and bits in (4, 8)
        return cls(target if isinstance(target, str) else None, bits if known else None)

    def values(self, prefix: str = "") -> dict[str, Any]:
        """Return the known values by their keys."""
        values = {prefix + key: getattr(self, name) for name, key in KEYS.items()}
        return {key: value for key, value in values.items() if value is not None}


UNKNOWN = Trained()
