from dataclasses import dataclass

import pytest

from blockdraft.cli.options import extent, option


@dataclass
class Explained:
    """Something.

    Attributes:
        size: Of a thing,
            over two lines; None is none of these.
        other: Another.
    """

    size: int | None = None
    other: int = 0


def test_options_are_explained_as_in_the_docstring() -> None:
    assert option(Explained, "size").help == "Of a thing, over two lines; the default is none of these."
    assert option(Explained, "other", metavar="N").help == "Another."


def test_extents() -> None:
    assert [extent("size", text) for text in (None, "auto", "7", "-1")] == [None, "auto", 7, -1]
    with pytest.raises(ValueError, match="size is 'Auto'; it must be a whole number or auto"):
        extent("size", "Auto")
