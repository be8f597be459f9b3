"""Draft networks run by torch's operations, compiled and as CUDA graphs: passes over blocks, and greedy chains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from blockdraft.decode.drafting import paying_part
from blockdraft.kernels.cuda.compiler import SEVERAL, compiled
from blockdraft.kernels.cuda.graphs import CapturedHost, Graphs, place, scratch
from blockdraft.nn.attention import grouped_mask
from blockdraft.nn.cache import KVCache, slot_bucket
from blockdraft.nn.draft_network import DraftNetwork
from blockdraft.nn.torch_runner import CachedAttention, TorchDraftRunner
from blockdraft.timing import PASS, mark

KNOWN = frozenset(
    ("pairs", "whole blocks", "sliding windows", "convolutions", "several layers of pairs", "contexts without a norm")
)  # of `DraftDescription.kinds`


class CapturedDraftRunner(TorchDraftRunner):
    """A `TorchDraftRunner` whose passes over blocks, with their head, and whose chains are one CUDA graph each.

    The nodes of a chain lie in the KV slots behind their sequence's committed tokens. What is observed, trees, sampled
    chains, passes with a window, and sequences at unequal distances are computed without graphs.
    """

    @staticmethod
    def knows(network: DraftNetwork) -> bool:
        """Return whether anything of a network can be captured."""
        return network.description.why_not(KNOWN) is None

    def __init__(self, network: DraftNetwork, host: CapturedHost) -> None:
        super().__init__(network, host)
        self._device = network.like.device
        self._graphs = Graphs(host.recorder, self._device, host.compiler)
        layers = len(self.described.layers)
        sizes: dict[int, tuple[int, ...]]
        if self.described.has_pairs:
            self._kept = self.network.kept
            sizes = {0: (0,), 1: (0,), 2: (0,)} | dict.fromkeys(range(3, 3 + 2 * layers), (0, 2))
            self.compiled_pass = compiled(self._level, sizes)
        else:
            sizes = {0: (0, 1), 1: (0,)} | dict.fromkeys(range(2, 2 + layers), (0, 2))
            self.compiled_pass = compiled(self._through_layers, sizes)

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        # A pass with a window is not captured, because it reads other KV slots each time.
        batch, count = tokens.shape
        slots = slot_bucket(max(state.lengths) + count)
        if window is not None or slots > state.capacity:
            return super().draft_tokens(state, tokens, first, window)
        store, is_memory = state.view(state.stores[0], count, slots)
        if not is_memory:
            return super().draft_tokens(state, tokens, first, window)

        def draft(store: Tensor, tokens: Tensor, starts: Tensor) -> list[Tensor]:
            run = self.compiled_pass if self._graphs.compiles else self._through_layers
            hidden = run(self.embed(tokens), starts, *store.unbind(0))[:, first:]
            return [hidden, self.head(hidden)]

        like = store.new_empty(len(store), store.size(2), store.size(4))
        kind = (SEVERAL[0] if batch > 1 else 1, SEVERAL[1] if count > 1 else 1)

        def warm_up() -> None:
            for memory in scratch(like, *kind):
                zeros = torch.zeros(kind, dtype=torch.int64, device=self._device)
                draft(memory, zeros, zeros.new_zeros(kind[0]))

        key = (place(store), batch, count, slots, first)
        inputs = [tokens, torch.tensor(state.lengths)]
        call = partial(draft, store[..., :slots, :])
        results = self._graphs.run(key, call, inputs, count - first, kind, warm_up)
        if results is None:
            return super().draft_tokens(state, tokens, first, window)
        hidden, logits = results
        return hidden, logits

    def _through_layers(self, block: Tensor, starts: Tensor, *stores: Tensor) -> Tensor:
        """Run all layers over blocks.

        Args:
            block: Embeddings `[B, N, H]`.
            starts: Numbers of committed tokens `[B]` int64.
            stores: Keys and values of each layer, `[B, heads, slots, D]`, which inductor writes to in place only where
                they are arguments of their own.
        """
        slots, count = stores[0].size(2), block.size(1)
        at = starts[:, None] + torch.arange(count, device=starts.device)
        visible = {span: self._visible(starts, at, span, slots) for span in self._spans}
        masks = {span: grouped_mask(seen, self._group, block.dtype) for span, seen in visible.items()}
        return self._through(block, at, self._angles(at), masks, stores, slice(0, slots))

    def slots_beside(self, block_size: int, width: int) -> int:
        return block_size - 1 if self.described.has_pairs else 0

    @torch.no_grad()
    def chain(
        self,
        state: KVCache,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None] | None:
        batch, slots = len(anchor), slot_bucket(max(state.lengths) + draft_tokens)
        if window is not None or slots > state.capacity or not all(state.lengths):
            return None
        stores = [self.hidden_store(state), *self.stores(state)]
        views = [state.view(store, draft_tokens, slots) for store in stores]
        if not all(is_memory for _, is_memory in views):
            return None
        memories, inputs = [view for view, _ in views], [anchor, torch.tensor(state.lengths)]
        likes = [view.new_empty(1, view.size(1), view.size(3)) for view in memories]

        def draft(memories: Sequence[Tensor], anchor: Tensor, lengths: Tensor) -> list[Tensor]:
            level = self.compiled_pass if self._graphs.compiles else self._level
            known, *stores = memories
            tokens, probs = [anchor], list[Tensor]()
            rows = torch.arange(len(anchor), device=anchor.device)
            hidden_state = known[rows, 0, lengths - 1].unsqueeze(1)
            for depth in range(draft_tokens):
                token, prob, hidden_state = level(tokens[-1], hidden_state, lengths + depth, *stores)
                tokens.append(token)
                probs.append(prob)
            return [torch.stack(tokens[1:], dim=1), torch.stack(probs, dim=1)]

        several = SEVERAL[0] if batch > 1 else 1

        def warm_up() -> None:
            ones = torch.ones(several, dtype=torch.int64, device=likes[0].device)
            layouts = [scratch(like, several, draft_tokens) for like in likes]
            for alike in zip(*layouts, strict=True):
                draft([memory[0] for memory in alike], ones, ones)

        key = (*map(place, memories), batch, draft_tokens, slots)
        results = self._graphs.run(key, partial(draft, memories), inputs, draft_tokens, several, warm_up)
        if results is None:
            return None
        tokens, probs = results
        mark(PASS)
        tokens = torch.cat([anchor[:, None], tokens], dim=1)
        return (tokens, None) if seconds is None else paying_part(tokens, probs, seconds, calibration)

    def _level(
        self, tokens: Tensor, hidden_state: Tensor, slots: Tensor, *stores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one pass over an entry of each sequence, and choose the most probable token.

        Args:
            tokens: `[B]` int64.
            hidden_state: `[B, 1, H]`, as in `LayeredNetwork.forward`.
            slots: `[B]` int64, the entries' KV slots.
            stores: Keys and values of each layer, `[B, heads, T, D]`, to which those of the entries are written.

        Returns:
            Tokens `[B]` of the target, their probabilities `[B]` float32, and the hidden states `[B, 1, H]` of the next
            entries.
        """
        rows = torch.arange(len(tokens), device=tokens.device)
        at = torch.arange(stores[0].size(2), device=tokens.device)
        visible = ((at > 0) & (at <= slots[:, None])).unsqueeze(1)
        near = [kind.window for kind in self.described.layers]
        seen = [visible if window is None else visible & (at > slots[:, None, None] - window) for window in near]

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            of_keys, of_values = stores[2 * layer : 2 * layer + 2]
            of_keys[rows, :, slots], of_values[rows, :, slots] = keys[:, :, 0], values[:, :, 0]
            return of_keys, of_values

        positions = (slots - 1).unsqueeze(1)
        embedded = self.embed(tokens.unsqueeze(1))
        hidden = self.network(embedded, positions, CachedAttention(write, seen), hidden_state)
        logits = self.network.logits(hidden, self.head)[:, 0]
        best = logits.argmax(dim=-1)
        prob = logits.float().softmax(dim=-1).gather(1, best[:, None])[:, 0]
        return self._kept[best], prob, self.network.fed_on(hidden)
