"""Models of the catalogue that are on this machine."""

from __future__ import annotations

from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.machine import MODELS, cache_folder
from blockdraft.models.catalogue import Model, find


def models_folder() -> Path:
    """The folder of pulled models, which need not exist yet."""
    return cache_folder() / MODELS


def file_place(model: Model) -> Path | None:
    """Where a model's GGUF file lies once it is pulled; None if the package index has none."""
    return models_folder() / model.file.name if model.file else None


def folder_place(model: Model) -> Path:
    """Where a model's folder lies once it is pulled from the hub."""
    return models_folder() / model.id


def pulled(model: Model) -> Path | None:
    """A model's file or folder on this machine, the file if there are both; None if it has not been pulled."""
    places = [file_place(model), folder_place(model)]
    return next((place for place in places if place is not None and place.exists()), None)


def located(path: str | Path) -> str | Path:
    """The place of a target that is given by its folder, GGUF file, hub name, or name in the catalogue.

    A folder or file of that name comes before the catalogue.

    Raises:
        UsageError: The catalogue's model has not been pulled yet. Nothing is downloaded without being asked for.
    """
    model = find(str(path))
    if model is None or Path(path).exists():
        return path
    place = pulled(model)
    if place is None:
        raise UsageError(f"{model.name} is not on this machine yet; `blockdraft pull {model.id}` gets it.")
    return place
