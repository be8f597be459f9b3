"""Source files that requests are made from."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness.command import ROOT


def source_texts(files: Path | None) -> list[str]:
    """Return the texts of source files.

    Args:
        files: JSON lines with a file each, as {"text": ...}; None takes the Python files of this repository.
    """
    if files is not None:
        return [json.loads(line)["text"] for line in files.read_text(encoding="utf-8").splitlines()]
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))]
