"""Paths of the catalogue's models on this machine, and of the pairs that come with the package."""

from __future__ import annotations

from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.machine import MODELS, cache_folder
from blockdraft.models.catalogue import Model, catalogue, find, known

PAIRS = Path(__file__).parents[1] / "pair"  # a folder for each target with a bundled drafter
TINY = PAIRS / "tiny"  # whose target is bundled too
DEFAULT = "smollm2"  # default target once it is pulled; its drafter is bundled


def models_folder() -> Path:
    """Return the folder of pulled models, which may not exist yet."""
    return cache_folder() / MODELS


def file_place(model: Model) -> Path | None:
    """Return the path of a model's pulled GGUF file, or None if the package index has none."""
    name = _file_name(model)
    return None if name is None else models_folder() / name


def _file_name(model: Model) -> str | None:
    return model.file.name if model.file else None


def folder_place(model: Model) -> Path:
    """Return the path of a model's folder pulled from the hub."""
    return models_folder() / model.id


def pulled(model: Model) -> Path | None:
    """Return a model's file or else its folder on this machine, or None if it has not been pulled."""
    places = [file_place(model), folder_place(model)]
    return next((place for place in places if place is not None and place.exists()), None)


def model_of(path: str | Path | None) -> Model | None:
    """Return the model that a pulled file or folder holds, or a copy of the file elsewhere; None if it is unknown."""
    if path is None:
        return None
    path = Path(path)
    if path.absolute().parent == models_folder().absolute():
        return next((model for model in catalogue() if path.name in (model.id, _file_name(model))), None)
    files = {(model.file.name.lower(), model.file.bytes): model for model in catalogue() if model.file}
    return files.get((path.name.lower(), path.stat().st_size if path.is_file() else 0))


def bundled_drafter(model: Model) -> Path | None:
    """Return the GGUF file or folder of the bundled drafter for a model, or None if there is none."""
    folder = PAIRS / model.id / "drafter"
    file = folder / "drafter.gguf"
    if file.is_file():
        return file
    return folder if (folder / "config.json").is_file() else None


def default_target() -> Path:
    """Return the default target: a real model with a bundled drafter if it has been pulled, else the bundled one."""
    model = known(DEFAULT)
    place = None if bundled_drafter(model) is None else file_place(model)
    return place if place is not None and place.exists() else TINY / "target"


def located(path: str | Path) -> str | Path:
    """Return the path of a target given by its folder, GGUF file, hub name, or catalogue name.

    An existing path takes precedence over the catalogue. "bundled" is the bundled target.

    Raises:
        UsageError: The catalogue's model has not been pulled. It is never downloaded implicitly.
    """
    if str(path) == "bundled":
        return TINY / "target"
    model = find(str(path))
    if model is None or Path(path).exists():
        return path
    place = pulled(model)
    if place is None:
        raise UsageError(f"{model.name} is not on this machine; `blockdraft pull {model.id}` downloads it.")
    return place


def named_for_others(target: str) -> str:
    """Return the name of a target for other programs: the hub name of a catalogue model, anything else unchanged."""
    model = None if Path(target).exists() else find(target)
    return target if model is None else model.hub
