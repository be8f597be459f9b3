"""Draft models in z-lab's layout: a folder with config.json (`zlab_config.py`) and safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from blockdraft.formats.architectures import BY_NAME, architecture_of, tensor_shapes
from blockdraft.formats.folder import blaming, check_tensors, read_config, read_tensors, write_folder
from blockdraft.formats.zlab_config import config_dict, parse_config
from blockdraft.nn.draft_config import DraftConfig, need

# Words of the config.json of a draft model, ours or another writer's. Writing a checkpoint may replace such a folder.
DRAFT_MODELS = (*(f'"{name}"' for name in BY_NAME), '"speculators_model_type"')


def read_checkpoint(
    path: str | Path, vocabulary: Mapping[str, int] | None = None
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read a folder with config.json and one or several safetensors files of any name. The tensors come on the CPU and
    are named as in `tensor_shapes`. For `vocabulary` see `parse_config`.

    Raises:
        ValueError: The folder is absent, incomplete or broken, or holds no draft model.
    """
    raw = read_config(path)
    with blaming(Path(path, "config.json")):
        config = parse_config(raw, vocabulary)
    found = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in read_tensors(path).items()}
    found.pop("embed_tokens.weight", None)  # not the drafter's own, and neither are the angles
    tensors = {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}
    with blaming(Path(path)):
        tensors = architecture_of(config).adapted(config, tensors)
        check_tensors(tensor_shapes(config), tensors)
    return config, tensors


def write_checkpoint(path: str | Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder that z-lab's `from_pretrained` loads. It appears whole or not at all, and replaces the whole of a
    draft model's folder. Raises ValueError where that folder holds something else, or where the tensors do not fit the
    configuration or are not of one dtype."""
    check_tensors(tensor_shapes(config), tensors)
    write_folder(path, {**config_dict(config), "dtype": one_dtype(tensors)}, tensors, DRAFT_MODELS)


def one_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The dtype of all tensors, as config.json names it. Raises ValueError where they differ."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    need(len(dtypes) == 1, "the tensors' dtype", dtypes, "one; cast them")
    return dtypes[0]


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
