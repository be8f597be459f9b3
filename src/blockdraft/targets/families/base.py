"""What the families share: the fields that all configurations have, and rotary embeddings."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockdraft.nn.decoder_config import DecoderConfig, LayerKind, Rope
from blockdraft.nn.decoder_layer import ACTIVATIONS

# Rotary scalings whose frequencies stay the same however long the text gets, within the context.
STATIC_ROPES = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}


class NotCovered(ValueError):
    """A model that the native decoder cannot run; the text says why."""


def check_covered(config: PretrainedConfig) -> None:
    """Raise `NotCovered` for settings that no family of the native decoder knows."""
    if getattr(config, "use_bidirectional_attention", None):
        raise NotCovered("its attention is bidirectional")


def base_config(
    config: PretrainedConfig, layers: tuple[LayerKind, ...], rotates_all: bool = True, **differences: Any
) -> DecoderConfig:
    """A decoder from the fields that all families have, and from those in which one differs.

    Args:
        rotates_all: Whether a family rotates all of each head.
    """
    heads: int = config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    activation: str = differences.pop("activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise NotCovered(f"its activation {activation} is none of {', '.join(ACTIVATIONS)}")
    if rotates_all and any(2 * len(kind.rope.inverse_frequencies) != head_dim for kind in layers):
        raise NotCovered("it rotates a part of each head only")
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        layers=layers,
        norm_eps=config.rms_norm_eps,
        activation=activation,
        query_scale=differences.pop("query_scale", None) or head_dim**-0.5,
        tied_head=config.tie_word_embeddings,
        **differences,
    )


def equal_layers(config: PretrainedConfig, window: int | None = None) -> tuple[LayerKind, ...]:
    """Layers that all attend alike."""
    return (LayerKind(rope(config), window),) * int(config.num_hidden_layers)


def mixed_layers(config: PretrainedConfig) -> tuple[LayerKind, ...]:
    """Layers of which each has a sliding window or none, as `layer_types` says, and rotates as its kind does."""
    kinds = {
        "full_attention": lambda: LayerKind(rope(config, "full_attention")),
        "sliding_attention": lambda: LayerKind(rope(config, "sliding_attention"), config.sliding_window),
    }
    unknown = set(config.layer_types) - set(kinds)
    if unknown:
        raise NotCovered(f"it has layers of the kinds {', '.join(sorted(unknown))}")
    found = {name: kinds[name]() for name in set(config.layer_types)}
    return tuple(found[name] for name in config.layer_types)


def rope(config: PretrainedConfig, layer_type: str | None = None, default: Any = LlamaRotaryEmbedding) -> Rope:
    """Rotary embeddings as transformers computes them, of the layers of one kind where kinds differ.

    Args:
        default: Transformers' class that computes those that are not scaled, where kinds do not differ.
    """
    parameters: dict[str, Any] = config.rope_parameters
    nested = layer_type is not None and layer_type in parameters
    of_kind: dict[str, Any] = parameters[layer_type] if nested and layer_type else parameters
    name = of_kind.get("rope_type", "default")
    longest = of_kind.get("original_max_position_embeddings") or config.max_position_embeddings
    if str(name) not in STATIC_ROPES or (name == "longrope" and config.max_position_embeddings > longest):
        raise NotCovered(f"its rotary embeddings ({name}) change with the length of the text")
    compute: Any = ROPE_INIT_FUNCTIONS.get(name)
    if compute is None:
        compute = (Gemma3RotaryEmbedding if nested else default).compute_default_rope_parameters
    try:
        frequencies, scale = compute(config, **({"layer_type": layer_type} if nested else {}))
    except Exception as error:  # values that are no numbers, sizes that no memory holds
        raise NotCovered(f"its rotary embeddings cannot be computed ({error})") from error
    return Rope(tuple(frequencies.float().tolist()), float(scale))
