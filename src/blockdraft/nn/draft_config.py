"""Configurations of draft networks, independent of file formats, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from blockdraft.errors import UsageError

# No model exceeds these. A network with larger sizes would take all memory.
LARGEST, MAX_LAYERS, LARGEST_FLOAT = 2**31, 1024, 1e30


@dataclass(frozen=True)
class LayerAttention:
    """Attention span of one draft layer."""

    causal: bool  # inside the block, attend to positions up to the query's own; otherwise to the whole block
    window: int | None  # sliding window in tokens; None is full attention


@dataclass(frozen=True)
class DraftConfig:
    """Configuration of a DFlash v1 drafter, from any variant of config.json.

    Raises ValueError for values out of range.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int  # tokens, anchor included
    mask_token_id: int
    target_layers: tuple[int, ...]  # 0-based target layers whose outputs are read, in the order of the columns of `fc`
    num_target_layers: int
    rope_theta: float
    layers: tuple[LayerAttention, ...]  # one per draft layer
    rope_scaling: dict[str, Any] | None = None  # `rope_type` and its parameters, without theta; None is plain RoPE
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960  # tokens
    attention_bias: bool = False
    hidden_act: str = "silu"
    input_embedding_scale: float = 1.0  # factor on the target's embeddings where they enter the drafter
    output_multiplier: float = 1.0  # factor on the logits, before the soft cap
    final_logit_softcapping: float | None = None  # c in c * tanh(logits / c); None is no cap

    def __post_init__(self) -> None:
        check_fields(self, {"block_size": 2, "mask_token_id": 0})
        check_shape(self)
        mask, size, depth = self.mask_token_id, self.vocab_size, self.num_hidden_layers
        need(mask < size, "mask_token_id", mask, f"below vocab_size, {size}")
        need(len(self.layers) == depth, "the number of layers", len(self.layers), f"num_hidden_layers, {depth}")
        for layer in self.layers:
            whole("a sliding window", 1 if layer.window is None else layer.window)


def check_fields(config: Any, least: Mapping[str, int]) -> None:
    """Raise a ValueError if a field of a dataclass has another type than declared, or a number is not positive.

    Args:
        least: Minimum of integers for which it is not 1, by field.
    """
    for field in fields(config):
        value, kind = getattr(config, field.name), field.type
        if kind == "int":
            whole(field.name, value, minimum=least.get(field.name, 1))
        elif kind == "float" or (kind == "float | None" and value is not None):
            sound = type(value) in (int, float) and 0 < value <= LARGEST_FLOAT
            need(sound, field.name, value, f"a positive number up to {LARGEST_FLOAT:g}")
        elif field.name == "rope_scaling" and value is not None:
            named = isinstance(value, Mapping) and type(value.get("rope_type")) is str
            need(named, field.name, value, "a JSON object with a rope_type, or absent")
        elif kind in ("bool", "str"):
            need(type(value).__name__ == kind, field.name, value, f"a {kind}")


def check_layer(config: Any) -> None:
    """Raise a ValueError if a draft layer cannot have such heads."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    need(heads % kv_heads == 0, "num_attention_heads", heads, f"a multiple of num_key_value_heads, {kv_heads}")
    need(config.head_dim % 2 == 0, "head_dim", config.head_dim, "even, for rotary embeddings")


def check_shape(config: Any) -> None:
    """Raise a ValueError if heads, activation or target layers of a draft network's configuration are out of range."""
    check_layer(config)
    num_layers = config.num_target_layers
    need(config.hidden_act == "silu", "hidden_act", config.hidden_act, "silu, the one that is supported")
    inside = all(whole("a target layer", target_layer, minimum=0) < num_layers for target_layer in config.target_layers)
    limit = f"one or more layers below num_target_layers, {num_layers}"
    need(inside and len(config.target_layers) > 0, "target_layers", config.target_layers, limit)


def default_target_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Spread `count` target layers over the target like z-lab's `build_target_layer_ids`: halves round to even.

    Raises ValueError if the target has no layers, or fewer than the four that a spread needs.
    """
    if whole("the number of target layers", count) == 1:
        return (whole("num_target_layers", num_target_layers) // 2,)
    span = whole("num_target_layers", num_target_layers, minimum=4) - 4  # from layer 1 to the third from the end
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def need(holds: bool, name: str, value: Any, limit: str) -> None:
    """Raise a UsageError that names a value and its limit, unless the condition holds.

    Text after "; " in the limit is a remedy, which ends the message.
    """
    if not holds:
        limit, semicolon, remedy = limit.partition("; ")
        actual = "but is absent" if value is None else f"got {value!r}"
        raise UsageError(f"{name} must be {limit}, {actual}{semicolon}{remedy}.")


def whole(name: str, value: Any, minimum: int = 1, maximum: int = LARGEST) -> int:
    """Return the value if it is an integer from `minimum` to `maximum`, else raise a UsageError."""
    need(type(value) is int and value >= minimum, name, value, f"a whole number of at least {minimum}")
    need(value <= maximum, name, value, f"at most {maximum}")
    return int(value)
