"""Causal language models of transformers as targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockdraft.decode.proposal import chain_parents, depths, tree_mask
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.formats.stored import stored
from blockdraft.nn.attention import EXACT_NODES, ExactAttention, additive_mask, attention_bytes, visible_slots
from blockdraft.nn.cache import KVCache, RecurrentCache, cache_argument, slot_bucket
from blockdraft.targets.base import NotCovered, TargetOutput
from blockdraft.targets.checkpoint import CheckpointTarget, checked_folder, head_size, load_tokenizer, loading
from blockdraft.targets.exact import forward_in_pieces
from blockdraft.targets.families import logit_factor, own_tensors
from blockdraft.targets.hf_states import RECURRENT_FAMILIES, over_trees, recurrent_layers
from blockdraft.targets.model_config import load_config
from blockdraft.targets.weights import experts_apart, load_model
from blockdraft.types import LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RANK = 1  # it runs every model, but other backends run some faster
MAX_PATHS = 64  # paths of the largest tree that memory is planned for; more nodes are chains of a prefill
ATTENTION_KINDS = {"full_attention", "sliding_attention"}
WITHOUT_MEMORY = {"moe", "mlp"}  # kinds of layers without a state
ALIBI = "its attention is biased by distance (ALiBi), which transformers counts along a chain and not along a tree"
# Families whose experts transformers stacks.
EXPERTS_TOGETHER = ("gemma4_text", "lfm2_moe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text")
# Families whose output would be wrong, though their layers attend or are recurrent.
REFUSED_FAMILIES = {
    "bloom": ALIBI,
    "gpt_neo": "its windows are counted from the last key, which in a batch belongs to the longest sequence",
    "jamba": "its Mamba layers in transformers restart whenever they read several tokens at once",
    "mpt": ALIBI,
}


def load(path: str | Path, options: LoadOptions) -> HFTarget:
    """Load a causal language model and its tokenizer, if any, from a local folder or by hub name.

    Raises:
        NotCovered: Weights, keys or values are to be quantized, or the weights are in a GGUF file.
        UsageError: There is no such folder or hub name, or as in `load_model`.
    """
    if is_gguf(path):
        raise NotCovered("it reads no GGUF files")
    if options.quantize is not None:
        raise NotCovered("it does not quantize weights")
    if options.kv_dtype is not None:
        raise NotCovered("it has no choice of the type of keys and values")
    folder = checked_folder(path, options.revision)
    if _has_quantized_tables(path, options.revision):
        raise NotCovered(
            "transformers reads no embedding of 8 bits, which this checkpoint has; let the native backend run it, or "
            "write it again with blockdraft quantize --tables keep"
        )
    model, source = load_model(path, options)
    with loading(path):
        tokenizer = load_tokenizer(path, options.revision)
    with loading(path, options.torch_device):
        placed: Any = model.to(options.torch_device)  # type: ignore[arg-type]
        placed.requires_grad_(False)
    return HFTarget(
        placed,
        tokenizer,
        path=folder if folder.exists() else None,
        exact=options.exact,
        source_fingerprint=source,
    )


def _has_quantized_tables(path: str | Path, revision: str | None) -> bool:
    """Return whether a checkpoint has a quantized embedding, as `blockdraft quantize` writes it."""
    with loading(path):
        config = load_config(path, revision)
    groups = (getattr(config, "quantization_config", None) or {}).get("config_groups") or {}
    return any("embed_tokens" in pattern for group in groups.values() for pattern in group.get("targets") or ())


class HFTarget(CheckpointTarget):
    """A causal language model of transformers as a target. Forward hooks read the target layers.

    Args:
        model: Decoder-only model, which is put into evaluation mode.
        tokenizer: Its tokenizer, if there is one.
        exact: Compute in pieces of equal size, with attention in float64, so that a node's values do not depend on what
            else is computed. This changes the model: it cannot be used without the target afterwards.
        path, source_fingerprint: As in `CheckpointTarget`.

    Raises:
        UsageError: The model has an encoder or layers of unknown kinds, or it cannot be exact.
    """

    backend = "hf"
    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        path: Path | None = None,
        exact: bool = False,
        source_fingerprint: str | None = None,
    ) -> None:
        from blockdraft.targets import hf_cache  # imports transformers

        super().__init__(
            model.config,
            tokenizer=tokenizer,
            path=path,
            generation_config=model.generation_config,
            source_fingerprint=source_fingerprint,
        )
        config: Any = self._config
        self.model = model.eval()
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.size(0)
        self.exact = exact
        self._caches = hf_cache
        self._cache_argument = cache_argument(model)
        self._recurrent = recurrent_layers(model)
        self.can_truncate = not self._recurrent  # a recurrent state cannot be cut
        kinds = _layer_kinds(model, bool(self._recurrent))
        self._kinds = set(kinds) & ATTENTION_KINDS or {"full_attention"}
        self._can_capture = _can_capture(model, self.num_layers)
        if exact:
            self._caches.use_exact_attention(model)
            self._windows = [_window_of(config) if kind == "sliding_attention" else None for kind in kinds]

    @property
    def running(self) -> str:
        return f"{self.backend}, exact" if self.exact else self.backend

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return RecurrentCache(batch, capacity) if self._recurrent else KVCache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        a_token, a_row = self.cache_sizes
        return batch * (capacity * a_token + a_row)

    @cached_property
    def cache_sizes(self) -> tuple[int, int]:
        """Bytes of a cache per token and per row, measured with one token, since families differ."""
        cache, token = self.new_cache(1, 1), torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.forward(token, chain_parents(1, 1), cache)
        cache.commit([[0]])
        return cache.nbytes, cache.state_bytes if isinstance(cache, RecurrentCache) else 0

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())

    def row_slots(self, tokens: int) -> int:
        return slot_bucket(tokens)  # rows of few sizes are equally spaced, which saves torch a copy

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        heads, scored = self._config.num_attention_heads, EXACT_NODES if self.exact else batch * nodes
        inner = getattr(self._config, "intermediate_size", None) or 4 * self.hidden_size
        if self.exact:
            kv_heads = getattr(self._config, "num_key_value_heads", None) or heads
            masks = len(self._kinds) * nodes * slots
            attention = attention_bytes(heads, kv_heads, head_size(self._config), slots)
            return int(scored * (6 * self.hidden_size + 3 * inner) * self.dtype.itemsize + masks + attention)
        masks_and_scores = scored * slots * (len(self._kinds) + 2 * heads)
        copied = self.cache_bytes(batch, slots) // self.num_layers
        working = (scored * (6 * self.hidden_size + 3 * inner) + masks_and_scores) * self.dtype.itemsize + copied
        if self._recurrent:  # inputs of each layer are kept until `commit`; each path begins with a copy of a state
            layers, a_row = len(self._recurrent), self.cache_sizes[1]
            working += layers * scored * self.hidden_size * self.dtype.itemsize
            working += batch * a_row + 2 * batch * min(nodes, MAX_PATHS) * a_row // layers
        return int(working)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        if self.exact:
            run, windows = partial(self._run_piece, cache, target_layers), set(self._windows)
            with self.lock:
                return forward_in_pieces(run, tokens, parents, cache, windows, self.max_context - 1, logits_at)
        starts = torch.tensor(cache.lengths, device=self.device)[:, None]
        # Nodes that are never committed may lie past the last position.
        positions = (starts + depths(parents).to(self.device)).clamp(max=self.max_context - 1)
        within = tree_mask(parents).to(self.device)
        masks = {
            kind: additive_mask(
                visible_slots(
                    cache.lengths, within, positions, _window_of(self._config) if kind == "sliding_attention" else None
                ),
                self.dtype,
            )
            for kind in self._kinds
        }
        past = self._caches.HFCache(cache)
        over_nodes = (
            over_trees(cache, self._recurrent, past, parents) if isinstance(cache, RecurrentCache) else nullcontext()
        )
        with (
            self.lock,
            self._capturing(target_layers) as captured,
            _scoring(self.model, logits_at),
            over_nodes,
        ):
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                use_cache=True,
                **{self._cache_argument: past},
            )
        hidden_states = (
            torch.cat([captured[target_layer] for target_layer in target_layers], dim=-1) if target_layers else None
        )
        return TargetOutput(output.logits, hidden_states)

    def _run_piece(
        self,
        cache: KVCache,
        target_layers: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        attention: Mapping[int | None, ExactAttention],
        has_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        layers = [attention[window] for window in self._windows]
        with (
            self._capturing(target_layers) as captured,
            _scoring(self.model, None if has_logits else tokens.new_empty(0)),
        ):
            past = {self._cache_argument: self._caches.HFCache(cache, layers)}
            output = self.model(input_ids=tokens, position_ids=positions, use_cache=True, **past)
        return output.logits, torch.cat(
            [captured[target_layer] for target_layer in target_layers], dim=-1
        ) if target_layers else None

    def _capturing(self, target_layers: Sequence[int]) -> AbstractContextManager[dict[int, Tensor]]:
        return _outputs({target_layer: self._can_capture[target_layer] for target_layer in target_layers})

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        biases = (
            (name, bias)
            for name, bias in self.model.named_buffers()
            if name.endswith((".expert_bias", ".layer_scalar"))
        )
        for name, weight in chain(self.model.named_parameters(), biases):
            named = own_tensors(self._config, {name: stored(weight)})
            if (family := self._config.model_type) in EXPERTS_TOGETHER:
                named = experts_apart(named, EXPERT_PARTS.get(family, {}))
            yield from ((own, tensor.tensor()) for own, tensor in named.items())

    def embed(self, tokens: Tensor) -> Tensor:
        table: Any = self.model.get_input_embeddings()
        return nn.functional.embedding(tokens, table.weight)

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        factor = logit_factor(self._config)
        return logits if factor == 1 else logits * factor


EXPERT_PARTS = {"lfm2_moe": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}  # names in checkpoints


# Which models can be targets.


def _layer_kinds(model: PreTrainedModel, has_states: bool) -> list[str]:
    """Return the kind of each layer.

    Args:
        has_states: Whether `recurrent_layers` finds layers of the model.

    Raises:
        UsageError: The model cannot be a target, since the state of some layers may not be restored.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    if model.config.is_encoder_decoder:
        raise UsageError(f"{name} has an encoder; only decoder-only models can be targets.")
    refused = ALIBI if getattr(config, "alibi", False) else REFUSED_FAMILIES.get(config.model_type)
    if refused:
        raise UsageError(f"{name} ({config.model_type}) cannot be a target: {refused}.")
    default = "sliding_attention" if _window_of(config) else "full_attention"
    types = getattr(config, "layer_types", None)
    kinds = list(types or [default] * config.num_hidden_layers)
    # A model of a recurrent family may have no recurrent layer.
    stateful = not {*kinds} <= ATTENTION_KINDS | WITHOUT_MEMORY if types else model._is_stateful
    if has_states != stateful or (stateful and config.model_type not in RECURRENT_FAMILIES):
        raise UsageError(
            f"{name} ({config.model_type}) has layers of the kinds {sorted({*kinds})}, whose state is not known to be "
            f"brought back to what is accepted. Targets have layers of {sorted(ATTENTION_KINDS)}, or recurrent ones of "
            f"the families {', '.join(RECURRENT_FAMILIES)}."
        )
    return kinds


def _window_of(config: Any) -> int | None:
    """Return the sliding window of a model in tokens; None is full attention."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


# Hooks, which are removed after each forward: the model may be used without the target.


def _can_capture(model: PreTrainedModel, num_layers: int) -> dict[int, nn.Module]:
    """Return the modules whose outputs are those of the layers and, at `num_layers`, the input of the head.

    Raises:
        UsageError: The model has no list of its layers.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return {**dict(enumerate(module)), num_layers: model.base_model}
    raise UsageError(f"{type(model).__name__} has no list of {num_layers} layers, so their outputs cannot be read.")


@contextmanager
def _outputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary that forward passes fill with the outputs of modules."""
    captured: dict[int, Tensor] = {}
    hooks = []
    for target_layer, module in modules.items():

        def keep(module: nn.Module, args: Any, output: Any, target_layer: int = target_layer) -> None:
            captured[target_layer] = output if isinstance(output, Tensor) else output[0]

        hooks.append(module.register_forward_hook(keep))
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _scoring(model: PreTrainedModel, logits_at: Tensor | None) -> Iterator[None]:
    """Restrict the head to one node per row, to none if `logits_at` is empty, or to all if it is None.

    `logits_to_keep` of transformers would compute the same nodes in all rows.
    """
    if logits_at is None:
        yield
        return

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        if len(logits_at) == 0:
            return (hidden[:, :0], *args[1:])
        return (hidden[torch.arange(len(hidden), device=hidden.device), logits_at].unsqueeze(1), *args[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()
