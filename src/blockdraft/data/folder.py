"""What folders of data and of features have in common: a manifest, and files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError


def fingerprint(value: Any) -> str:
    """16 hexadecimal digits for a value that JSON can spell."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_manifest(path: Path, version: int) -> dict[str, Any] | None:
    """What a manifest holds; None where there is none. Raises ValueError for what is broken or of another version."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = manifest["format"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); copy it again, or make the folder anew.") from error
    if found != version:
        raise UsageError(f"{path} is of format {found} and this version reads {version}; make the folder anew.")
    return manifest


def write_file(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it; whole or not at all.

    Raises:
        ValueError: The disk is full, or the like.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); what was finished before it stays.") from error
    finally:
        partial.unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Raises ValueError where a folder holds files; what a killed `write_file` left behind does not count."""
    if folder.exists() and (not folder.is_dir() or any(path.suffix != ".tmp" for path in folder.iterdir())):
        raise UsageError(f"{folder} holds other files; choose another folder for --out.")


def check_writable(folder: Path) -> None:
    """Raises ValueError where a folder cannot be written to or made; makes nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is no folder"
        raise UsageError(f"{folder} cannot be written to, since {there} {why}; choose another --out.")


def make_folder(folder: Path) -> None:
    """Make a folder, or clear it of what killed calls of `write_file` left behind. Raises ValueError if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(".*.tmp"):
            path.unlink()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}).") from error
