"""Folders with config.json and safetensors, read with errors that name the file and written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.folders import replaced
from blockdraft.formats.base import NO_TARGET, Checkpoint, DrafterTarget, Layout, layout_of
from blockdraft.formats.stored import MadeTensor, StoredTensor, TensorFiles, check_floats, stored
from blockdraft.formats.trained import UNKNOWN, Trained
from blockdraft.formats.vocabulary import MAPS
from blockdraft.nn.draft_config import need
from blockdraft.text_files import read_json, refuse_pointer

HEAD_TENSORS = "tensors of its MTP head"
COPY_AGAIN = "Copy the model's files again, or use another drafter."
WHOLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@contextmanager
def blaming(file: Path) -> Iterator[None]:
    """Turn errors inside the `with` block into a ValueError that names this file or folder."""
    try:
        try:
            yield
        except Exception:
            refuse_pointer(file)
            raise
    except SafetensorError as error:
        raise UsageError(f"{file} cannot be read: it is corrupt or cut short ({error}); copy it again.") from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read ({error}); give another one, or copy it again.") from error
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from error


def read_config(path: str | Path) -> Any:
    """Parse config.json of a folder. Raise a UsageError if there is none or it is not JSON."""
    file = Path(path, "config.json")
    if Path(path).is_file():
        export = f" To convert a drafter from a GGUF file: blockdraft export {path} --target MODEL --out DIR."
        gguf = export if Path(path).suffix.lower() == ".gguf" else ""
        raise UsageError(f"{path} is a file; give a folder that holds config.json.{gguf}")
    with blaming(file):
        return read_json(file)


def open_folder(
    path: str | Path, pickle: str | None = None, prefix: str | tuple[str, ...] = "", without: str = ""
) -> TensorFiles:
    """Open the tensors of a folder without reading them.

    They are in the files of the folder's index, else in model.safetensors, else in all files in safetensors, else in
    the file `pickle`.

    Args:
        pickle: Name of a file pickled by torch, which is read at once. None reads none.
        prefix: Beginning of the names to open, or several. Files of an index without such tensors are not opened.
        without: Beginning that names lose.

    Raises:
        UsageError: A file is broken or holds more than tensors, or two hold the same tensor.
    """
    folder, listed = Path(path), dict[str, str]()
    if (folder / INDEX).is_file():
        with blaming(folder / INDEX):
            raw = read_json(folder / INDEX)
            places: Any = raw.get("weight_map") if isinstance(raw, dict) else None
            need(isinstance(places, dict), "weight_map", places, "an object; copy the file again")
            listed = places
            for name, place in listed.items():
                need(isinstance(place, str), f"weight_map of {name}", place, "a file name; copy the file again")
    if (folder / WHOLE).is_file() and WHOLE not in listed.values():
        files = [folder / WHOLE]
    elif listed:
        files = [folder / file for file in sorted({file for name, file in listed.items() if name.startswith(prefix)})]
    else:
        files = sorted(folder.glob("*.safetensors")) or [file for file in [folder / (pickle or "")] if file.is_file()]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        with blaming(file):
            for name, tensor in (_opened if file.suffix == ".safetensors" else _unpickled)(file).items():
                own, remedy = name.removeprefix(without), "in one file; keep one copy of the weights"
                need(bool(listed) or own not in tensors, own, "a repeated tensor", remedy)
                if name.startswith(prefix):
                    tensors[own] = tensor
    return TensorFiles(files, tensors)


def open_drafter(path: str | Path, pickle: str = PICKLED) -> TensorFiles:
    """Open the tensors of a drafter's folder by their names without `model.`. Arguments and errors as in `open_folder`.

    Raises:
        UsageError: The folder has no weights.
    """
    opened = open_folder(path, pickle, without="model.")
    with blaming(Path(path, "config.json")):
        need(len(opened.files) > 0, "*.safetensors", None, "beside it; copy the drafter's weights there")
    return opened


def _opened(file: Path) -> dict[str, StoredTensor]:
    tensors = dict[str, StoredTensor]()
    with safe_open(file, "pt") as shard:
        for name in shard.keys():  # noqa: SIM118 (no dictionary)
            header = shard.get_slice(name)
            tensors[name] = MadeTensor(tuple(header.get_shape()), header.get_dtype(), partial(_read, file, name))
    return tensors


def _read(file: Path, name: str) -> Tensor:
    # Opened for each tensor, since tensors stay mapped while their file is open.
    with safe_open(file, "pt") as shard:
        tensor: Tensor = shard.get_tensor(name)
        return tensor


def _unpickled(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a file pickled by torch. Nothing but tensors is unpickled."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises many types of errors for other content
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise UsageError(
            f"broken, or more than tensors ({reason}); copy it again, or get it as safetensors."
        ) from error
    named = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    sound = named and all(isinstance(tensor, Tensor) for tensor in content.values())
    need(sound, "its content", type(content).__name__, "tensors by name")
    return {name: stored(tensor) for name, tensor in content.items()}


def read_folder(path: str | Path, layout: Layout, target: DrafterTarget = NO_TARGET) -> Checkpoint:
    """Read a drafter. Raise a UsageError if it is incomplete or broken, or asks for something unsupported."""
    raw, opened = read_config(path), open_drafter(path, layout.pickle).tensors
    with blaming(Path(path, "config.json")):
        config, _ = layout.config(raw, opened, target)
    with blaming(Path(path)):
        # Copied, so that freeing a tensor frees its memory; a mapped file would stay in memory.
        tensors = {name: tensor.tensor().clone() for name, tensor in opened.items()}
        return replace(layout.checkpoint(raw, config, tensors), trained=Trained.read(raw))


def check_tensors(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Raise a UsageError unless these are the expected tensors and shapes, and weights are floating-point numbers."""
    check_floats({name: stored(tensor) for name, tensor in tensors.items() if name not in MAPS})
    check_shapes(expected, tensors)


def check_shapes(
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor | StoredTensor],
    what: str = "tensors",
    remedy: str = "Use files that belong together.",
) -> None:
    """Raise a UsageError unless these are the expected tensors and shapes."""
    actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    differences = "; ".join(f"{name}: expected {expected.get(name)}, found {actual.get(name)}" for name in wrong[:5])
    if wrong:
        raise UsageError(f"{len(wrong)} {what} do not fit the configuration: {differences}. {remedy}")


def with_rope_theta(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with `rope_theta` and `rope_scaling` in addition to `rope_parameters`.

    Readers older than transformers 5 (mistral.rs, older vLLM, optimum) know only the first two. Existing keys are kept.
    """
    rope = raw.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {**raw}
    near = rope.get("sliding_attention")  # some nest it by the kind of layer
    far = dict(rope.get("full_attention", rope))
    old = {name: far.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in far}
    old["rope_scaling"] = None if far.get("rope_type", "default") == "default" else far
    if isinstance(near, Mapping) and "rope_theta" in near:
        old["rope_local_base_freq"] = near["rope_theta"]
    return {**old, **raw}


def write_folder(
    path: str | Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    trained: Trained = UNKNOWN,
    pickle: str | None = None,
) -> None:
    """Write config.json and model.safetensors. The folder appears completely or not at all.

    Args:
        path: A new or empty folder, or a drafter's folder, which is replaced.
        raw: Content of config.json.
        trained: As in `Checkpoint`; added to config.json.
        tensors: Tensors by name, on any device, contiguous or not.
        pickle: Name of a file pickled by torch to write instead of safetensors, for readers that need it.

    Raises:
        UsageError: The folder holds something else, or cannot be written, for instance because the disk is full.
    """
    path = Path(path).resolve()
    check_writable(path)
    with replaced(path) as new:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        raw = {**raw, **trained.values()}
        try:
            if pickle is None:
                save_file(contiguous, new / WHOLE, metadata={"format": "pt"})
            else:
                torch.save({name: tensor.cpu().clone() for name, tensor in contiguous.items()}, new / pickle)
            (new / "config.json").write_text(json.dumps(with_rope_theta(raw), indent=2) + "\n", encoding="utf-8")
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises a RuntimeError for a full disk
            reason = "the disk is full, or a file too large" if isinstance(error, RuntimeError) else error
            raise UsageError(
                f"{path} cannot be written ({reason}); free space, or choose another folder. Its content is unchanged."
            ) from error
        for file in new.glob("*.safetensors"):
            file.chmod((new / "config.json").stat().st_mode)  # safetensors writes files that only the owner can read


def check_writable(path: str | Path) -> None:
    """Raise what `write_folder` would raise.

    This is a UsageError if the folder holds something else, and an OSError if nothing can be created next to it.
    """
    path = Path(path).resolve()
    free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    need(
        free or _holds_drafter(path), "the folder to write", str(path), "new, empty or a draft model's; choose another"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}."):
        pass


def _holds_drafter(path: Path) -> bool:
    try:
        return layout_of(json.loads((path / "config.json").read_text("utf-8-sig", "ignore"))) is not None
    except (OSError, json.JSONDecodeError):
        return False
