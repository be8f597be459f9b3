"""P-EAGLE: EAGLE-3's rows, of which those behind the anchor's are run all at once, with masks for what they do not know
yet. So it drafts in one pass, and its guesses do not depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import Entry, read_network
from blockdraft.drafters.dflash import independent_guesses
from blockdraft.drafters.eagle3 import Eagle3Drafter
from blockdraft.machine import send
from blockdraft.nn.attention import attend, visible_slots
from blockdraft.nn.cache import KVCache
from blockdraft.nn.peagle import PEagleNetwork
from blockdraft.nn.row_pass import feature_store, last_features
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, HEAD, OBSERVE, PASS, mark


class PEagleDrafter(Eagle3Drafter):
    """Drafts with a P-EAGLE network. Its state is that of an EAGLE-3 drafter, with keys and values of every layer."""

    knows_lengths = False
    network: PEagleNetwork  # type: ignore[assignment]

    def state_bytes(self, batch: int, capacity: int) -> int:
        config = self.config
        keys_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return int(batch * capacity * (keys_values + config.hidden_size) * self._target.dtype.itemsize)

    @torch.no_grad()
    def observe(self, state: KVCache, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        assert features is not None
        mark(OBSERVE)
        count = tokens.size(1)
        state.check_room(count)
        fused, device = self.network.fuse(features.to(self._target.dtype)), tokens.device
        store = self._features(state)
        before = torch.cat([last_features(state, store), fused[:, :-1]], dim=1)
        slots = state.slots(count, device)
        within = torch.ones(count, count, dtype=torch.bool, device=device).tril().expand(len(tokens), -1, -1)
        visible = visible_slots(state.lengths, within)
        visible[:, :, 0] &= slots == 0  # the first token has no feature before it, so nobody else sees its row

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend(queries, *state.write(layer, keys, values), visible)

        self.network(self.network.embed_tokens(tokens), before, (slots - 1).clamp(min=0), attention)
        for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
            store[row + length : row + length + count] = fused[place]
        mark(CONTEXT)
        state.commit([range(length) for length in lengths])

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        return independent_guesses(anchor, self.draft_logits(state, anchor, plan), plan)

    def draft_logits(self, state: KVCache, anchor: Tensor, plan: Plan) -> Tensor:
        """Logits `[B, K, V]` of the K guesses that the plan asks for; -inf for tokens that are never guessed."""
        network, batch, count = self.network, len(anchor), plan.block_size - 1
        embedded, feature = network.masks(batch, count - 1)
        embedded = torch.cat([network.embed_tokens(anchor)[:, None], embedded], dim=1)
        feature = torch.cat([last_features(state, self._features(state)), feature], dim=1)
        lengths = send(torch.tensor(state.lengths), anchor.device)[:, None]
        slots, own = torch.arange(max(state.lengths), device=anchor.device), torch.arange(count, device=anchor.device)
        window = len(slots) if plan.draft_window is None else plan.draft_window
        known = (slots >= (lengths - window).clamp(min=1)) & (slots < lengths)  # [B, T]
        within = (own <= own[:, None]).expand(batch, -1, -1)
        visible = torch.cat([known[:, None].expand(-1, count, -1), within], dim=2)

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            texts = (state.view(store, 0)[0] for store in state.layer(layer, keys, values))
            keys, values = (torch.cat([text, new], dim=2) for text, new in zip(texts, (keys, values), strict=True))
            return attend(queries, keys, values, visible)

        hidden = network(embedded, feature, (lengths - 1).clamp(min=0) + own, attention)
        mark(PASS)
        logits = network.logits(hidden, self._target.head)
        mark(HEAD)
        if len(self._kept) == self.config.vocab_size:
            return logits
        return logits.new_full((batch, count, self.config.vocab_size), -torch.inf).index_copy_(2, self._kept, logits)

    def _features(self, state: KVCache) -> Tensor:
        config = self.config
        return feature_store(state, config.num_hidden_layers, config.hidden_size, self.network.fc.weight)


def load(path: Path, target: Target) -> PEagleDrafter:
    return PEagleDrafter(read_network(path, target, PEagleNetwork), target, path)  # type: ignore[arg-type]


DRAFTER = Entry(
    load,
    architectures=("PEagleSpeculator",),
    network=PEagleNetwork,
    layouts=("peagle_speculators",),
    variant="peagle",
    drafter=PEagleDrafter,
)
