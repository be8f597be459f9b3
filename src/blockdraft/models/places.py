"""Paths of the models on this machine and of the pairs that come with the package."""

from __future__ import annotations

from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.machine import MODELS, cache_folder
from blockdraft.models.catalogue import Model, catalogue, find, known

PAIRS = Path(__file__).parents[1] / "pair"  # a folder for each target with a bundled drafter
TINY = PAIRS / "tiny"  # whose target is bundled too
DEFAULT = "smollm2"  # default target once it is pulled; its drafter is bundled


def models_folder() -> Path:
    """Return the folder of pulled models, which need not exist yet."""
    return cache_folder() / MODELS


def file_place(model: Model) -> Path | None:
    """Return where a model's GGUF file lies once it is pulled; None if the catalogue has no file."""
    name = _file_name(model)
    return None if name is None else models_folder() / name


def _file_name(model: Model) -> str | None:
    return model.file.name if model.file else None


def folder_place(model: Model) -> Path:
    """Return where a model's repository lies once it is pulled."""
    return models_folder() / model.id


def pulled(model: Model) -> Path | None:
    """Return a model's file on this machine, else its folder; None if neither has been pulled."""
    places = [file_place(model), folder_place(model)]
    return next((place for place in places if place is not None and place.exists()), None)


def model_of(path: str | Path | None) -> Model | None:
    """Return the model that a path holds: a pulled file or folder, or a copy of the file elsewhere; None if unknown."""
    if path is None:
        return None
    path = Path(path)
    if path.absolute().parent == models_folder().absolute():
        return next((model for model in catalogue() if path.name in (model.id, _file_name(model))), None)
    known_as = path.name.lower(), path.stat().st_size if path.is_file() else 0
    files = {(model.file.name.lower(), model.file.bytes): model for model in catalogue() if model.file}
    return files.get(known_as)


def bundled_drafter(model: Model) -> Path | None:
    """Return the GGUF file or folder of a model's bundled drafter; None if there is none."""
    folder = PAIRS / model.id / "drafter"
    file = folder / "drafter.gguf"
    if file.is_file():
        return file
    return folder if (folder / "config.json").is_file() else None


def default_target() -> Path:
    """Return the target to use where none is named: `DEFAULT` if it has been pulled, else the bundled one."""
    model = known(DEFAULT)
    place = None if bundled_drafter(model) is None else file_place(model)
    return place if place is not None and place.exists() else TINY / "target"


def located(path: str | Path) -> str | Path:
    """Return the path or hub name of a target that is given by path, hub name, or name in the catalogue.

    A folder or file of that name takes precedence. "bundled" is the bundled target.

    Raises:
        UsageError: The catalogue's model has not been pulled; nothing is downloaded unasked.
    """
    if str(path) == "bundled":
        return TINY / "target"
    model = find(str(path))
    if model is None or Path(path).exists():
        return path
    place = pulled(model)
    if place is None:
        raise UsageError(f"{model.name} is not on this machine yet; `blockdraft pull {model.id}` downloads it.")
    return place


def named_for_others(target: str) -> str:
    """Return a target's name for other programs: the hub name of a model of the catalogue, or the name as given."""
    model = None if Path(target).exists() else find(target)
    return target if model is None else model.hub
