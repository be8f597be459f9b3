"""Draft models in z-lab's layout: a folder with config.json (`zlab_config.py`) and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.formats.architectures import BY_NAME, architecture_of, tensor_shapes
from blockdraft.formats.zlab_config import config_dict, parse_config
from blockdraft.nn.draft_config import DraftConfig, need


def read_checkpoint(
    path: str | Path, vocabulary: Mapping[str, int] | None = None
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read a folder with config.json and one or several safetensors files of any name. The tensors come on the CPU and
    are named as in `tensor_shapes`. For `vocabulary` see `parse_config`.

    Raises:
        ValueError: The folder is absent, incomplete or broken, or holds no draft model.
    """
    file, tensors = Path(path, "config.json"), dict[str, Tensor]()
    try:
        config = parse_config(json.loads(file.read_text(encoding="utf-8")), vocabulary)
        for file in sorted(Path(path).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
                need(name not in tensors, name, "a repeated tensor", "in one file; keep one copy of the weights")
                if name != "embed_tokens.weight" and not name.endswith("rotary_emb.inv_freq"):  # not the drafter's own
                    tensors[name] = tensor
        need(file.suffix == ".safetensors", "*.safetensors", None, "beside it; copy the drafter's weights there")
        file = Path(path)
        tensors = architecture_of(config).adapted(config, tensors)
        _check_tensors(config, tensors)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give a drafter's folder or copy it again.") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return config, tensors


def write_checkpoint(path: str | Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder that z-lab's `from_pretrained` loads. It appears whole or not at all, and replaces the whole of a
    draft model's folder. Raises ValueError where that folder holds something else, or where the tensors do not fit the
    configuration or are not of one dtype."""
    path, raw = Path(path).resolve(), config_dict(config)
    _check_tensors(config, tensors)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    need(len(dtypes) == 1, "the tensors' dtype", dtypes, "one; cast them")
    there = (path / "config.json").read_bytes() if (path / "config.json").is_file() else b""
    ours = any(f'"{name}"'.encode() in there for name in BY_NAME)
    free = ours or not path.exists() or (path.is_dir() and not any(path.iterdir()))
    need(free, "the folder to write", str(path), "new, empty or a draft model's; choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps({**raw, "dtype": dtypes[0]}, indent=2) + "\n", encoding="utf-8")
        (new / "model.safetensors").chmod((new / "config.json").stat().st_mode)  # safetensors lets only the owner read
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        finally:
            if old.exists() and not path.exists():
                old.rename(path)


def check_fits(
    config: DraftConfig, *, hidden_size: int, num_layers: int, vocab_size: int, max_context: int | None = None
) -> None:
    """Check a drafter against its target, whose embedding, head and features it borrows, and against the longest
    context to be decoded, in tokens (None is not checked). Raises ValueError where they do not fit."""
    for name, theirs in (("hidden_size", hidden_size), ("num_target_layers", num_layers), ("vocab_size", vocab_size)):
        ours = getattr(config, name)
        need(ours == theirs, f"the drafter's {name}", ours, f"the target's, {theirs}; use a drafter made for it")
    limit = config.max_position_embeddings
    need((max_context or 0) <= limit, "max_context", max_context, f"at most the drafter's positions, {limit}")


def _check_tensors(config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    expected, found = tensor_shapes(config), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name in expected | found if expected.get(name) != found.get(name)]
    told = "; ".join(f"{name}: expected {expected.get(name)}, found {found.get(name)}" for name in wrong[:5])
    if wrong:
        raise ValueError(f"{len(wrong)} tensors do not fit the configuration: {told}. Use files that belong together.")
