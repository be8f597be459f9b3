"""Models of the catalogue that are on this machine, and the pairs that come with the package."""

from __future__ import annotations

from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.machine import MODELS, cache_folder
from blockdraft.models.catalogue import Model, catalogue, find, known

PAIRS = Path(__file__).parents[1] / "pair"  # a folder for each target with a bundled drafter
TINY = PAIRS / "tiny"  # a target so small that it is bundled too
DEFAULT = "smollm2"  # the target that is used by default once it is pulled, and its drafter is bundled


def models_folder() -> Path:
    """The folder of pulled models, which need not exist yet."""
    return cache_folder() / MODELS


def file_place(model: Model) -> Path | None:
    """Where a model's GGUF file lies once it is pulled; None if the package index has none."""
    name = _file_name(model)
    return None if name is None else models_folder() / name


def _file_name(model: Model) -> str | None:
    return model.file.name if model.file else None


def folder_place(model: Model) -> Path:
    """Where a model's folder lies once it is pulled from the hub."""
    return models_folder() / model.id


def pulled(model: Model) -> Path | None:
    """A model's file or folder on this machine, the file if there are both; None if it has not been pulled."""
    places = [file_place(model), folder_place(model)]
    return next((place for place in places if place is not None and place.exists()), None)


def model_of(path: str | Path | None) -> Model | None:
    """The model whose pulled file or folder a path is, or whose file was put elsewhere; None if it is none's."""
    if path is None:
        return None
    path = Path(path)
    if path.absolute().parent == models_folder().absolute():
        return next((model for model in catalogue() if path.name in (model.id, _file_name(model))), None)
    known_as = path.name.lower(), path.stat().st_size if path.is_file() else 0
    files = {(each.file.name.lower(), each.file.bytes): each for each in catalogue() if each.file}
    return files.get(known_as)


def bundled_drafter(model: Model) -> Path | None:
    """The GGUF file or folder of the drafter for a model that comes with the package; None if there is none."""
    folder = PAIRS / model.id / "drafter"
    file = folder / "drafter.gguf"
    if file.is_file():
        return file
    return folder if (folder / "config.json").is_file() else None


def default_target() -> Path:
    """The target that is used where none is named: a real model with its bundled drafter, if it has been pulled, else
    the bundled one."""
    model = known(DEFAULT)
    place = None if bundled_drafter(model) is None else file_place(model)
    return place if place is not None and place.exists() else TINY / "target"


def located(path: str | Path) -> str | Path:
    """The place of a target that is given by its folder, GGUF file, hub name, or name in the catalogue.

    A folder or file of that name comes before the catalogue. "bundled" is the bundled target.

    Raises:
        UsageError: The catalogue's model has not been pulled yet. Nothing is downloaded without being asked for.
    """
    if str(path) == "bundled":
        return TINY / "target"
    path = as_moved(path)
    model = find(str(path))
    if model is None or Path(path).exists():
        return path
    place = pulled(model)
    if place is None:
        raise UsageError(f"{model.name} is not on this machine yet; `blockdraft pull {model.id}` gets it.")
    return place


def named_for_others(target: str) -> str:
    """A target as other programs know it: the hub name of a model of the catalogue, anything else as given."""
    model = None if Path(target).exists() else find(target)
    return target if model is None else model.hub


def as_moved(path: str | Path) -> str | Path:
    """A path into the bundled pair where it lies now; before, its folders lay in that of all pairs."""
    inside = Path(path).absolute()
    if inside.is_relative_to(PAIRS) and not inside.exists():
        return TINY / inside.relative_to(PAIRS)
    return path
