"""Checkpoints of the families that our own decoder knows, as targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache
from blockdraft.nn.decoder import Decoder, DecoderConfig
from blockdraft.proposal import depths, is_chain, tree_mask
from blockdraft.targets.base import Cache, TargetOutput
from blockdraft.targets.checkpoint import (
    architecture,
    checked_folder,
    drafter_shape,
    end_tokens,
    load_generation_config,
    load_tokenizer,
    loading,
    max_context,
)
from blockdraft.targets.families import NotCovered, decoder_config


class NativeTarget:
    """Our decoder behind the `Target` protocol.

    Args:
        decoder: On the device and in the dtype of the target.
        config: The checkpoint's configuration.
        generation_config: What else may name end tokens.
    """

    backend = "native"
    backend_reason: str | None = None

    def __init__(
        self,
        decoder: Decoder,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        path: Path | None = None,
        generation_config: Any = None,
    ) -> None:
        self.decoder = decoder.eval()
        self.tokenizer = tokenizer
        self.path = path
        self.dtype: torch.dtype = decoder.embedding.dtype
        self.device: torch.device = decoder.embedding.device
        self.hidden_size = decoder.config.hidden_size
        self.num_layers = len(decoder.config.layers)
        self.vocab_size = decoder.config.vocab_size
        self.max_context = max_context(config)
        self.eos_token_ids = end_tokens(generation_config, config, tokenizer)
        self.architecture = architecture(config)
        self._config = config
        self._group = decoder.config.num_heads // decoder.config.num_kv_heads

    @property
    def shape(self) -> dict[str, Any]:
        return drafter_shape(self._config)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        config = self.decoder.config
        return 2 * self.num_layers * batch * config.num_kv_heads * capacity * config.head_dim * self.dtype.itemsize

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
        config, end = self.decoder.config, max(cache.lengths) + tokens.size(1)
        assert end <= cache.capacity, f"{end} slots needed, {cache.capacity} allocated"
        store = cache.stacked(self.num_layers, 2 * config.num_kv_heads, config.head_dim, self.decoder.embedding)
        where = self._layout(parents, cache.lengths)
        return TargetOutput(*self.decoder(tokens, *where, store[..., :end, :].unbind(0), taps, logits_at))

    def _layout(self, parents: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Positions, slots and masks of the nodes as `Decoder.forward` takes them, as few and small as will do."""
        count, end = parents.size(1), max(lengths) + parents.size(1)
        starts, is_line = set(lengths), parents.size(1) == 1 or is_chain(parents)
        if len(starts) == 1:
            slots = torch.arange(end - count, end, device=self.device)
            positions = slots[None]
        else:
            positions = slots = torch.tensor(lengths, device=self.device)[:, None] + torch.arange(
                count, device=self.device
            )
        if not is_line:
            positions = positions[:, :1] + depths(parents).to(self.device)
        if end > self.max_context:  # nodes that a shorter row of the batch will never commit
            positions = positions.clamp(max=self.max_context - 1)
        fresh = starts == {0} and is_line and self.decoder.config.attention_softcap is None
        masks: list[Tensor | None] = []
        whole: Tensor | None = None  # the mask of full attention
        for window in self.decoder.config.windows:
            reaches_all = window is None or end <= window
            if reaches_all and len(starts) == 1 and (count == 1 or fresh):
                masks.append(None)
            elif reaches_all:
                if whole is None:
                    whole = self._mask(parents, lengths)
                masks.append(whole)
            else:
                within = tree_mask(parents).to(self.device)
                rows = positions.expand(parents.shape)
                visible = visible_slots(lengths, within, rows, window)
                masks.append(grouped_mask(visible, self._group, self.dtype))
        return positions, slots, masks

    def _mask(self, parents: Tensor, lengths: Sequence[int]) -> Tensor:
        """Who sees whom where no window hides anything."""
        within = tree_mask(parents).to(self.device)
        if len(set(lengths)) > 1:
            return grouped_mask(visible_slots(lengths, within), self._group, self.dtype)
        return F.pad(grouped_mask(within, self._group, self.dtype), (lengths[0], 0))

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.decoder.named_weights()

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.decoder.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        head = self.decoder.head
        if torch.is_grad_enabled() and hidden.requires_grad:  # of a drafter in training; ours is for inference only
            return F.linear(hidden, head.weight)
        logits: Tensor = head(hidden)
        return logits


def load(path: str | Path, dtype: torch.dtype, device: torch.device) -> NativeTarget:
    """Load a checkpoint in safetensors and, where there is one, its tokenizer, from a local folder or by hub name.

    Raises:
        NotCovered: The family or one of its settings is none that the decoder knows, or the weights are not there under
            the usual names and shapes.
        ValueError: No such folder or hub name, or files that cannot be read.
    """
    folder = checked_folder(path)
    with loading(path):
        config = AutoConfig.from_pretrained(path)
    wanted = decoder_config(config)
    with loading(path):
        files = _weight_files(path)
        tokenizer = load_tokenizer(path)
    with ExitStack() as opened:
        with loading(path):
            shards = [opened.enter_context(safe_open(file, "pt")) for file in files]
            tensors = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118 (no dictionary)
        _check_tensors(wanted, tensors)
        with loading(path, device), torch.no_grad():
            decoder = Decoder(wanted, lambda name: tensors[name].get_tensor(name).to(device, dtype))
    known = folder if folder.exists() else None
    return NativeTarget(decoder, config, tokenizer, known, load_generation_config(path))


def _weight_files(path: str | Path) -> list[str]:
    optional = {"_raise_exceptions_for_missing_entries": False}
    whole = cached_file(path, "model.safetensors", **optional)
    if whole is not None:
        return [whole]
    index = cached_file(path, "model.safetensors.index.json", **optional)
    return [] if index is None else list(get_checkpoint_shard_files(path, index)[0])


def _check_tensors(wanted: DecoderConfig, files: dict[str, Any]) -> None:
    """Raise `NotCovered` unless these files hold the tensors of this decoder."""
    if not files:
        raise NotCovered("it has no weights in safetensors")
    for name, shape in wanted.tensor_shapes().items():
        if name not in files:
            raise NotCovered(f"its checkpoint lacks {name}")
        found = tuple(files[name].get_slice(name).get_shape())
        if found != shape:
            raise NotCovered(f"{name} has the shape {list(found)} instead of {list(shape)}")
    if wanted.tied_head and "lm_head.weight" in files:
        table, head = (files[name].get_tensor(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
        if not torch.equal(table, head):
            raise NotCovered("its configuration ties the head to the embeddings, and its checkpoint does not")
