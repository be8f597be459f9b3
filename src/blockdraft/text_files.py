"""Text files that people edit and copy: UTF-8 with or without a byte order mark, and pointers of Git LFS."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blockdraft.errors import UsageError

POINTER = b"version https://git-lfs.github.com/spec/"  # how a file that `git lfs` has not downloaded begins
MAX_POINTER = 1024  # bytes
MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which editors of Windows write
POINTED = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.model", "*.json", "*.jsonl", "*.parquet", "*.txt", "*.jinja")
MARKED = ("*.json", "*.jinja", "*.txt")


def read_text(file: Path) -> str:
    """Return the text of a file without a byte order mark.

    Raises:
        UsageError: The file is a pointer of Git LFS.
        OSError, UnicodeDecodeError: It cannot be read, or is not UTF-8.
    """
    refuse_pointer(file)
    return file.read_text(encoding="utf-8-sig")


def read_json(file: Path) -> Any:
    """Return the JSON value in a file. Raises what `read_text` and `json.loads` raise."""
    return json.loads(read_text(file))


def refuse_pointer(path: str | Path) -> None:
    """Raise a UsageError if a file, or a file right inside a folder, is a pointer of Git LFS instead of its content."""
    path = Path(path)
    files = [file for pattern in POINTED for file in sorted(path.glob(pattern))] if path.is_dir() else [path]
    pointers = [file for file in files if _is_pointer(file)]
    if pointers:
        more = f", and {len(pointers) - 1} more are," if len(pointers) > 1 else ""
        raise UsageError(
            f"{pointers[0]} is a pointer of Git LFS{more} instead of the content; run `git lfs pull` in its repository."
        )


def _is_pointer(file: Path) -> bool:
    try:
        if not file.is_file() or file.stat().st_size > MAX_POINTER:
            return False
        with file.open("rb") as opened:
            return opened.read(len(POINTER)) == POINTER
    except OSError:
        return False


@contextmanager
def without_marks(folder: str | Path) -> Iterator[str | Path]:
    """Yield a folder whose texts have no byte order mark, for readers that refuse it: the folder itself, or a copy.

    The copy links to all files without a mark. A name of the hub is yielded as it is.
    """
    given, folder = folder, Path(folder)
    marked = [file for pattern in MARKED for file in folder.glob(pattern) if _begins_with_mark(file)]
    if not marked:
        yield given
        return
    with TemporaryDirectory() as clean:
        for file in folder.iterdir():
            if file in marked:
                Path(clean, file.name).write_bytes(file.read_bytes().removeprefix(MARK))
            else:
                _link(file.resolve(), Path(clean, file.name))
        yield clean


def _begins_with_mark(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(MARK)) == MARK
    except OSError:
        return False


def _link(file: Path, place: Path) -> None:
    try:
        place.symlink_to(file)
    except OSError:  # Windows allows links to some users only
        (shutil.copytree if file.is_dir() else shutil.copy)(file, place)
