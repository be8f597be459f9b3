"""Layout of the toy: config.json holds the fields of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.base import Checkpoint
from blockdraft.formats.folder import PICKLED, check_tensors, read_config, read_tensors, write_folder
from blockdraft.formats.starting import Start, nowhere
from blockdraft.formats.trained import KEYS
from toy.network import ToyConfig, ToyNetwork  # type: ignore[import-not-found]

NAME = "ToyModel"
OTHERS = ("architectures", *KEYS.values())  # keys of config.json that are not fields


class ToyLayout:
    borrows = False
    pickle = PICKLED

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("architectures") == [NAME]

    def config(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None,
        num_target_layers: int | None,
    ) -> tuple[Any, bool]:
        own = {name: value for name, value in raw.items() if name not in OTHERS}
        return ToyConfig(**{**own, "target_layers": tuple(own["target_layers"])}), True

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        return nowhere(dict.fromkeys(("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"), "it runs no toys"))

    def read(self, path: Path, vocabulary: Mapping[str, int] | None, num_target_layers: int) -> Checkpoint:
        tensors = read_tensors(path)
        config, _ = self.config(read_config(path), tensors, vocabulary, num_target_layers)
        check_tensors({name: tuple(one.shape) for name, one in ToyNetwork(config).state_dict().items()}, tensors)
        return Checkpoint(config, tensors)

    def check(self, config: Any, target_name: str | None, target_architectures: Sequence[str]) -> None:
        if not isinstance(config, ToyConfig):
            raise UsageError(f"The configuration is a {type(config).__name__}; this layout holds toys.")

    def write(
        self, path: str | Path, checkpoint: Checkpoint, target_name: str | None, target_architectures: Sequence[str]
    ) -> None:
        self.check(checkpoint.config, target_name, target_architectures)
        raw = {"architectures": [NAME], **asdict(checkpoint.config)}
        write_folder(path, raw, checkpoint.tensors, checkpoint.trained)


LAYOUT = ToyLayout()
