from dataclasses import dataclass

import pytest
import typer

from blockdraft.cli import app
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


def test_whoever_loads_a_target_can_choose_the_backend() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {name: {parameter.name for parameter in command.params} for name, command in commands.items()}
    assert sum("target" in found for found in names.values()) >= 7
    odd = [name for name, found in names.items() if ("target" in found) != ("backend" in found)]
    assert odd == ["quantize"]  # which reads checkpoints, and decodes on the native backend alone
    exact = [name for name, found in names.items() if "exact" in found]
    assert exact == ["generate", "chat", "serve", "bench", "calibrate"]
