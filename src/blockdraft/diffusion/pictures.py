"""A picture of the denoising passes over a text, with one line or more per pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from blockdraft.diffusion.sampler import DenoisingStep
from blockdraft.errors import UsageError

UNKNOWN = "░"  # shown for an unknown token
NEW_LINE = "↵"  # shown for a line break, since each pass has a line of its own
COLUMNS, SIZE, MARGIN = 80, 15, 12  # characters per line, font size and margin in pixels
COLOURS = {"given": "#666666", "known": "#000000", "new": "#0a7d28", "unknown": "#b8b8b8"}


class Span(NamedTuple):
    """Text of a token; `kind` is a key of `COLOURS`."""

    text: str
    kind: str


def frames(
    inputs: Sequence[int | None], steps: Sequence[DenoisingStep], decode: Callable[[int], str]
) -> Iterator[list[Span]]:
    """Yield the text after each pass.

    Args:
        inputs: Tokens before the first pass: a prompt, or a text with gaps (None), which does not grow.
        steps: Passes that unmasked tokens.
        decode: Returns the text of a token.
    """
    tokens, limit = list(inputs), len(inputs) if None in inputs else None
    for step in steps:
        tokens[step.begin : step.begin + len(step.block)] = step.block
        new = {step.begin + position for position in step.unmasked}
        spans = []
        for position, token in enumerate(tokens[:limit]):
            is_given = position < len(inputs) and inputs[position] is not None
            kind = "unknown" if token is None else "new" if position in new else "given" if is_given else "known"
            spans.append(Span(UNKNOWN if token is None else decode(token), kind))
        yield spans


def lines_of_blocks(
    inputs: Sequence[int | None], steps: Sequence[DenoisingStep], decode: Callable[[int], str]
) -> list[Span]:
    """Return one line per pass: its number and its block. Line breaks within a block are shown as `NEW_LINE`."""
    spans: list[Span] = []
    for number, (step, frame) in enumerate(zip(steps, frames(inputs, steps, decode), strict=True), 1):
        block = frame[step.begin :][: len(step.block)]
        spans.append(Span(f"{number:4}  ", "given"))
        spans += [span._replace(text=span.text.replace("\n", NEW_LINE)) for span in block]
        spans.append(Span("\n", "given"))
    return spans


def check_picture(path: Path) -> None:
    """Raise a UsageError if no picture can be written to this file."""
    if path.suffix.lower() != ".png":
        raise UsageError(f"The picture of the passes must be a .png file, got {path}.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"The folder {path.absolute().parent} for {path.name} does not exist; create it first.")
    _module("PIL.Image")
    _module("matplotlib.font_manager")


def draw_steps(
    path: Path, inputs: Sequence[int | None], steps: Sequence[DenoisingStep], decode: Callable[[int], str]
) -> None:
    """Draw the block of each pass, one below the other, and replace the file if it exists.

    See `frames` for the arguments.

    Raises:
        UsageError: The name does not end in .png, a package is missing, or the file cannot be written.
    """
    check_picture(path)
    lines = wrapped(lines_of_blocks(inputs, steps, decode))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _image(lines).save(partial, "PNG")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({error}); choose another file.") from error


def wrapped(spans: Sequence[Span]) -> list[list[tuple[str, str]]]:
    """Return lines of at most `COLUMNS` characters, each character with its kind."""
    lines: list[list[tuple[str, str]]] = [[]]
    for span in spans:
        for letter in span.text:
            if letter == "\n" or len(lines[-1]) == COLUMNS:
                lines.append([])
            if letter != "\n":
                lines[-1].append((letter if letter.isprintable() else " ", span.kind))
    return lines


def _image(lines: Sequence[Sequence[tuple[str, str]]]) -> Any:
    fonts = _module("matplotlib.font_manager")
    font = _module("PIL.ImageFont").truetype(fonts.findfont("DejaVu Sans Mono"), SIZE)
    width, height = font.getlength("M"), SIZE * 4 // 3
    size = (round(max(map(len, lines)) * width) + 2 * MARGIN, len(lines) * height + 2 * MARGIN)
    image = _module("PIL.Image").new("RGB", size, "#ffffff")
    pen = _module("PIL.ImageDraw").Draw(image)
    for row, line in enumerate(lines):
        for column, (letter, kind) in enumerate(line):
            pen.text((MARGIN + column * width, MARGIN + row * height), letter, fill=COLOURS[kind], font=font)
    return image


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"Pictures need {error.name}; run pip install 'blockdraft[bench]'.") from error
