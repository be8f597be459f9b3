"""Pictures of the passes over a text."""

from pathlib import Path

import pytest
from PIL import Image

from blockdraft.diffusion import pictures
from blockdraft.diffusion.pictures import COLOURS, UNKNOWN, Piece, draw_steps, frames
from blockdraft.diffusion.sampler import Step
from blockdraft.errors import UsageError

STEPS = [Step(2, (7, None, 9), (2,)), Step(2, (7, 8, 9), (1,)), Step(5, (None, 4, None), (1,))]


def decode(token: int) -> str:
    return chr(96 + token)


def test_frames_of_an_answer() -> None:
    found = list(frames([1, 2, 7], STEPS, decode))
    assert ["".join(piece.text for piece in frame) for frame in found] == [
        f"abg{UNKNOWN}i",
        "abghi",
        f"abghi{UNKNOWN}d{UNKNOWN}",
    ]
    assert [piece.kind for piece in found[0]] == ["given", "given", "given", "unknown", "new"]
    assert [piece.kind for piece in found[1]] == ["given", "given", "given", "new", "known"]


def test_frames_of_a_text_with_a_gap() -> None:
    """A text with gaps keeps its length, whatever the last block holds."""
    found = list(frames([1, 2, 7, None, 9, None], STEPS, decode))
    assert [len(frame) for frame in found] == [6, 6, 6]
    assert found[0] == [Piece("a", "given"), Piece("b", "given"), Piece("g", "given"), Piece(UNKNOWN, "unknown"),
                        Piece("i", "new"), Piece(UNKNOWN, "unknown")]  # fmt: skip


@pytest.mark.parametrize("name", ["steps.gif", "steps.PNG"])
def test_drawn(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"what was there")
    draw_steps(path, [1, 2, 7], STEPS, decode)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with Image.open(path) as image:
        assert getattr(image, "n_frames", 1) == (3 if name.endswith("gif") else 1)
        colours = {colour for _, colour in image.convert("RGB").getcolors(100_000)}
    greens = [colour for colour in colours if colour[1] > colour[0] + 60]
    assert greens and len(colours) > len(COLOURS)  # new tokens show
    draw_steps(path, [1, 2, 7], [], decode)  # nothing was to be done
    assert path.stat().st_size > 50


def test_a_picture_is_as_wide_as_its_longest_line(tmp_path: Path) -> None:
    """Lines have at most 80 characters."""
    widths = []
    for name, text in (("short.gif", "a"), ("short.png", "a"), ("long.gif", "a" * 50)):
        draw_steps(tmp_path / name, [1, 2, 7], STEPS, lambda token, text=text: text)  # type: ignore[misc]
        with Image.open(tmp_path / name) as image:
            widths.append(image.width)
    assert widths[0] < widths[1] < widths[2] == round(80 * widths_of_a_letter()) + 2 * pictures.MARGIN


def widths_of_a_letter() -> float:
    from matplotlib import font_manager
    from PIL import ImageFont

    return float(ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), pictures.SIZE).getlength("M"))


def test_lines_are_broken() -> None:
    assert [len(line) for line in pictures._lines([Piece("a" * 100 + "\nb", "known")])] == [80, 20, 1]


def test_a_new_line_in_a_block_does_not_break_its_line_of_a_png(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(
        pictures, "_image", lambda text, rows, columns: drawn.append(text) or Image.new("RGB", (1, rows))
    )
    draw_steps(tmp_path / "steps.png", [1, 2, 7], STEPS, lambda token: "\n" if token == 9 else "a")
    [text] = drawn
    first = f"   1  a{UNKNOWN}{pictures.NEW_LINE}"
    lines = "".join(piece.text for piece in text).splitlines()
    assert lines == [first, f"   2  aa{pictures.NEW_LINE}", f"   3  {UNKNOWN}a{UNKNOWN}"]
    draw_steps(tmp_path / "steps.gif", [1, 2, 7], STEPS[:1], lambda token: "\n" if token == 9 else "a")
    assert drawn[-1][-1].text == "\n"  # the text as it reads


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"as .gif or .png, and .*steps.pdf is neither"):
        draw_steps(tmp_path / "steps.pdf", [1], STEPS, decode)
    with pytest.raises(UsageError, match="There is no folder .*nowhere for steps.gif"):
        draw_steps(tmp_path / "nowhere/steps.gif", [1], STEPS, decode)
    (tmp_path / "steps.gif").mkdir()
    with pytest.raises(UsageError, match="steps.gif cannot be written"):
        draw_steps(tmp_path / "steps.gif", [1, 2], STEPS, decode)
    assert [file.name for file in tmp_path.iterdir()] == ["steps.gif"]
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(UsageError, match=r"Pictures take PIL.Image; run pip install 'blockdraft\[bench\]'"):
        draw_steps(tmp_path / "other.gif", [1], STEPS, decode)
