"""The folder of a benchmark: results.json and the pictures."""

from __future__ import annotations

import os
from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.evaluation.pictures import PICTURES
from blockdraft.evaluation.results import Results

RESULTS = "results.json"


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse, before anything is measured, a folder that results could not or must not be written to.

    Raises:
        ValueError: It holds results already and `overwrite` is False, it is no folder, or it is not writable.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(f"{folder} cannot be written to, since {existing} is no writable folder; choose another one.")
    if (folder / RESULTS).exists() and not overwrite:
        raise UsageError(f"{folder / RESULTS} exists; choose another folder, or add --overwrite.")


def write(folder: Path, found: Results, with_pictures: bool) -> None:
    """Write results.json, and the pictures if wanted, into a folder, which is made if need be.

    Each file is complete or absent, whatever happens. Pictures of earlier results go.

    Raises:
        ValueError: The disk is full, or the like.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in PICTURES:
            (folder / name).unlink(missing_ok=True)
        _write(folder / RESULTS, found.as_json().encode())
        if with_pictures:
            for name, draw in PICTURES.items():
                picture = draw(found)
                if picture is not None:
                    _write(folder / name, picture)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}).") from error


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
