"""What a drafter's file says of its training, under keys that other engines ignore."""

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
        qat_bits: 4 or 8, bits to which its weights were rounded in training, as in `Recipe`. It then guesses about as
            well with weights of so few bits, and on CPUs is rounded to them beside any target whose drafters are.
    """

    target: str | None = None
    qat_bits: int | None = None

    @classmethod
    def read(cls, raw: Any, prefix: str = "") -> Trained:
        """Read a parsed config.json of any layout, or the metadata of a GGUF file. Other values are unknown.

        Args:
            prefix: What the keys begin with.
        """
        if not isinstance(raw, Mapping):
            return cls()
        target, bits = (raw.get(prefix + key) for key in KEYS.values())
        known = isinstance(bits, int) and bits in (4, 8)
        return cls(target if isinstance(target, str) else None, bits if known else None)

    def values(self, prefix: str = "") -> dict[str, Any]:
        """What is known, by its keys."""
        found = {prefix + key: getattr(self, name) for name, key in KEYS.items()}
        return {key: value for key, value in found.items() if value is not None}


UNKNOWN = Trained()
