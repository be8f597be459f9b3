"""The page: one file that loads no others, and computes what `project.py` does by `projection.js`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.radar.devices import devices
from blockdraft.radar.project import data_of_page, machine_of
from blockdraft.radar.shape import known_shapes

NAME = "index.html"


@cache
def page() -> str:
    """The whole page, with the models and devices of the tables."""
    folder = files(__name__)
    data = data_of_page(known_shapes(), [machine_of(device) for device in devices()])
    text = folder.joinpath(NAME).read_text(encoding="utf-8")
    text = text.replace("/*PROJECTION*/", folder.joinpath("projection.js").read_text(encoding="utf-8"))
    return text.replace("/*DATA*/", data.replace("</", "<\\/"))


def export_page(folder: Path) -> Path:
    """Write the page to a folder, for any web server.

    Returns:
        The file.

    Raises:
        UsageError: The folder cannot be written to.
    """
    file = folder / NAME
    partial = folder / f".{NAME}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(page(), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}); name another folder.") from error
    return file
