"""Layout of the toy: config.json holds the fields of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.base import NO_TARGET, Checkpoint, DrafterTarget, Layout, Raw
from blockdraft.formats.folder import check_tensors, write_folder
from blockdraft.formats.starting import Start, nowhere
from blockdraft.formats.trained import KEYS
from toy.network import ToyConfig, ToyNetwork  # type: ignore[import-not-found]

NAME = "ToyModel"
OTHERS = ("architectures", *KEYS.values())  # keys of config.json that are not fields


class ToyLayout(Layout):
    def recognises(self, raw: Raw) -> bool:
        return raw.get("architectures") == [NAME]

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[Any, bool]:
        own = {name: value for name, value in raw.items() if name not in OTHERS}
        return ToyConfig(**{**own, "target_layers": tuple(own["target_layers"])}), True

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        return nowhere(dict.fromkeys(("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"), "it runs no toys"))

    def checkpoint(self, raw: Raw, config: Any, tensors: dict[str, Tensor]) -> Checkpoint:
        check_tensors({name: tuple(one.shape) for name, one in ToyNetwork(config).state_dict().items()}, tensors)
        return Checkpoint(config, tensors)

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        if not isinstance(config, ToyConfig):
            raise UsageError(f"The configuration is a {type(config).__name__}; this layout holds toys.")

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        self.check(checkpoint.config, target)
        raw = {"architectures": [NAME], **asdict(checkpoint.config)}
        write_folder(path, raw, checkpoint.tensors, checkpoint.trained)


LAYOUT = ToyLayout()
