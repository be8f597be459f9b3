"""A multi-token prediction head as drafter: one layer guesses token after token, each from its own last output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.drafters.base import Entry, read_network
from blockdraft.drafters.dflash import log_probabilities
from blockdraft.machine import send
from blockdraft.nn.attention import attend
from blockdraft.nn.cache import KVCache, write_nodes
from blockdraft.nn.mtp import MTPNetwork
from blockdraft.proposal import Plan, Proposal, SparseLaw, best_count, chain, chain_laws, chain_parents, cut_laws
from blockdraft.sampling import best_tokens, draw, probabilities
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, HEAD, OBSERVE, PASS, mark


class MTPDrafter:
    """Drafts chains with an MTP head, whose embedding and output projection are the target's.

    A guess is the most probable token or, where `plan.draws` is set, drawn from its law. Then the chain is as long as
    the plan allows, whatever a cycle takes: each law depends on the guesses before it, and the length of a drawn chain
    must not depend on what was drawn.

    Args:
        network: Moves to the target's device and dtype.
        target: The target whose hidden states it was trained on.
        path: Where the network was read from.
    """

    knows_probabilities = True
    knows_lengths = False

    def __init__(self, network: MTPNetwork, target: Target, path: Path | None = None) -> None:
        self.network = network.to(target.device, target.dtype).eval()
        self.path = path
        self.taps = network.config.taps
        self.block_size = network.config.draft_steps + 1
        self._target = target

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        config = self.network.config
        numbers = 2 * config.num_key_value_heads * config.head_dim + config.hidden_size
        return batch * capacity * numbers * self._target.dtype.itemsize

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.network.parameters())

    @torch.no_grad()
    def observe(self, state: KVCache, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        assert features is not None
        mark(OBSERVE)
        keys_values, known = self._stores(state)
        count = features.size(1)
        state.check_room(count)
        before = torch.cat([self._newest(state)[:, None], features[:, :-1]], dim=1)
        slots = state.slots(count, tokens.device)
        nodes = torch.cat(self.network.context(self._target.embed(tokens), before, slots), dim=1)
        for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
            new = slice(row + length, row + length + count)
            keys_values[:, new], known[:, new] = nodes[place], features[place]
        mark(CONTEXT)
        state.commit([range(length) for length in lengths])

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        count, laws = plan.block_size - 1, list[SparseLaw]()
        if count == 0:
            return chain(anchor[:, None])
        draws = plan.draws if any(params.temperature > 0 for params in plan.params) else None

        def pick(logits_BV: Tensor, step: int) -> Tensor:
            if draws is None:
                return best_tokens(logits_BV)
            laws.append(cut_laws(probabilities(logits_BV[:, None], plan.params)))  # [B, 1, K]
            drawn = draw(laws[-1].probs, draws[:, step : step + 1])
            return laws[-1].ids[:, 0].gather(1, drawn.to(anchor.device))[:, 0]

        tokens, logits = self._walk(state, anchor, count, pick, plan.draft_window)
        if laws:
            drawn_from = SparseLaw(torch.cat([law.ids for law in laws], 1), torch.cat([law.probs for law in laws], 1))
            return Proposal(tokens, chain_parents(*tokens.shape), chain_laws(drawn_from, count, plan.params))
        if plan.cycle_seconds is None:
            return chain(tokens)
        path_probs = log_probabilities(logits, plan.params).amax(dim=-1).cumsum(dim=-1).exp().tolist()
        count = best_count(path_probs, plan.cycle_seconds, plan.trust)
        expected = tuple(sum(probs[:count]) for probs in path_probs)
        return Proposal(tokens[:, : 1 + count], chain_parents(len(tokens), 1 + count), expected=expected)

    def _walk(
        self, state: KVCache, anchor: Tensor, count: int, pick: Callable[[Tensor, int], Tensor], window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Guess from left to right; it leaves no trace.

        Args:
            pick: Makes guesses `[B]` of logits `[B, V]` and the number of the step.
            window: As in `Plan.draft_window`.

        Returns:
            Anchors and guesses `[B, 1 + count]`, and the guesses' logits `[B, count, V]`.
        """
        assert min(state.lengths) > 0, "a row is drafted for once its prompt is read"
        store = state.view(self._stores(state)[0], count)[0]
        slots_BN = state.slots(count, anchor.device)
        places = torch.arange(store.size(2), device=anchor.device)
        lengths = slots_BN[:, 0]
        first = (lengths - (window or store.size(2))).clamp(min=1)  # at the first token of a text there is no pair
        seen_BT = places >= first[:, None]
        tokens, found, hidden = [anchor], list[Tensor](), self._newest(state)[:, None]
        for step in range(count):
            slot = slots_BN[:, step : step + 1]

            def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor, slot: Tensor = slot) -> Tensor:
                write_nodes(store, torch.cat([keys, values], dim=1).transpose(1, 2), slot)
                return attend(queries, *store.chunk(2, dim=1), (seen_BT & (places <= slot))[:, None])

            state_BNH, hidden = self.network(self._target.embed(tokens[-1][:, None]), hidden, slot, attention)
            mark(PASS)
            found.append(self._target.head(state_BNH)[:, 0])
            mark(HEAD)
            tokens.append(pick(found[-1], step))
        return torch.stack(tokens, dim=1), torch.stack(found, dim=1)

    def _stores(self, state: KVCache) -> tuple[Tensor, Tensor]:
        """By slot, keys and values of the pair there, `[2 * kv_heads, slots, D]`, and the target's state at the token,
        `[1, slots, H]`."""
        config, weight = self.network.config, self.network.fc.weight
        like = weight.new_empty(1, 2 * config.num_key_value_heads, 0, config.head_dim)
        keys_values, known = state.layer(0, like, weight.new_empty(1, 1, 0, config.hidden_size))
        return keys_values, known

    def _newest(self, state: KVCache) -> Tensor:
        """The target's state at the newest token of each row, `[B, H]`; means nothing in empty rows."""
        places = [row + max(length - 1, 0) for row, length in zip(state.rows, state.lengths, strict=True)]
        known = self._stores(state)[1]
        return known[0, send(torch.tensor(places), known.device)]


def load(path: Path, target: Target) -> MTPDrafter:
    return MTPDrafter(read_network(path, target, MTPNetwork), target, path)


DRAFTER = Entry(
    load,
    architectures=("MTPDraftModel",),
    network=MTPNetwork,
    layouts=("mtp",),
    variant="mtp",
    drafter=MTPDrafter,
)
