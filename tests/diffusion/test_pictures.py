"""Pictures of the denoising passes."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from blockdraft.diffusion.pictures import COLOURS, NEW_LINE, UNKNOWN, Span, draw_steps, frames, lines_of_blocks, wrapped
from blockdraft.diffusion.sampler import DenoisingStep
from blockdraft.errors import UsageError

STEPS = [
    DenoisingStep(2, (7, None, 9), (2,)),
    DenoisingStep(2, (7, 8, 9), (1,)),
    DenoisingStep(5, (None, 4, None), (1,)),
]


def decode(token: int) -> str:
    return chr(96 + token)


def test_frames_of_a_completion() -> None:
    first, second, third = frames([1, 2, 7], STEPS, decode)
    texts = ["".join(span.text for span in frame) for frame in (first, second, third)]
    assert texts == [f"abg{UNKNOWN}i", "abghi", f"abghi{UNKNOWN}d{UNKNOWN}"]
    assert [span.kind for span in first] == ["given", "given", "given", "unknown", "new"]
    assert [span.kind for span in second] == ["given", "given", "given", "new", "known"]


def test_text_with_gaps_keeps_its_length() -> None:
    first, *others = frames([1, 2, 7, None, 9, None], STEPS, decode)
    assert [len(frame) for frame in (first, *others)] == [6, 6, 6]
    assert [span.kind for span in first] == ["given", "given", "given", "unknown", "new", "unknown"]


def test_line_break_in_a_block_is_a_symbol() -> None:
    def decode_break(token: int) -> str:
        return "\n" if token == 9 else "a"

    lines = "".join(span.text for span in lines_of_blocks([1, 2, 7], STEPS, decode_break)).splitlines()
    assert lines == [f"   1  a{UNKNOWN}{NEW_LINE}", f"   2  aa{NEW_LINE}", f"   3  {UNKNOWN}a{UNKNOWN}"]


def test_long_lines_are_wrapped() -> None:
    assert [len(line) for line in wrapped([Span("a" * 100 + "\nb", "known")])] == [80, 20, 1]


def test_draw_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.PNG"
    path.write_bytes(b"old content")
    draw_steps(path, [1, 2, 7], STEPS, decode)
    assert [file.name for file in tmp_path.iterdir()] == ["steps.PNG"]
    with Image.open(path) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(100_000)}
    greens = [colour for colour in colours if colour[1] > colour[0] + 60]
    assert greens and len(colours) > len(COLOURS)  # new tokens are green
    draw_steps(path, [1, 2, 7], [], decode)
    assert path.stat().st_size > 50


def test_picture_is_as_wide_as_its_longest_line(tmp_path: Path) -> None:
    widths = []
    for name, text in (("short.png", "a"), ("long.png", "a" * 20), ("longer.png", "a" * 40), ("longest.png", "a" * 90)):
        draw_steps(tmp_path / name, [1, 2, 7], STEPS, lambda token, text=text: text)  # type: ignore[misc]
        with Image.open(tmp_path / name) as image:
            widths.append(image.width)
    assert widths[0] < widths[1] < widths[2] == widths[3]  # 80 characters at most


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"must be a .png file, got .*steps.pdf"):
        draw_steps(tmp_path / "steps.pdf", [1], STEPS, decode)
    with pytest.raises(UsageError, match="The folder .*nowhere for steps.png does not exist"):
        draw_steps(tmp_path / "nowhere/steps.png", [1], STEPS, decode)
    (tmp_path / "steps.png").mkdir()
    with pytest.raises(UsageError, match="steps.png cannot be written"):
        draw_steps(tmp_path / "steps.png", [1, 2], STEPS, decode)
    assert [file.name for file in tmp_path.iterdir()] == ["steps.png"]
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match=r"Pictures need PIL.Image; run pip install 'blockdraft\[bench\]'"):
        draw_steps(tmp_path / "other.png", [1], STEPS, decode)
