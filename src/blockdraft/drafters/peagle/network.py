"""The P-EAGLE draft network: EAGLE-3 with further layers, which makes all guesses in one pass.

An entry whose token and feature do not exist yet has the mask token and a learned feature; see `nn/autoregressive.py`
for entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.drafters.eagle3.network import Eagle3Base, Eagle3Config
from blockdraft.machine import send
from blockdraft.nn.attention import attend, visible_slots
from blockdraft.nn.autoregressive import hidden_state_store, last_hidden_states
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_config import need, whole
from blockdraft.nn.draft_layer import Attend, DraftLayer
from blockdraft.timing import HEAD, PASS, mark


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Configuration of a P-EAGLE drafter; `block_size` is the anchor and as many guesses as it was trained for."""

    mask_token_id: int
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        mask, size = whole("mask_token_id", self.mask_token_id, minimum=0), self.vocab_size
        need(mask < size, "mask_token_id", mask, f"below vocab_size, {size}")
        need(not self.norm_output, "norm_output", True, "false, since nothing is fed on")

    def network(self) -> PEagleNetwork:
        return PEagleNetwork(self)


class PEagleNetwork(Eagle3Base):
    """Layers, `fc`, norms, and an embedding and a head of its own. Parameters that EAGLE-3 has, too, keep their names.

    The entry of token x[s] has the fused features of s - 1 and guesses x[s + 1]. The entries behind the anchor's are
    `masks`.
    """

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): _layer(config) for i in range(1, config.num_hidden_layers)})
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.target_layers) * config.hidden_size))

    def runner(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        compile_reason: str | None = None,
    ) -> PEaglePass:
        """As `Runnable.runner` of targets; embedding and head are the network's own."""
        return PEaglePass(self, compile_reason)

    def masks(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Embeddings and features `[B, count, H]` of entries whose tokens do not exist yet."""
        token = torch.tensor(self.config.mask_token_id, device=self.mask_hidden.device)
        embedded, hidden_state = self.embed_tokens(token), self.fuse(self.mask_hidden)
        return embedded.expand(batch, count, -1), hidden_state.expand(batch, count, -1)

    def forward(self, embedded: Tensor, hidden_state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states `[B, N, H]` of entries, before the last norm, for `logits`.

        Args:
            embedded, hidden_state, positions: As in `AutoregressiveNetwork.forward`.
            attend: Attention of a layer's entries to those that they see, themselves included.
        """
        x = self.first(embedded, hidden_state, positions, lambda *heads: attend(0, *heads))
        angles = self.rotary(positions, x.dtype)
        for index, layer in enumerate(self.layers.values(), start=1):
            x = layer(x, *angles, index, attend)
        return x


class PEaglePass:
    """Runs a P-EAGLE network by torch's operations. A slot of its state holds what a slot of an `AutoregressiveRunner`
    does, with the keys and values of all layers.

    Args:
        network: Network on the device and in the dtype to run it.
        compile_reason: Reason why it is not compiled, where it might have been.
    """

    bits = None

    def __init__(self, network: PEagleNetwork, compile_reason: str | None = None) -> None:
        self.network, self.compile_reason = network, compile_reason

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        config = self.network.config
        keys_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return batch * capacity * (keys_values + config.hidden_size) * self.network.fc.weight.dtype.itemsize

    def weight_bytes(self) -> int:
        return 0

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def slots_beside(self, block_size: int, width: int) -> int:
        return 0

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        """As `AutoregressiveRunner.observe`."""
        count = tokens.size(1)
        state.check_room(count)
        fused, device = self.network.fuse(hidden_states.to(self.network.fc.weight.dtype)), tokens.device
        store = self._hidden_states(state)
        before = torch.cat([last_hidden_states(state, store), fused[:, :-1]], dim=1)
        slots = state.slots(count, device)
        within = torch.ones(count, count, dtype=torch.bool, device=device).tril().expand(len(tokens), -1, -1)
        visible = visible_slots(state.lengths, within)
        visible[:, :, 0] &= slots == 0  # the first token has no feature before it, so no other entry sees its entry

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend(queries, *state.write(layer, keys, values), visible)

        self.network(self.network.embed_tokens(tokens), before, (slots - 1).clamp(min=0), attention)
        for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
            store[row + length : row + length + count] = fused[place]

    def logits(self, state: KVCache, anchor: Tensor, count: int, window: int | None = None) -> Tensor:
        """Logits `[B, count, V]` of the guesses behind the anchors; -inf for tokens that are never guessed.

        Args:
            anchor: `[B]` int64.
            window: Number of each row's last committed tokens that attention reads; None is all of them.
        """
        network, batch = self.network, len(anchor)
        embedded, hidden_state = network.masks(batch, count - 1)
        embedded = torch.cat([network.embed_tokens(anchor)[:, None], embedded], dim=1)
        hidden_state = torch.cat([last_hidden_states(state, self._hidden_states(state)), hidden_state], dim=1)
        lengths = send(torch.tensor(state.lengths), anchor.device)[:, None]
        slots, own = torch.arange(max(state.lengths), device=anchor.device), torch.arange(count, device=anchor.device)
        known = (slots >= (lengths - (window or len(slots))).clamp(min=1)) & (slots < lengths)  # [B, T]
        within = (own <= own[:, None]).expand(batch, -1, -1)
        visible = torch.cat([known[:, None].expand(-1, count, -1), within], dim=2)

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            texts = (state.view(store, 0)[0] for store in state.layer(layer, keys, values))
            keys, values = (torch.cat([text, new], dim=2) for text, new in zip(texts, (keys, values), strict=True))
            return attend(queries, keys, values, visible)

        hidden = network(embedded, hidden_state, (lengths - 1).clamp(min=0) + own, attention)
        mark(PASS)
        logits = cast(Tensor, network.lm_head(network.norm(hidden)))
        mark(HEAD)
        kept = network.kept
        if len(kept) == network.config.vocab_size:
            return logits
        return logits.new_full((batch, count, network.config.vocab_size), -torch.inf).index_copy_(2, kept, logits)

    def _hidden_states(self, state: KVCache) -> Tensor:
        config = self.network.config
        return hidden_state_store(state, config.num_hidden_layers, config.hidden_size, self.network.fc.weight)


def _layer(config: PEagleConfig) -> DraftLayer:
    layer = DraftLayer(config)
    if not config.qk_norm:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()  # type: ignore[assignment]
    return layer
