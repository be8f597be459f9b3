"""Manifests of folders with data or hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError


def read_manifest(path: Path, version: int) -> dict[str, Any] | None:
    """Read a manifest, or return None if there is no such file.

    Raises UsageError if the file is broken or of another format version.
    """
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        number = manifest["format"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); copy it again, or make the folder anew.") from error
    if number != version:
        raise UsageError(f"{path} is of format {number} and this version reads {version}; make the folder anew.")
    return manifest
