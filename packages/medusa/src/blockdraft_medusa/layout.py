"""Layout of FasterDecoding's Medusa heads: config.json and `medusa_lm_head.pt`.

Head i has the tensors `i.j.linear.weight` and `.bias` of its residual blocks j, and `i.n.weight`, the output projection
behind its n blocks. If the projection is absent, it is the target's; FasterDecoding's loader does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.formats.base import NO_TARGET, Checkpoint, DrafterTarget, Layout, Raw, check_kind
from blockdraft.formats.folder import check_tensors, write_folder
from blockdraft.formats.starting import LLAMA_CPP, SGLANG, TENSORRT_LLM, VLLM, Start, nowhere
from blockdraft.nn.draft_config import MAX_LAYERS, need, whole
from blockdraft.nn.draft_network import shapes_of
from blockdraft_medusa.network import MedusaConfig, MedusaNetwork

NAME = "MedusaModel"
WEIGHTS = "medusa_lm_head.pt"
NOT_RUN = dict.fromkeys((SGLANG, TENSORRT_LLM, LLAMA_CPP), "it runs no Medusa heads that lie beside a model")
NOT_RUN = {VLLM: "it reads Medusa's heads in a layout of its own, which is not written here", **NOT_RUN}


class Medusa(Layout):
    pickle = WEIGHTS

    def recognises(self, raw: Raw) -> bool:
        # The folder of a model that was trained together with its heads has this key too.
        return "medusa_num_heads" in raw and raw.get("architectures") in (None, [NAME])

    def config(self, raw: Raw, tensors: Mapping[str, Any], target: DrafterTarget) -> tuple[MedusaConfig, bool]:
        known = "num_target_layers" in raw or target.num_layers is not None
        return _config(raw, tensors, target.num_layers or 1), known

    def starts(self, config: Any, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
        return nowhere(NOT_RUN)

    def checkpoint(self, raw: Raw, config: MedusaConfig, tensors: dict[str, Tensor]) -> Checkpoint:
        check_tensors(shapes_of(lambda: MedusaNetwork(config)), tensors)
        return Checkpoint(config, tensors)

    def check(self, config: Any, target: DrafterTarget = NO_TARGET) -> None:
        check_kind(config, MedusaConfig)

    def write(self, path: str | Path, checkpoint: Checkpoint, target: DrafterTarget = NO_TARGET) -> None:
        config = checkpoint.config
        self.check(config, target)
        check_tensors(shapes_of(lambda: MedusaNetwork(config)), checkpoint.tensors)
        raw = {
            "architectures": [NAME],
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": target.name,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_target_layers": config.num_target_layers,
        }
        write_folder(path, raw, checkpoint.tensors, checkpoint.trained, WEIGHTS)


def _config(raw: Raw, tensors: Mapping[str, Any], num_target_layers: int) -> MedusaConfig:
    """Return the configuration from config.json or else from the tensors."""
    layers = whole("medusa_num_layers", raw.get("medusa_num_layers", 1), maximum=MAX_LAYERS)
    # `medusa_num_heads` is not read: published configurations state 2 for files that hold 5 heads.
    heads = len({name.partition(".")[0] for name in tensors})
    need(heads > 0, "the number of heads", heads, "at least 1; copy the weights again")
    first, last = tensors.get("0.0.linear.weight"), tensors.get(f"0.{layers}.weight")
    if first is None:
        raise UsageError(f"it lacks 0.0.linear.weight, and begins with {min(tensors)}; give Medusa's heads alone.")
    for weight in (first, last):
        if weight is not None:
            need(len(weight.shape) == 2, "the shape of a weight of head 0", tuple(weight.shape), "of two dimensions")
    return MedusaConfig(
        hidden_size=raw.get("hidden_size", first.shape[0]),
        vocab_size=raw.get("vocab_size") if last is None else last.shape[0],  # type: ignore[arg-type]  # None is refused
        num_target_layers=raw.get("num_target_layers", num_target_layers),
        num_heads=heads,
        num_layers=layers,
        shared_head=last is None,
    )


LAYOUT = Medusa()
