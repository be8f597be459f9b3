"""Layout of DSpark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork
from blockdraft.formats.architectures import Architecture, LlamaCpp, Shapes, Speculator
from blockdraft.nn.draft_config import need


def _adapted(config: DSparkConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the network's names.

    Early SpecForge files have both heads in `logit_head`, ModelOpt has other names, and DeepSpec keeps the copy of the
    target's head that it trained with.
    """
    adapted = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("logit_head.").replace("confidence_proj.", "confidence_head.proj.")
        adapted[f"markov_head.{name}" if name.startswith("markov_w") else name] = tensor
    adapted.pop("lm_head.weight", None)
    return adapted


LLAMA_CPP = {
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


def _written(config: DSparkConfig) -> dict[str, Any]:
    confident, temperatures = config.enable_confidence_head, config.confidence_temperatures
    sees = config.confidence_head_with_markov or not confident
    need(sees, "confidence_head_with_markov", config.confidence_head_with_markov, "true in llama.cpp")
    need(temperatures is None, "confidence_temperatures", temperatures, "absent in llama.cpp")
    return {"sample_from_anchor": True, "has_confidence_head": confident}


def _read(values: Mapping[str, Any], shapes: Shapes) -> dict[str, Any] | None:
    if "markov_w1.weight" not in shapes:
        return None
    from_anchor = values.get("sample_from_anchor")
    need(from_anchor is not False, "sample_from_anchor", from_anchor, "true; the other convention is not supported")
    rank = shapes["markov_w1.weight"][1]
    return {"markov_rank": rank, "enable_confidence_head": "conf_proj.weight" in shapes}


ARCHITECTURES = (
    Architecture(
        ("DSparkDraftModel", "Qwen3DSparkModel", "Lfm2DSparkDraftModel"),
        DSparkNetwork,
        ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        _adapted,
        marks={"projector_type": "dspark"},
        inert={"projector_type": ("dspark",), "shift_label": (True,), "sample_from_anchor": (True,)},
        training=("confidence_head_alpha", "num_anchors"),
        # The head's second factor scores successors.
        speculator=Speculator("dspark", "DSparkSpeculator", from_anchor=True, rows=("markov_head.markov_w2.weight",)),
        llama_cpp=LlamaCpp("draft-dspark", LLAMA_CPP, _written, _read),
    ),
)
