"""Which of transformers' models can be targets, by what their layers remember."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from blockdraft.errors import UsageError
from blockdraft.targets.hf_states import RECURRENT_FAMILIES

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
WITHOUT_MEMORY = {"moe", "mlp"}
ALIBI = "its attention is biased by distance (ALiBi), which transformers counts along one text and not along a tree"
# What would answer wrongly, though its layers attend or are recurrent.
REFUSED_FAMILIES = {
    "bloom": ALIBI,
    "gpt_neo": "its windows are counted from the last key, which in a batch belongs to the longest row",
    "jamba": "its Mamba layers in transformers begin anew wherever several tokens are read at once",
    "mpt": ALIBI,
}


def layer_kinds(model: PreTrainedModel, has_states: bool) -> list[str]:
    """What each layer is.

    Args:
        has_states: Whether it has layers that `recurrent_layers` finds.

    Raises:
        UsageError: It cannot be brought back to what was accepted, as far as is known.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    if model.config.is_encoder_decoder:
        raise UsageError(f"{name} has an encoder; only decoder-only models can be targets.")
    refused = ALIBI if getattr(config, "alibi", False) else REFUSED_FAMILIES.get(config.model_type)
    if refused:
        raise UsageError(f"{name} ({config.model_type}) cannot be a target: {refused}.")
    default = "sliding_attention" if window_of(config) else "full_attention"
    said = getattr(config, "layer_types", None)
    kinds = list(said or [default] * config.num_hidden_layers)
    # A model of a recurrent family may have no recurrent layer.
    stateful = not {*kinds} <= ATTENTION_KINDS | WITHOUT_MEMORY if said else model._is_stateful
    if has_states != stateful or (stateful and config.model_type not in RECURRENT_FAMILIES):
        raise UsageError(
            f"{name} ({config.model_type}) has layers of the kinds {sorted({*kinds})}, whose state is not known to be "
            f"brought back to what is accepted. Targets have layers of {sorted(ATTENTION_KINDS)}, or recurrent ones of "
            f"the families {', '.join(RECURRENT_FAMILIES)}."
        )
    return kinds


def window_of(config: Any) -> int | None:
    """The sliding window of a model's configuration, in tokens."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
