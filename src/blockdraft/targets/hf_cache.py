"""Caches that models of transformers write to, and exact attention through its attention interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache

from blockdraft.errors import UsageError
from blockdraft.nn.attention import ExactAttention
from blockdraft.nn.cache import KVCache
from blockdraft.targets.hf_states import recurrent_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "blockdraft_exact"
HARMLESS = {"position_ids", "cache_position"}  # tensors that attention may ignore


@dataclass(frozen=True)
class StoredLayer:
    """All slots of a layer and their visibility, passed to an attention function instead of keys and values."""

    keys: Tensor
    values: Tensor
    attention: ExactAttention


class HFCache(TransformersCache):
    """A `KVCache` with the interface of transformers' caches.

    Args:
        cache: Cache of the sequences.
        attention: Exact attention of each layer to one piece. Without it, layers get views of keys and values.
    """

    def __init__(self, cache: KVCache, attention: Sequence[ExactAttention] = ()) -> None:
        super().__init__(layers=[])
        self._cache, self._attention = cache, attention

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if not self._attention:
            keys, values = self._cache.write(layer_idx, key_states, value_states)
            return keys, values
        attention, stores = self._attention[layer_idx], self._cache.layer(layer_idx, key_states, value_states)
        for store, new in zip(stores, (key_states, value_states), strict=True):
            attention.write(store, new.transpose(1, 2))
        stored = StoredLayer(stores[0], stores[1], attention)
        return stored, stored

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._cache.lengths)


def attend(
    module: nn.Module,
    query: Tensor,
    key: StoredLayer,
    value: StoredLayer,
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with queries `[1, heads, EXACT_NODES, D]`; return `[1, EXACT_NODES, heads, D]`."""
    unknown = [name for name, value in others.items() if isinstance(value, Tensor) and name not in HARMLESS]
    if unknown:
        raise UsageError(f"{type(module).__name__} attends with {unknown[0]}, which exact does not know; do without.")
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    return key.attention.attend(query.transpose(1, 2), key.keys, key.values, scale, softcap), None


def use_exact_attention(model: PreTrainedModel) -> None:
    """Make a model use `attend`.

    Raises:
        UsageError: The model does not use the attention interface, keeps more than keys and values, or its rotary
            angles change with the longest position of a forward.
    """
    config = model.config.get_text_config()
    if recurrent_layers(model) or getattr(config, "kv_lora_rank", None):
        raise UsageError(
            f"exact is refused: {type(model).__name__} keeps more than keys and values (recurrent states or latent "
            "attention), which exact does not know; do without."
        )
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    for part in (parameters, *parameters.values()):  # some models nest them by the kind of layer
        if not isinstance(part, dict) or part.get("rope_type") != "longrope":
            continue
        if part["original_max_position_embeddings"] >= config.max_position_embeddings:
            continue  # no position is beyond the original context
        raise UsageError("exact is refused: the model's position embeddings (longrope) change with the length.")
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    # Where transformers cannot, `set_attn_implementation` only logs a warning.
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise UsageError(
            f"exact is refused: {type(model).__name__} has attention of its own; use the backend native if it knows "
            "the model, or do without exact."
        )
