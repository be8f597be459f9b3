"""Shards of responses: append to them, read them, and keep them compressed beside this script.

shards.py pack build/qwen2.5-coder/responses       # a full shard is compressed once and never changes
shards.py unpack build/qwen2.5-coder/responses     # from where responses.py resumes
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHARD_LINES = 1000
PACKED = Path(__file__).parent / "responses"


class Shards:
    """The shards that one process appends to.

    Args:
        folder: Folder of all shards; those of other processes are only read.
        name: Beginning of this process's file names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self._number, self._lines = 0, 0
        for file in sorted(folder.glob(f"{name}-*.jsonl")):
            self._number = int(file.stem.rpartition("-")[2])
            self._lines = len(whole_lines(file))
            os.truncate(file, sum(map(len, whole_lines(file))))

    def append(self, line: dict[str, Any]) -> None:
        """Write a line. One that a kill cuts off is removed at the next start."""
        if self._lines >= SHARD_LINES:
            self._number, self._lines = self._number + 1, 0
        with (self._folder / f"{self._name}-{self._number:03}.jsonl").open("ab") as file:
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._lines += 1


def whole_lines(file: Path) -> list[bytes]:
    """Return the lines of a shard, without a last one that was cut off."""
    lines = file.read_bytes().split(b"\n")[:-1]
    return [line + b"\n" for line in lines]


def read_shards(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of all shards of a folder."""
    for file in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, whole_lines(file))


def pack(folder: Path, packed: Path = PACKED) -> int:
    """Compress the shards of a folder. Return the number of lines."""
    packed.mkdir(parents=True, exist_ok=True)
    count = 0
    for shard in sorted(folder.glob("*.jsonl")):
        lines = whole_lines(shard)
        count += len(lines)
        file = packed / f"{shard.name}.xz"
        if not file.exists() or lzma.decompress(file.read_bytes()) != b"".join(lines):
            unfinished = file.with_suffix(".part")
            unfinished.write_bytes(lzma.compress(b"".join(lines), preset=9 | lzma.PRESET_EXTREME))
            unfinished.replace(file)
    return count


def unpack(folder: Path, packed: Path = PACKED) -> int:
    """Decompress shards into a folder. Return the number of lines.

    Raises:
        FileExistsError: The folder has shards, which may hold more lines.
    """
    if any(folder.glob("*.jsonl")):
        raise FileExistsError(f"{folder} has shards already; name another folder, or delete them.")
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for file in sorted(packed.glob("*.jsonl.xz")):
        content = lzma.decompress(file.read_bytes())
        (folder / file.stem).write_bytes(content)
        count += content.count(b"\n")
    return count


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("responses", type=Path)
    parser.add_argument("--packed", type=Path, default=PACKED)
    args = parser.parse_args(words)
    count = (pack if args.action == "pack" else unpack)(args.responses, args.packed)
    print(f"{count} lines {'to' if args.action == 'pack' else 'from'} {args.packed}")


if __name__ == "__main__":
    main()
