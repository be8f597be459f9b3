"""Any decoder-only causal language model of transformers as a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache as TransformersCache

from blockdraft.decode.proposal import chain_parents, depths, tree_mask
from blockdraft.formats.gguf import is_gguf
from blockdraft.nn.attention import additive_mask, visible_slots
from blockdraft.nn.cache import KVCache, slot_bucket
from blockdraft.nn.exact import EXACT_NODES, ExactAttention, attention_bytes
from blockdraft.nn.states import StatesCache
from blockdraft.targets.adapter import load_model
from blockdraft.targets.base import Cache, LoadOptions, R, Runnable, TargetOutput
from blockdraft.targets.checkpoint import CheckpointTarget, checked_folder, load_tokenizer, loading
from blockdraft.targets.exact import forward_in_pieces
from blockdraft.targets.families import NotCovered
from blockdraft.targets.hf_exact import ExactCache, use_exact_attention
from blockdraft.targets.hf_hooks import heading, listening, tappable
from blockdraft.targets.hf_kinds import ATTENTION_KINDS, layer_kinds, window_of
from blockdraft.targets.hf_states import over_trees, recurrent_layers

RANK = 1  # it runs every model, and others run some faster
MOST_PATHS = 64  # of trees, for which memory is planned; more nodes are those of prompts, which are lines


class HFCache(TransformersCache):
    """A `KVCache` in the shape in which transformers' models write to a cache."""

    def __init__(self, rows: KVCache) -> None:
        super().__init__(layers=[])
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._rows.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._rows.lengths)


class HFTarget(CheckpointTarget):
    """A causal LM of transformers behind the `Target` protocol. Tapped layers are read by forward hooks.

    Args:
        model: A decoder-only model; it is put into evaluation mode.
        tokenizer: Its tokenizer, if there is one.
        exact: Compute in pieces of one size, with attention in float64, so that a node's numbers do not depend on what
            else is computed. The model is changed: it cannot be used without this target any more.
        source_fingerprint: As in `CheckpointTarget`.

    Raises:
        UsageError: The model is no decoder-only one of attention and of recurrent layers that are known, or it cannot
            be exact.
    """

    backend = "hf"
    best_block_size = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        path: Path | None = None,
        exact: bool = False,
        source_fingerprint: str | None = None,
    ) -> None:
        super().__init__(model.config, tokenizer, path, model.generation_config, source_fingerprint)
        config: Any = self._config
        self.model = model.eval()
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.size(0)
        self.exact = exact
        self._recurrent = recurrent_layers(model)
        # A state cannot be cut.
        self.can_truncate = not self._recurrent
        kinds = layer_kinds(model, bool(self._recurrent))
        self._kinds = set(kinds) & ATTENTION_KINDS or {"full_attention"}
        self._tappable = tappable(model, self.num_layers)
        if exact:
            use_exact_attention(model)
            self._windows = [window_of(config) if kind == "sliding_attention" else None for kind in kinds]

    @property
    def running(self) -> str:
        return f"{self.backend}, exact" if self.exact else self.backend

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return StatesCache(batch, capacity) if self._recurrent else KVCache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        a_token, a_row = self._cache_sizes
        return batch * (capacity * a_token + a_row)

    @cached_property
    def _cache_sizes(self) -> tuple[int, int]:
        """Bytes that a cache takes for a token, and for a row besides. Families keep so different things that a
        token is read to see."""
        cache, token = self.new_cache(1, 1), torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.forward(token, chain_parents(1, 1), cache)
        cache.commit([[0]])
        return cache.nbytes, cache.state_bytes if isinstance(cache, StatesCache) else 0

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())

    def row_slots(self, tokens: int) -> int:
        return slot_bucket(tokens)  # rows of few different sizes lie at equal distances, which spares a copy

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        heads, rows = self._config.num_attention_heads, EXACT_NODES if self.exact else batch * nodes
        inner = getattr(self._config, "intermediate_size", None) or 4 * self.hidden_size
        if self.exact:
            kv_heads = getattr(self._config, "num_key_value_heads", None) or heads
            head_dim = getattr(self._config, "head_dim", None) or self.hidden_size // heads
            masks = len(self._kinds) * nodes * slots
            attention = attention_bytes(heads, kv_heads, head_dim, slots)
            return int(rows * (6 * self.hidden_size + 3 * inner) * self.dtype.itemsize + masks + attention)
        masks_and_scores = rows * slots * (len(self._kinds) + 2 * heads)
        copied = self.cache_bytes(batch, slots) // self.num_layers
        working = (rows * (6 * self.hidden_size + 3 * inner) + masks_and_scores) * self.dtype.itemsize + copied
        if self._recurrent:  # what entered each waits for `commit`; the paths of a tree begin with copies of a state
            layers, a_row = len(self._recurrent), self._cache_sizes[1]
            working += layers * rows * self.hidden_size * self.dtype.itemsize
            working += batch * a_row + 2 * batch * min(nodes, MOST_PATHS) * a_row // layers
        return int(working)

    def runner(self, network: Runnable[R], head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> R:
        network.to(device=self.device, dtype=self.dtype)
        return network.runner(self.embed, head or self.head)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: Cache,
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        assert isinstance(cache, KVCache)
        if self.exact:
            run, windows = partial(self._run_piece, cache, taps), set(self._windows)
            with self.lock:
                return forward_in_pieces(run, tokens, parents, cache, windows, self.max_context - 1, logits_at)
        starts = torch.tensor(cache.lengths, device=self.device)[:, None]
        # Nodes that a shorter row of the batch will never commit may lie past the last position.
        positions = (starts + depths(parents).to(self.device)).clamp(max=self.max_context - 1)
        within = tree_mask(parents).to(self.device)
        masks = {
            kind: additive_mask(
                visible_slots(
                    cache.lengths, within, positions, window_of(self._config) if kind == "sliding_attention" else None
                ),
                self.dtype,
            )
            for kind in self._kinds
        }
        past = HFCache(cache)
        over_nodes = (
            over_trees(cache, self._recurrent, past, parents) if isinstance(cache, StatesCache) else nullcontext()
        )
        with self.lock, self._listening(taps) as tapped, heading(self.model, logits_at), over_nodes:
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                past_key_values=past,
                use_cache=True,
            )
        features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None
        return TargetOutput(output.logits, features)

    def _run_piece(
        self,
        cache: KVCache,
        taps: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        attention: Mapping[int | None, ExactAttention],
        has_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        layers = [attention[window] for window in self._windows]
        with self._listening(taps) as tapped, heading(self.model, None if has_logits else tokens.new_empty(0)):
            output = self.model(
                input_ids=tokens, position_ids=positions, past_key_values=ExactCache(cache, layers), use_cache=True
            )
        return output.logits, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None

    def _listening(self, taps: Sequence[int]) -> AbstractContextManager[dict[int, Tensor]]:
        return listening({tap: self._tappable[tap] for tap in taps})

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        for name, weight in self.model.named_parameters():
            if self._config.model_type == "qwen3_moe" and ".mlp.experts." in name:
                yield from _experts_alone(name, weight)
            else:
                yield name, weight

    def embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.model.get_input_embeddings().weight)

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


def _experts_alone(name: str, weight_EOI: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The experts of a layer, which transformers keeps in one tensor and checkpoints one by one."""
    place, _, kind = name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
    for expert, weight in enumerate(weight_EOI):
        for part, own in zip(parts, weight.chunk(len(parts)), strict=True):
            yield f"{place}.{expert}.{part}.weight", own


def load(path: str | Path, options: LoadOptions) -> HFTarget:
    """Load a causal LM and, where there is one, its tokenizer, from a local folder or by hub name.

    Raises:
        NotCovered: Weights are to be rounded, or are in a GGUF file.
        ValueError: No such folder or hub name, or as in `load_model`.
    """
    if is_gguf(path):
        raise NotCovered("it reads no GGUF files")
    if options.quantize is not None:
        raise NotCovered("it does not round weights")
    if options.kv_dtype is not None:
        raise NotCovered("it does not round keys and values")
    folder = checked_folder(path, options.revision)
    if _has_rounded_tables(path, options.revision):
        raise NotCovered(
            "transformers reads no embedding of 8 bits, which this checkpoint has; let the native backend run it, or "
            "make it anew with blockdraft quantize --tables keep"
        )
    model, source = load_model(path, options)
    with loading(path):
        tokenizer = load_tokenizer(path, options.revision)
    with loading(path, options.device):
        placed: Any = model.to(options.device)  # type: ignore[arg-type]
        placed.requires_grad_(False)
    return HFTarget(placed, tokenizer, folder if folder.exists() else None, options.exact, source)


def _has_rounded_tables(path: str | Path, revision: str | None) -> bool:
    """Whether a checkpoint has a rounded embedding, as `blockdraft quantize` writes it."""
    with loading(path):
        config = AutoConfig.from_pretrained(path, revision=revision)
    groups = (getattr(config, "quantization_config", None) or {}).get("config_groups") or {}
    return any("embed_tokens" in pattern for group in groups.values() for pattern in group.get("targets") or ())
