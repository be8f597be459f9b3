"""Our own decoder behind the `Target` protocol: its stores, its memory, and the ways in which it runs a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from blockdraft.cpu.compiled_decoder import CompiledDecoder
from blockdraft.cpu.compiled_network import Beside
from blockdraft.cuda.graphs import MOST_NODES, CapturedDecoder, Recorder, room
from blockdraft.decode.proposal import chain_parents, depths, is_chain, tree_mask
from blockdraft.machine import send
from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, bucket, slot_bucket
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.delta_net import DeltaRecurrence
from blockdraft.nn.exact import EXACT_NODES, ExactAttention, attention_bytes
from blockdraft.nn.states import StatesCache
from blockdraft.plugins import parts
from blockdraft.targets.base import Cache, R, Runnable, TargetOutput
from blockdraft.targets.checkpoint import CheckpointTarget
from blockdraft.targets.exact import forward_in_pieces
from blockdraft.targets.native_states import leave, recurrences, state_bytes, working_bytes
from blockdraft.types import CPU_BLOCK_SIZE


class NativeTarget(CheckpointTarget):
    """Our decoder behind the `Target` protocol.

    Args:
        decoder: On the device and in the dtype of the target.
        config: The checkpoint's configuration.
        generation_config: What else may name end tokens.
        source_fingerprint: As in `CheckpointTarget`.

    Attributes:
        lock: As in `Target`.
        compiled: The decoder's forward compiled for this machine, or None.
        captured: The decoder's forwards of few nodes captured as CUDA graphs, or None.
        compile_reason: Why it is neither, where it might have been; torch's operations are then used one by one.
        exact: Whether torch's operations are used in pieces of one size, so that a node's numbers do not depend on what
            else is computed.
        round_drafters: Whether drafters' weights are rounded as the layers' are.
    """

    backend = "native"

    def __init__(
        self,
        decoder: Decoder,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        path: Path | None = None,
        generation_config: Any = None,
        source_fingerprint: str | None = None,
    ) -> None:
        super().__init__(config, tokenizer, path, generation_config, source_fingerprint)
        self.decoder = decoder.eval()
        self.dtype: torch.dtype = decoder.dtype
        self.device: torch.device = decoder.device
        self.hidden_size = decoder.config.hidden_size
        self.num_layers = len(decoder.config.layers)
        self.vocab_size = decoder.config.vocab_size
        self.compiled: CompiledDecoder | None = None
        self.captured: CapturedDecoder | None = None
        self.compile_reason: str | None = None
        self.exact = False
        self.round_drafters = True
        self.can_truncate = decoder.config.delta_net is None  # a state cannot be cut
        self._group = decoder.config.num_heads // decoder.config.num_kv_heads

    @property
    def running(self) -> str:
        parts = ["native"]
        if self.compiled is not None:
            parts.append("compiled")
            if not self.bits and self.dtype == torch.float32 and self.compiled.library.weights_dtype == torch.bfloat16:
                parts.append("weights kept in bfloat16")
            if self.compiled.library.store_dtype == torch.int8:
                parts.append("int8 keys and values")
        if self.captured is not None:
            parts.append("captured")
        if self.exact:
            parts.append("exact")
        bits = self.bits
        kind = f"int{bits}" if bits else self.decoder.rounded
        return ", ".join([*parts, *([f"{kind} weights"] if kind else [])])

    @property
    def bits(self) -> int | None:
        """Of the layers' weights, where these are few, as a CPU uses them."""
        return self.decoder.bits

    @property
    def best_block_size(self) -> int | None:
        return None if self.compiled is None else CPU_BLOCK_SIZE

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity) if self.can_truncate else StatesCache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        config, slot = self.decoder.config, self.decoder.config.head_dim * self.dtype.itemsize
        if self.compiled is not None:
            library = self.compiled.library
            slot = library.slot_size(config.head_dim) * library.store_dtype.itemsize
        a_token = 2 * config.attention_layers * config.num_kv_heads * slot
        return batch * (capacity * a_token + state_bytes(config, self.dtype))

    def weight_bytes(self) -> int:
        return self.decoder.nbytes

    def row_slots(self, tokens: int) -> int:
        # Rows of few different sizes lie at equal distances, which spares torch's operations a copy.
        return tokens if self.compiled is not None else room(tokens)

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        if self.compiled is not None:
            return self.compiled.workspace_bytes(batch, nodes, slots)
        config, rows = self.decoder.config, EXACT_NODES if self.exact else batch * nodes
        attention_widths = (5 if config.gated else 3) * config.num_heads * config.head_dim
        widths = 4 * config.hidden_size + 3 * config.intermediate_size + attention_widths
        recurrent = working_bytes(config, self.dtype, batch, nodes)
        if self.exact:
            attention = attention_bytes(config.num_heads, config.num_kv_heads, config.head_dim, slots)
            return rows * widths * self.dtype.itemsize + len(config.windows) * nodes * slots + attention + recurrent
        masks = len(config.windows) * rows * self._group * slots
        scores = rows * config.num_heads * slots
        # Rows that lie anywhere are copied side by side, of all layers.
        return (rows * widths + masks + scores) * self.dtype.itemsize + self.cache_bytes(batch, slots) + recurrent

    def runner(self, network: Runnable[R], head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> R:
        network.to(device=self.device)
        reason = "its target is not compiled"
        if self.captured is not None and (capture := _faster("captured", network)):
            network.to(dtype=self.dtype)
            return cast(R, capture(network, self.captured.recorder, self.embed, head or self.head))
        if self.compiled is not None:
            compiled = _faster("compiled", network)
            bits = self.bits if self.round_drafters else None
            sizes = self.decoder.config.head_dim, self.dtype, bits
            beside = Beside(self.compiled, self.embed, self.head, *sizes)
            reason = f"it does not know networks of the kind {type(network).__name__}"
            made = compiled(network, beside, head, owned) if compiled else reason
            if not isinstance(made, str):
                return cast(R, made)
            reason = made
        network.to(dtype=self.dtype)
        return network.runner(self.embed, head or self.head, reason)

    def capture(self, recorder: Recorder) -> None:
        """Run forwards over few nodes as graphs from now on. Due before the first cache and the first drafter.

        Raises:
            ValueError: The recorder cannot capture one.
        """
        self.captured = CapturedDecoder(self.decoder, recorder)
        node = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.forward(node, chain_parents(1, 1), self.new_cache(1, room(1)))  # what cannot be captured says so here

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
        config, count = self.decoder.config, tokens.size(1)
        size, like = config.head_dim, self.decoder.norm.given[0]
        if self.compiled is not None:
            size, like = self.compiled.library.slot_size(size), torch.empty(0, dtype=self.compiled.library.store_dtype)
        memory = cache.memory(config.attention_layers, 2 * config.num_kv_heads, size, like)
        with self.lock:
            if self.compiled is not None:
                return TargetOutput(*self.compiled.forward(tokens, parents, cache, memory, taps, logits_at))
            recurrent: dict[int, DeltaRecurrence] = {}
            if isinstance(cache, StatesCache):
                recurrent = recurrences(self.decoder, cache, parents, self.exact)
                leave(cache, recurrent)
            if self.exact:
                run = partial(self._run_piece, memory, recurrent, taps)
                windows = self.decoder.config.windows
                return forward_in_pieces(run, tokens, parents, cache, windows, self.max_context - 1, logits_at)
            if self.captured is not None and logits_at is None and bucket(count) <= MOST_NODES:
                end = slot_bucket(max(cache.lengths) + bucket(count))
                if end <= cache.capacity:
                    store, is_memory = cache.view(memory, count, end)
                    if is_memory:
                        filled = F.pad(parents, (0, bucket(count) - count), value=-1)  # with nodes that hang on nothing
                        tree = depths(filled), tree_mask(filled)
                        return TargetOutput(*self.captured.forward(tokens, *tree, cache.lengths, store, taps))
            store, is_memory = cache.view(memory, count)
            where = self._layout(parents, cache.lengths)
            output = TargetOutput(*self.decoder(tokens, *where, self._memories(store, recurrent), taps, logits_at))
            if not is_memory:
                cache.put(memory, store, count)
            return output

    def _run_piece(
        self,
        memory: Tensor,
        recurrent: Mapping[int, DeltaRecurrence],
        taps: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        attention: Mapping[int | None, ExactAttention],
        has_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        masks = [attention[window] for window in self.decoder.config.windows]
        none = None if has_logits else tokens.new_empty(0)
        stores = self._memories(memory.unsqueeze(1), recurrent)
        found: tuple[Tensor, Tensor | None] = self.decoder(tokens, positions, positions, masks, stores, taps, none)
        return found

    def _memories(self, store: Tensor, recurrent: Mapping[int, DeltaRecurrence]) -> Sequence[Tensor | DeltaRecurrence]:
        """Of all layers, given the store of those that attend, and the recurrences of the others."""
        stores = iter(store.unbind(0))
        return [recurrent[layer] if layer in recurrent else next(stores) for layer in range(self.num_layers)]

    def _layout(self, parents: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Positions, slots and masks of the nodes as `Decoder.forward` takes them."""
        config, count, starts = self.decoder.config, parents.size(1), set(lengths)
        end, is_line = max(starts) + count, count == 1 or is_chain(parents)
        slots = torch.arange(end - count, end, device=self.device)
        if len(starts) > 1:
            slots = send(torch.tensor(lengths), self.device)[:, None] + torch.arange(count, device=self.device)
        positions = slots if slots.ndim == 2 else slots[None]
        if not is_line:
            positions = positions[:, :1] + send(depths(parents), self.device)
        # Where no window hides anything, a lone node on rows of one length, or a line on empty rows, needs no mask.
        unmasked = len(starts) == 1 and (count == 1 or (is_line and end == count and config.attention_softcap is None))
        masks: dict[int | None, Tensor | None] = {}  # by window; None is full attention
        for window in config.windows:
            reached = window if window is not None and window < end else None
            if reached not in masks:
                alone = reached is None and unmasked
                masks[reached] = None if alone else self._mask(parents, positions, lengths, reached)
            masks[window] = masks[reached]
        return positions, slots, [masks[window] for window in config.windows]

    def _mask(self, parents: Tensor, positions: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
        within = send(tree_mask(parents), self.device)
        if window is None and len(set(lengths)) == 1:  # all see the same committed tokens
            return F.pad(grouped_mask(within, self._group, self.dtype), (lengths[0], 0))
        visible = visible_slots(lengths, within, positions.expand(parents.shape), window)
        return grouped_mask(visible, self._group, self.dtype)

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.decoder.named_weights()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.decoder.embedding.rows(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        head = self.decoder.head
        if torch.is_grad_enabled() and hidden.requires_grad:  # of a drafter in training; ours is for inference only
            return F.linear(hidden, head.weight)
        logits: Tensor = head(hidden)
        return logits


def _faster(how: str, network: object) -> Callable[..., Any] | None:
    """What makes a faster runner for a draft network of this class, None where nothing does: `RUNNERS` of `compiled.py`
    or `captured.py` in the drafters' folders, by the network's class or its nearest ancestor."""
    known = {kind: make for module in parts(how).values() for kind, make in module.RUNNERS.items()}
    return next((known[kind] for kind in type(network).__mro__ if kind in known), None)
