"""Manifests and files of folders with data or hidden states; each file appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError


def fingerprint(value: Any) -> str:
    """Return the fingerprint, 16 hexadecimal digits, of a value that can be written as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


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


def write_file(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that it appears whole or not at all.

    Raises UsageError if it cannot be written, for instance because the disk is full.
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
    """Raise UsageError unless a folder is empty or absent. Remains of a killed `write_file` do not count."""
    if folder.exists() and (not folder.is_dir() or any(path.suffix != ".tmp" for path in folder.iterdir())):
        raise UsageError(f"{folder} holds other files; choose another folder for --out.")


def check_writable(folder: Path) -> None:
    """Raise UsageError unless a folder can be written to or made. Nothing is made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "may not be written to" if existing.is_dir() else "is no folder"
        raise UsageError(f"{folder} cannot be written to, since {existing} {why}; choose another --out.")


def check_overwrite(folder: Path, names: Iterable[str], overwrite: bool) -> None:
    """Raise UsageError unless these files can be written to a folder, or replaced with `overwrite`. Nothing is made."""
    check_writable(folder)
    for name in names:
        if (folder / name).exists() and not overwrite:
            raise UsageError(f"{folder / name} exists; choose another folder, or add --overwrite.")


def make_folder(folder: Path) -> None:
    """Make a folder, or clear an existing one of the remains of killed calls of `write_file`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(".*.tmp"):
            path.unlink()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}); choose another --out.") from error
