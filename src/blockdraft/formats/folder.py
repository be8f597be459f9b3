"""Folders with config.json and safetensors, read with errors that name the file and written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.folders import replaced
from blockdraft.formats.base import layout_of
from blockdraft.formats.stored import StoredTensor, check_floats, open_tensors, stored
from blockdraft.formats.trained import UNKNOWN, Trained
from blockdraft.formats.vocabulary import MAPS
from blockdraft.nn.draft_config import need
from blockdraft.text_files import read_json, refuse_pointer

PICKLED = "pytorch_model.bin"


@contextmanager
def blaming(file: Path) -> Iterator[None]:
    """Turn errors inside the `with` block into a ValueError that names this file or folder."""
    try:
        try:
            yield
        except Exception:
            refuse_pointer(file)
            raise
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError, SafetensorError) as error:
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


def read_tensors(path: str | Path, pickle: str = PICKLED) -> dict[str, Tensor]:
    """Read all tensors of a folder onto the CPU. Files and errors as in `open_folder`."""
    # Copied, so that freeing a tensor frees its memory; a mapped file would stay in memory.
    return {name: tensor.tensor().clone() for name, tensor in open_folder(path, pickle).items()}


def weight_files(path: str | Path, pickle: str = PICKLED) -> list[Path]:
    """Return the safetensors files of a folder, or else the file `pickle` if it exists."""
    files = sorted(Path(path).glob("*.safetensors"))
    return files or [file for file in [Path(path, pickle)] if file.is_file()]


def open_folder(path: str | Path, pickle: str = PICKLED) -> dict[str, StoredTensor]:
    """Open all tensors of a folder's `weight_files`, by their names without a prefix `model.`.

    Raises:
        UsageError: There is no such file, one is broken or holds more than tensors, or two hold the same tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    files = weight_files(path, pickle)
    with blaming(Path(path, "config.json")):
        need(len(files) > 0, "*.safetensors", None, "beside it; copy the drafter's weights there")
    for file in files:
        with blaming(file):
            tensors_in_file = open_tensors([str(file)]) if file.suffix == ".safetensors" else _unpickled(file)
            for name, tensor in tensors_in_file.items():
                name = name.removeprefix("model.")
                need(name not in tensors, name, "a repeated tensor", "in one file; keep one copy of the weights")
                tensors[name] = tensor
    return tensors


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


def check_tensors(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Raise a UsageError unless these are the expected tensors and shapes, and weights are floating-point numbers."""
    check_floats({name: stored(tensor) for name, tensor in tensors.items() if name not in MAPS})
    actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    differences = "; ".join(f"{name}: expected {expected.get(name)}, found {actual.get(name)}" for name in wrong[:5])
    if wrong:
        raise UsageError(
            f"{len(wrong)} tensors do not fit the configuration: {differences}. Use files that belong together."
        )


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
                save_file(contiguous, new / "model.safetensors", metadata={"format": "pt"})
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
