"""Greedy chains of networks that draft one token at a time (`nn/autoregressive.py`), compiled and as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from blockdraft.decode.tree import next_pays
from blockdraft.kernels.cuda.compiler import SEVERAL, compiled
from blockdraft.kernels.cuda.graphs import CapturedHost, Graphs, place, scratch
from blockdraft.nn.autoregressive import AutoregressiveNetwork, AutoregressivePass, CachedAttention
from blockdraft.nn.cache import KVCache, slot_bucket
from blockdraft.timing import PASS, mark


class CapturedAutoregressive(AutoregressivePass):
    """An `AutoregressivePass` whose chains are one CUDA graph each, with all passes and choices.

    The nodes of a chain lie in the KV slots behind their sequence's committed tokens. Trees, sampled chains, windows
    and sequences at unequal distances are drafted without graphs.

    Args:
        network, host: As in `AutoregressivePass`.
    """

    def __init__(self, network: AutoregressiveNetwork, host: CapturedHost) -> None:
        super().__init__(network, host)
        self._graphs = Graphs(host.recorder, network.like.device, host.compiler)
        self._kept = network.kept
        self._compiled = compiled(self._level, {0: (0, 2), 1: (0, 2), 2: (0,), 3: (0,), 4: (0,)})

    def slots_beside(self, block_size: int, width: int) -> int:
        return block_size - 1

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
        keys, values, known = self.stores(state)
        views = [state.view(store, draft_tokens, slots) for store in (keys, values, known.unsqueeze(0))]
        if not all(is_memory for _, is_memory in views):
            return None
        memories, inputs = [view for view, _ in views], [anchor, torch.tensor(state.lengths)]
        likes = [view.new_empty(1, view.size(1), view.size(3)) for view in memories]

        def draft(memories: Sequence[Tensor], anchor: Tensor, lengths: Tensor) -> list[Tensor]:
            level = self._compiled if self._graphs.compiles else self._level
            keys, values, known = memories
            tokens, probs = [anchor], list[Tensor]()
            rows = torch.arange(len(anchor), device=anchor.device)
            hidden_state = known[rows, 0, lengths - 1].unsqueeze(1)
            for depth in range(draft_tokens):
                token, prob, hidden_state = level(keys, values, tokens[-1], hidden_state, lengths + depth)
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
        return (tokens, None) if seconds is None else _cut(tokens, probs, seconds, calibration)

    def _level(
        self, keys: Tensor, values: Tensor, tokens: Tensor, hidden_state: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one pass over an entry of each sequence, and choose the most probable token.

        Args:
            keys, values: `[B, heads, T, D]`, to which those of the entries are written.
            tokens: `[B]` int64.
            hidden_state: `[B, 1, H]`, as in `AutoregressiveNetwork.forward`.
            slots: `[B]` int64, the entries' KV slots.

        Returns:
            Tokens `[B]` of the target, their probabilities `[B]` float32, and the hidden states `[B, 1, H]` of the next
            entries.
        """
        rows = torch.arange(len(tokens), device=tokens.device)
        at = torch.arange(keys.size(2), device=tokens.device)
        visible = ((at > 0) & (at <= slots[:, None])).unsqueeze(1)

        def write(new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
            keys[rows, :, slots], values[rows, :, slots] = new_keys[:, :, 0], new_values[:, :, 0]
            return keys, values

        positions = (slots - 1).unsqueeze(1)
        embedded = self.embed(tokens.unsqueeze(1))
        hidden = self.network(embedded, hidden_state, positions, CachedAttention(write, visible))
        logits = self.network.logits(hidden, self.head)[:, 0]
        best = logits.argmax(dim=-1)
        prob = logits.float().softmax(dim=-1).gather(1, best[:, None])[:, 0]
        return self._kept[best], prob, self.network.fed_on(hidden)


def _cut(tokens: Tensor, probs: Tensor, seconds: Sequence[float], calibration: float) -> tuple[Tensor, Tensor]:
    """Return the part of chains that pays, and the expected number of accepted draft tokens of each.

    Args:
        tokens: `[B, 1 + n]`, anchors first.
        probs: Probabilities `[B, n]` of the draft tokens.
        seconds, calibration: As in `AutoregressiveRunner.chain`.
    """
    probs = probs.cpu()
    expected = torch.zeros(len(tokens))
    survival = following = torch.ones_like(expected)
    for depth in range(probs.size(1)):
        if not next_pays(expected, following, depth, seconds, calibration):
            return tokens[:, : depth + 1], expected
        survival = survival * probs[:, depth]
        following = survival * probs[:, depth]
        expected = expected + survival
    return tokens, expected
