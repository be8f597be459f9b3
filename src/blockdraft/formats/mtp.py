"""A multi-token prediction head in a folder of its own: config.json, and tensors named and scaled as those that
Qwen3-Next's checkpoints hold under `mtp.`: norms are kept as what is added to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.folder import blaming, check_tensors, read_config, read_tensors, write_folder
from blockdraft.nn.draft_config import need
from blockdraft.nn.mtp import MTPConfig, MTPNetwork

ARCHITECTURE = "MTPDraftModel"
PREFIX = "mtp."


class MTP:
    borrows = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("architectures") == [ARCHITECTURE]

    def read(self, path: Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
        raw, tensors = read_config(path), read_tensors(path)
        known = {field.name for field in fields(MTPConfig)}
        with blaming(Path(path, "config.json")):
            given = {name: value for name, value in raw.items() if name in known}
            for name in known - {*given} - {"rope_scaling"}:
                need(False, name, None, "given; write the head with the version that trained it")
            config = MTPConfig(**given)
        with blaming(path):
            check_tensors({PREFIX + name: shape for name, shape in _shapes(config).items()}, tensors)
        return Checkpoint(config, {name.removeprefix(PREFIX): _shifted(name, one, 1) for name, one in tensors.items()})

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        if not isinstance(config, MTPConfig):
            raise UsageError(
                f"The configuration is a {type(config).__name__}, for which the layout of MTP heads has no words; "
                "write the drafter in a layout of its own."
            )

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        self.check(checkpoint.config, target_name, target_architectures)
        check_tensors(_shapes(checkpoint.config), checkpoint.tensors)
        raw = {"architectures": [ARCHITECTURE], "num_nextn_predict_layers": 1, **asdict(checkpoint.config)}
        tensors = {PREFIX + name: _shifted(name, one, -1) for name, one in checkpoint.tensors.items()}
        write_folder(path, raw, tensors, checkpoint.trained_for)


def _shifted(name: str, tensor: Tensor, by: int) -> Tensor:
    return tensor + by if tensor.ndim == 1 and "norm" in name else tensor


def _shapes(config: MTPConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in MTPNetwork(config).state_dict().items()}


LAYOUT = MTP()
