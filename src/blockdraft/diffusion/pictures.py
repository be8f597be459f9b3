"""Pictures of the passes over a text: an animated GIF, or a PNG with one line or more for each pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from blockdraft.diffusion.sampler import Step
from blockdraft.errors import UsageError

UNKNOWN = "░"  # in place of an unknown token
NEW_LINE = "↵"  # in a PNG, where each pass has a line of its own
COLUMNS, SIZE, MARGIN = 80, 15, 12  # characters of a line at most; pixels; pixels
MILLISECONDS, LAST = 250, 2000  # duration of a frame, and of the last one
COLOURS = {"given": "#666666", "known": "#000000", "new": "#0a7d28", "unknown": "#b8b8b8"}


class Piece(NamedTuple):
    """Text of a token; `kind` is a key of `COLOURS`."""

    text: str
    kind: str


def frames(given: Sequence[int | None], steps: Sequence[Step], decode: Callable[[int], str]) -> Iterator[list[Piece]]:
    """Text after each pass.

    Args:
        given: Tokens before the first pass: a prompt, or a text with gaps (None), which does not grow.
        steps: Passes that settled tokens.
        decode: Text of a token.
    """
    tokens, limit = list(given), len(given) if None in given else None
    for step in steps:
        end = step.begin + len(step.block)
        tokens[step.begin : end] = step.block
        new = {step.begin + place for place in step.settled}
        found = []
        for place, token in enumerate(tokens[:limit]):
            is_given = place < len(given) and given[place] is not None
            kind = "unknown" if token is None else "new" if place in new else "given" if is_given else "known"
            found.append(Piece(UNKNOWN if token is None else decode(token), kind))
        yield found


def check_picture(path: Path) -> None:
    """Raise a UsageError if no picture can be written to this file."""
    if path.suffix.lower() not in (".gif", ".png"):
        raise UsageError(f"The passes can be drawn as .gif or .png, and {path} is neither; name the file so.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {path.absolute().parent} for {path.name}; make it first.")
    _module("PIL.Image")
    _module("matplotlib.font_manager")


def draw_steps(path: Path, given: Sequence[int | None], steps: Sequence[Step], decode: Callable[[int], str]) -> None:
    """Draw the passes over a text: a GIF shows the whole text after each of them, a PNG the block of each, one below
    the other. An existing file is replaced. Arguments are those of `frames`.

    Raises:
        UsageError: The name ends neither with .gif nor with .png, a package is missing, or the file cannot be written.
    """
    check_picture(path)
    whole, moves = list(frames(given, steps, decode)), path.suffix.lower() == ".gif"
    if not moves:  # a block each, after the number of the pass
        parts = [_in_a_line(text[step.begin :][: len(step.block)]) for step, text in zip(steps, whole, strict=True)]
        lines = [[Piece(f"{number:4}  ", "given"), *part, Piece("\n", "given")] for number, part in enumerate(parts, 1)]
        whole = [[piece for line in lines for piece in line]]
    whole = whole or [[]]
    shapes = [(len(lines), max(map(len, lines))) for lines in map(_lines, whole)]
    rows, columns = (max(each) for each in zip(*shapes, strict=True))
    images = (_image(text, rows, columns) for text in whole)  # one at a time, since there may be thousands
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if moves:
            times = [MILLISECONDS] * (len(whole) - 1) + [LAST]
            next(images).save(partial, "GIF", save_all=True, append_images=images, duration=times, loop=0)
        else:
            next(images).save(partial, "PNG")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({error}); choose another file.") from error


def _in_a_line(text: Sequence[Piece]) -> list[Piece]:
    return [piece._replace(text=piece.text.replace("\n", NEW_LINE)) for piece in text]


def _lines(text: Sequence[Piece]) -> list[list[tuple[str, str]]]:
    """Characters with their kinds, in lines of at most `COLUMNS`."""
    lines: list[list[tuple[str, str]]] = [[]]
    for piece in text:
        for letter in piece.text:
            if letter == "\n" or len(lines[-1]) == COLUMNS:
                lines.append([])
            if letter != "\n":
                lines[-1].append((letter if letter.isprintable() else " ", piece.kind))
    return lines


def _image(text: Sequence[Piece], rows: int, columns: int) -> Any:
    names = _module("matplotlib.font_manager")
    font = _module("PIL.ImageFont").truetype(names.findfont("DejaVu Sans Mono"), SIZE)
    width, height = font.getlength("M"), SIZE * 4 // 3
    size = (round(columns * width) + 2 * MARGIN, rows * height + 2 * MARGIN)
    image = _module("PIL.Image").new("RGB", size, "#ffffff")
    pen = _module("PIL.ImageDraw").Draw(image)
    for row, line in enumerate(_lines(text)):
        for column, (letter, kind) in enumerate(line):
            pen.text((MARGIN + column * width, MARGIN + row * height), letter, fill=COLOURS[kind], font=font)
    return image


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"Pictures take {error.name}; run pip install 'blockdraft[bench]'.") from error
