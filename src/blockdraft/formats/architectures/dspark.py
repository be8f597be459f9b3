"""DSpark."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from blockdraft.formats.architectures.base import Architecture, Shapes, Speculator
from blockdraft.formats.architectures.dflash import dflash_shapes
from blockdraft.nn.draft_config import DSparkConfig


def dspark_shapes(config: DSparkConfig) -> Shapes:
    """DSpark: those of DFlash v1, 2 more for the Markov head and 2 for the confidence head."""
    factor = (config.vocab_size, config.markov_rank)
    shapes = dflash_shapes(config) | {"markov_head.markov_w1.weight": factor, "markov_head.markov_w2.weight": factor}
    if config.enable_confidence_head:
        width = config.hidden_size + config.confidence_head_with_markov * config.markov_rank
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _adapted(config: DSparkConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Early SpecForge files put both heads into `logit_head`, ModelOpt names them otherwise, and DeepSpec keeps the
    copy of the target's head that it trained with."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("logit_head.").replace("confidence_proj.", "confidence_head.proj.")
        found[f"markov_head.{name}" if name.startswith("markov_w") else name] = tensor
    found.pop("lm_head.weight", None)
    return found


ARCHITECTURE = Architecture(
    ("DSparkDraftModel", "Qwen3DSparkModel"),
    DSparkConfig,
    dspark_shapes,
    ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    _adapted,
    marks={"projector_type": "dspark"},
    inert={"projector_type": ("dspark",), "shift_label": (True,), "sample_from_anchor": (True,)},
    training=("confidence_head_alpha", "num_anchors"),
    # The head's second factor scores successors.
    speculator=Speculator("dspark", "DSparkSpeculator", from_anchor=True, rows=("markov_head.markov_w2.weight",)),
)
