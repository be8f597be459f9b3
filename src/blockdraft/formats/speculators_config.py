"""Parts of config.json that all drafters share in the format of vllm-project/speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.base import DrafterTarget
from blockdraft.formats.gguf import is_gguf
from blockdraft.nn.draft_config import MAX_LAYERS, need, whole

VERSION = "0.9.0"  # release of speculators whose keys are written
SHOWN = 200  # characters of an error of transformers, which may list all of its models


def named(model_type: str, draft_tokens: int, target: DrafterTarget) -> dict[str, Any]:
    """Return the keys of config.json that name the drafter's kind and its target.

    Raises:
        UsageError: Readers cannot load the target.
    """
    if target.name is not None and is_gguf(target.name):
        raise UsageError(
            f"The speculators format names the target, and its readers cannot load {target.name}; export with "
            "--target-name, the folder or hub name of the model that the file was made from."
        )
    return {
        "speculators_model_type": model_type,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_tokens}],
            "verifier": {"name_or_path": target.name, "architectures": [*target.architectures]},
        },
    }


def draft_tokens_text(raw: Mapping[str, Any]) -> Any:
    """Return the number of draft tokens in a file, or None."""
    methods = _section(raw).get("proposal_methods") or [{}]
    sound = isinstance(methods, list) and isinstance(methods[0], Mapping)
    need(sound, "proposal_methods", methods, "a list of JSON objects")
    return methods[0].get("speculative_tokens")


def draft_tokens_of(raw: Mapping[str, Any]) -> int:
    """Return the number of draft tokens in a file. Raise a UsageError if there is none."""
    return whole("speculative_tokens", draft_tokens_text(raw))


def target_name_of(raw: Mapping[str, Any]) -> Any:
    """Return the name of the target in a file, or None."""
    verifier = _section(raw).get("verifier") or {}
    need(isinstance(verifier, Mapping), "verifier", verifier, "a JSON object")
    return verifier.get("name_or_path")


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    section = raw.get("speculators_config") or {}
    need(isinstance(section, Mapping), "speculators_config", section, "a JSON object")
    return section


def target_layers_of(raw: Mapping[str, Any], key: str, num_target_layers: int) -> tuple[int, ...]:
    """Return the target layers from a key that lists the layers after them.

    Raises:
        UsageError: A layer cannot be listed.
    """
    ids = raw.get(key)
    need(isinstance(ids, list), key, ids, "a list of target layers")
    entered = all(type(i) is int and 0 < i < num_target_layers for i in ids or ())
    limit = f"from 1 to {num_target_layers - 1}; neither the embeddings nor the last layer's output can be listed"
    need(entered, key, ids, limit)
    return tuple(i - 1 for i in ids or ())


def ids_of(config: Any) -> list[int]:
    """Return the layers after the target layers of a configuration. Raise a UsageError if one is the last layer."""
    last = config.num_target_layers - 1
    remedy = (
        f"below the last target layer, {last}, which this format cannot list; train with other --target-layers, or "
    )
    remedy += "keep the layout that training writes"
    need(max(config.target_layers) < last, "a target layer", max(config.target_layers), remedy)
    return [target_layer + 1 for target_layer in config.target_layers]


def layer_config(raw: Any) -> dict[str, Any]:
    """Return the complete configuration of the draft layers. The file omits defaults of transformers."""
    need(isinstance(raw, Mapping), "transformer_layer_config", raw, "a JSON object")
    settings = {**raw}
    kind = settings.pop("model_type", "qwen3")
    whole("num_hidden_layers", settings.get("num_hidden_layers", 1), maximum=MAX_LAYERS)
    from transformers import AutoConfig

    try:
        return {**AutoConfig.for_model(kind, **settings).to_dict()}
    except Exception as error:  # transformers raises many types of errors for wrong values
        detail = str(error)[:SHOWN]
        raise UsageError(f"transformer_layer_config of the type {kind!r} cannot be read: {detail}") from error
