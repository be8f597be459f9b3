"""The answers as they are kept in `answers/`: the lines of `write_chats.py`, a thousand a file, compressed.

archive.py pack build/smollm2/answers.jsonl      # a whole file stays as it is
archive.py unpack build/smollm2/answers.jsonl    # from where `write_chats.py` goes on
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path

LINES = 1000
ANSWERS = Path(__file__).parent / "answers"


def pack(answers: Path, folder: Path = ANSWERS) -> int:
    """Compress a file of lines into a folder. Returns the number of lines."""
    lines = answers.read_bytes().splitlines(keepends=True)
    while lines and not lines[-1].endswith(b"\n"):  # it is being written
        lines.pop()
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(0, len(lines), LINES):
        part = b"".join(lines[number : number + LINES])
        file = folder / f"part-{number // LINES:03}.jsonl.xz"
        if not file.exists() or lzma.decompress(file.read_bytes()) != part:
            written = file.with_suffix(".part")
            written.write_bytes(lzma.compress(part, preset=9 | lzma.PRESET_EXTREME))
            written.replace(file)
    return len(lines)


def unpack(answers: Path, folder: Path = ANSWERS) -> int:
    """Write the lines of a folder into a file that does not exist yet. Returns the number of lines.

    Raises:
        FileExistsError: The file exists.
        FileNotFoundError: The folder holds no answers.
    """
    files = sorted(folder.glob("part-*.jsonl.xz"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no part-*.jsonl.xz; check out the project with its recipes.")
    if answers.exists():
        raise FileExistsError(f"{answers} exists and may hold more than {folder}; delete it or name another file.")
    answers.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(lzma.decompress(file.read_bytes()) for file in files)
    written = answers.with_suffix(".part")
    written.write_bytes(text)
    written.replace(answers)
    return text.count(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("pack", "unpack"))
    parser.add_argument("answers", type=Path)
    parser.add_argument("--folder", type=Path, default=ANSWERS)
    args = parser.parse_args()
    count = (pack if args.do == "pack" else unpack)(args.answers, args.folder)
    print(f"{count} lines {'in' if args.do == 'pack' else 'from'} {args.folder}")


if __name__ == "__main__":
    main()
