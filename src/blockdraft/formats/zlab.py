"""Draft models in z-lab's layout: a folder with config.json (`zlab_config.py`) and safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.architectures import architecture_of, by_name, tensor_shapes
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.folder import PICKLED, blaming, check_tensors, read_tensors, write_folder
from blockdraft.formats.folder import read_config as read_raw
from blockdraft.formats.stored import Stored
from blockdraft.formats.zlab_config import config_dict, parse_config
from blockdraft.nn.draft_config import DraftConfig, need


def read_config(path: str | Path, vocabulary: Mapping[str, int] | None = None) -> DraftConfig:
    """The configuration in a folder's config.json. For `vocabulary` see `parse_config`.

    Raises:
        ValueError: The folder holds no draft model.
    """
    raw = read_raw(path)
    with blaming(Path(path, "config.json")):
        return parse_config(raw, vocabulary)


def read_checkpoint(
    path: str | Path, vocabulary: Mapping[str, int] | None = None
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read a folder with config.json and one or several safetensors files of any name. The tensors come on the CPU and
    are named as in `tensor_shapes`. For `vocabulary` see `parse_config`.

    Raises:
        ValueError: The folder is absent, incomplete or broken, or holds no draft model.
    """
    config = read_config(path, vocabulary)
    found = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in read_tensors(path).items()}
    found.pop("embed_tokens.weight", None)  # not the drafter's own, and neither are the angles
    tensors = {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}
    with blaming(Path(path)):
        tensors = architecture_of(config).adapted(config, tensors)
        check_tensors(tensor_shapes(config), tensors)
    return config, tensors


def write_checkpoint(
    path: str | Path, config: DraftConfig, tensors: Mapping[str, Tensor], trained_for: str | None = None
) -> None:
    """Write a folder that z-lab's `from_pretrained` loads. It appears whole or not at all, and replaces the whole of a
    draft model's folder. Raises ValueError where that folder holds something else, or where the tensors do not fit the
    configuration or are not of one dtype."""
    check_tensors(tensor_shapes(config), tensors)
    write_folder(path, {**config_dict(config), "dtype": one_dtype(tensors)}, tensors, trained_for)


def one_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The dtype of all tensors, as config.json names it. Raises ValueError where they differ."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    need(len(dtypes) == 1, "the tensors' dtype", dtypes, "one; cast them")
    return dtypes[0]


class ZLab:
    pickle = PICKLED
    borrows = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        found = raw.get("architectures")
        names = found if isinstance(found, list) and "speculators_model_type" not in raw else []
        return any(name in [*by_name()] for name in names)

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Stored],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[DraftConfig, bool]:
        return parse_config(raw, vocabulary), True

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> None:
        """As its architecture says."""

    def read(self, path: Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
        return Checkpoint(*read_checkpoint(path, vocabulary))

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        config_dict(config)

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        if checkpoint.borrowed is not None and checkpoint.borrowed.kept is not None:
            kept = f"{len(checkpoint.borrowed.kept)} of {checkpoint.config.vocab_size} tokens"
            raise UsageError(f"It guesses among {kept}, which z-lab's layout cannot say; export to speculators.")
        write_checkpoint(path, checkpoint.config, checkpoint.tensors, checkpoint.trained_for)


LAYOUT = ZLab()
