"""Layout of an MTP head in its own folder.

It has a config.json, and tensors as Qwen3-Next's checkpoints hold them under `mtp.`, where a norm's weight is stored as
its difference from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.errors import UsageError
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.folder import PICKLED, blaming, check_tensors, read_config, read_tensors, write_folder
from blockdraft.formats.starting import LLAMA_CPP, SGLANG, TENSORRT_LLM, VLLM, Start, nowhere
from blockdraft.nn.draft_config import need

NAME = "MTPDraftModel"
PREFIX = "mtp."
NOT_RUN = dict.fromkeys(
    (VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP), "it runs MTP heads that lie in the target's own checkpoint, and no others"
)


class MTP:
    pickle = PICKLED
    borrows = False

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("architectures") == [NAME] and "speculators_model_type" not in raw

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[MTPConfig, bool]:
        known = {field.name for field in fields(MTPConfig)}
        given = {name: value for name, value in raw.items() if name in known}
        for name in known - {*given} - {"rope_scaling"}:
            need(False, name, None, "given; write the head with the version that trained it")
        return MTPConfig(**given), True

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        return nowhere(NOT_RUN)

    def read(self, path: Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
        raw, tensors = read_config(path), read_tensors(path)
        with blaming(Path(path, "config.json")):
            config, _ = self.config(raw, tensors, vocabulary, num_target_layers)
        with blaming(path):
            check_tensors({PREFIX + name: shape for name, shape in _shapes(config).items()}, tensors)
        return Checkpoint(config, {name.removeprefix(PREFIX): _shifted(name, one, 1) for name, one in tensors.items()})

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        if not isinstance(config, MTPConfig):
            raise UsageError(
                f"The configuration is {type(config).__name__}; the layout mtp holds MTPConfig alone. Write the "
                "drafter in a layout of its own kind."
            )

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        self.check(checkpoint.config, target_name, target_architectures)
        check_tensors(_shapes(checkpoint.config), checkpoint.tensors)
        raw = {"architectures": [NAME], "num_nextn_predict_layers": 1, **asdict(checkpoint.config)}
        tensors = {PREFIX + name: _shifted(name, one, -1) for name, one in checkpoint.tensors.items()}
        write_folder(path, raw, tensors, checkpoint.trained)


def _shifted(name: str, tensor: Tensor, by: int) -> Tensor:
    """Return the tensor, with `by` added if it is the weight of a norm."""
    return tensor + by if tensor.ndim == 1 and "norm" in name else tensor


def _shapes(config: MTPConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in MTPNetwork(config).state_dict().items()}


LAYOUT = MTP()
