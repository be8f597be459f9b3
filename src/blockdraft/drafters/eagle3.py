"""EAGLE-3: one small layer that guesses a token after the other, from the target's features and then from its own state
(arXiv 2503.01840), as a chain or as a tree that grows where its guesses are likely (arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.drafters.base import Entry
from blockdraft.drafters.dflash import check_borrowed, log_probabilities
from blockdraft.formats import check_fits, find_layout, read_drafter
from blockdraft.machine import send
from blockdraft.nn.cache import KVCache
from blockdraft.nn.eagle3 import Eagle3Network
from blockdraft.nn.rows import CachedAttention, RowNetwork
from blockdraft.proposal import Plan, Proposal, SparseLaw, best_of, chain, chain_laws, cut_laws, next_pays
from blockdraft.sampling import best_tokens, draw, probabilities
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, GUESSES, HEAD, OBSERVE, PASS, mark

WIDTH = 10  # guesses of a level that a tree goes on from, and children of each


class Eagle3Drafter:
    """Drafts with an EAGLE-3 network; the embedding is the target's.

    What it knows of a text lies in the slots of its tokens: slot s has the keys and values of the row of token s, which
    takes the target's feature at s - 1, and the feature at s, which the row of the next token will take. Slot 0 has no
    feature before it and is seen by nobody. Rows of guesses are made of the network's own states; they are dropped at
    the end of a cycle, and what was accepted is observed with the target's features like any other token.

    A chain takes the most probable guess or, where `plan.draws` is set, one drawn from the network's law under the
    row's sampling parameters, cut to the `LAW_SIZE` most probable tokens. With `plan.cycle_seconds` it ends once even
    a guess as likely as the last one would not pay; a drawn chain does not, since its length must not depend on what
    was drawn. A tree takes the `WIDTH` likeliest guesses of each level one further, with as many children each, and of
    all guesses the likeliest are proposed.

    Args:
        network: Moves to the target's device and dtype.
        target: What it was trained for.
        path: Where the network was read from.
    """

    knows_probabilities = knows_lengths = True

    def __init__(self, network: RowNetwork, target: Target, path: Path | None = None) -> None:
        self.network = network.to(target.device, target.dtype).eval()
        self.config, self.path = network.config, path
        self.taps, self.block_size = self.config.taps, self.config.block_size
        self._target, self._kept = target, self.network.kept

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        slot: int = sum(heads * size for heads, size in self.network.cached) + self.config.hidden_size
        return batch * capacity * slot * self._target.dtype.itemsize

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.network.parameters(), *self.network.buffers()))

    @torch.no_grad()
    def observe(self, state: KVCache, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        assert features is not None
        mark(OBSERVE)
        count = tokens.size(1)
        state.check_room(count)
        fused = self.network.fuse(features.to(self._target.dtype))
        before = torch.cat([self._last_features(state), fused[:, :-1]], dim=1)
        positions = (state.slots(count, tokens.device) - 1).clamp(min=0)
        keys, values = self.network.keys_values(self._target.embed(tokens), before, positions)
        for store, new in zip(self._stores(state), (keys, values, fused.unsqueeze(1)), strict=True):
            for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
                store[:, row + length : row + length + count] = new[place]
        mark(CONTEXT)
        state.commit([range(length) for length in lengths])

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        drawn = plan.draws is not None and any(params.temperature > 0 for params in plan.params)
        width = 0 if drawn else min(WIDTH, plan.tree_budget, len(self._kept))
        rows = OwnRows(self.network, state, self._stores(state)[:2], plan, width or 1)
        feature = self._last_features(state)
        return self._tree(rows, anchor, feature, plan, width) if width else self._chain(rows, anchor, feature, plan)

    def _chain(self, rows: OwnRows, anchor: Tensor, feature: Tensor, plan: Plan) -> Proposal:
        draws = plan.draws if any(params.temperature > 0 for params in plan.params) else None
        seconds = plan.cycle_seconds if draws is None else None
        guesses, laws = [anchor], list[SparseLaw]()
        expected = torch.zeros(len(anchor), device=anchor.device)  # guesses of each row, times their survival
        survival = torch.ones_like(expected)
        for depth in range(plan.block_size - 1 if seconds is None else min(plan.block_size, len(seconds)) - 1):
            if seconds and not next_pays(expected, survival, depth, seconds, plan.trust):
                break
            feature, logits = self._step(rows, guesses[-1][:, None], feature)
            if draws is not None:
                law = cut_laws(probabilities(logits, plan.params))  # [B, 1, K]
                laws.append(SparseLaw(self._kept[law.ids], law.probs))
                ranks = draw(law.probs, draws[:, depth : depth + 1]).to(anchor.device)
                guesses.append(laws[-1].ids[:, 0].gather(1, ranks)[:, 0])
                continue
            if seconds:
                best = log_probabilities(logits, plan.params)[:, 0].amax(dim=-1)
                survival = survival * best.exp()
                expected += survival
            guesses.append(self._kept[best_tokens(logits)[:, 0].to(anchor.device)])
        tokens = torch.stack(guesses, dim=1)
        if not laws:
            return Proposal(tokens, chain(tokens).parents, expected=tuple(expected.tolist()) if seconds else None)
        drawn_from = SparseLaw(torch.cat([law.ids for law in laws], 1), torch.cat([law.probs for law in laws], 1))
        return Proposal(tokens, chain(tokens).parents, chain_laws(drawn_from, len(laws), plan.params))

    def _tree(self, rows: OwnRows, anchor: Tensor, feature: Tensor, plan: Plan, width: int) -> Proposal:
        batch = len(anchor)
        # Of the rows that were gone on from last: what they see of each other, and how likely their paths are.
        within = torch.ones(batch, 1, 1, dtype=torch.bool, device=anchor.device)
        likely = torch.zeros(batch, 1, device=anchor.device)
        tokens, places = anchor[:, None], torch.full((batch, 1), -1, device=anchor.device)
        levels: list[tuple[Tensor, Tensor, Tensor]] = []  # of each guess its path's log probability, parent and token
        for depth in range(plan.block_size - 1):
            features, logits = self._step(rows, tokens, feature, within)
            best = log_probabilities(logits, plan.params).topk(width, dim=-1)
            children = (likely.unsqueeze(2) + best.values).flatten(1)
            parents = places.repeat_interleave(width, dim=1)
            levels.append((children, parents, self._kept[best.indices].flatten(1)))
            if depth == plan.block_size - 2 or _enough([level[0] for level in levels], plan.tree_budget):
                break
            likely, chosen = children.topk(width, dim=1)
            parent = chosen // width
            tokens, places = levels[-1][2].gather(1, chosen), chosen + sum(level[0].size(1) for level in levels[:-1])
            feature = features.gather(1, parent.unsqueeze(2).expand(-1, -1, features.size(2)))
            own = torch.eye(width, dtype=torch.bool, device=anchor.device).expand(batch, -1, -1)
            ancestors = within.gather(1, parent.unsqueeze(2).expand(-1, -1, within.size(2)))
            within = torch.cat([ancestors, own], dim=2)
        likely, places, tokens = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        return best_of(anchor, likely, places, tokens, plan.tree_budget, plan.cycle_seconds, plan.trust)

    def _step(
        self, rows: OwnRows, tokens: Tensor, feature: Tensor, within: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features for the next rows `[B, N, H]`, and logits `[B, N, Vd]`, of one more row for each of these tokens."""
        mark(GUESSES)
        hidden = rows(self._target.embed(tokens), feature, within)
        mark(PASS)
        logits = self.network.logits(hidden, self._target.head)
        mark(HEAD)
        return self.network.fed_on(hidden), logits

    def _stores(self, state: KVCache) -> tuple[Tensor, ...]:
        """Keys, values and features of all slots, `[heads, slots, D]` each."""
        like = self.network.fc.weight
        cached = (like.new_empty(1, heads, 0, size) for heads, size in self.network.cached)
        return *state.layer(0, *cached), self._features(state).unsqueeze(0)

    def _features(self, state: KVCache) -> Tensor:
        """Of all slots, `[slots, H]`."""
        return state.layer(1, self.network.fc.weight.new_empty(1, 1, 0, self.config.hidden_size))[0][0]

    def _last_features(self, state: KVCache) -> Tensor:
        """Of the last token of each row, `[B, 1, H]`; 0 where there is none."""
        store = self._features(state)
        slots = [row + max(length - 1, 0) for row, length in zip(state.rows, state.lengths, strict=True)]
        empty = send(torch.tensor([length == 0 for length in state.lengths]), store.device)
        return store[send(torch.tensor(slots), store.device)].masked_fill(empty[:, None], 0).unsqueeze(1)


def _enough(levels: Sequence[Tensor], budget: int) -> bool:
    """Whether all that may follow the last level is less likely than as many guesses as are wanted."""
    so_far = torch.cat([*levels], dim=1)
    if so_far.size(1) < budget:
        return False
    return bool((levels[-1].amax(dim=1) <= so_far.topk(budget, dim=1).values[:, -1]).all())


class OwnRows:
    """The rows that a cycle adds for its guesses. They lie in a copy of the keys and values of their texts, with which
    they go.

    Args:
        stores: Keys and values of all slots.
        width: Most rows of a call behind the first.
    """

    def __init__(self, network: RowNetwork, state: KVCache, stores: Sequence[Tensor], plan: Plan, width: int) -> None:
        self._network, self._depth, device = network, 0, stores[0].device
        window = max(state.lengths) if plan.draft_window is None else plan.draft_window
        skipped, room = max(min(state.lengths) - window, 0), 1 + width * (plan.block_size - 2)
        texts = [state.view(store, 0)[0][:, :, skipped:] for store in stores]
        self._keys, self._values = (F.pad(text, (0, 0, 0, room)) for text in texts)
        lengths = send(torch.tensor(state.lengths), device)[:, None]
        slots = torch.arange(skipped, max(state.lengths), device=device)
        self._known = (slots >= (lengths - window).clamp(min=1)) & (slots < lengths)  # [B, T]
        self._positions, self._end = lengths - 1, len(slots)

    def __call__(self, embedded: Tensor, feature: Tensor, within: Tensor | None = None) -> Tensor:
        """States `[B, N, H]` of N more rows, one position behind those of the last call.

        Args:
            embedded, feature: `[B, N, H]`.
            within: `[B, N, M]` bool, which of the M rows so far, these included, each of these sees; None is all.
        """
        batch, count, _ = embedded.shape
        begin, self._end = self._end, self._end + count
        if within is None:
            own = self._end - self._known.size(1)
            within = torch.ones(batch, count, own, dtype=torch.bool, device=embedded.device)
        visible = torch.cat([self._known.unsqueeze(1).expand(-1, count, -1), within], dim=2)

        def write(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._keys[:, :, begin : self._end], self._values[:, :, begin : self._end] = keys, values
            return self._keys[:, :, : self._end], self._values[:, :, : self._end]

        positions = (self._positions + self._depth).clamp(min=0).expand(-1, count)
        self._depth += 1
        return self._network(embedded, feature, positions, CachedAttention(write, visible))  # type: ignore[no-any-return]


def load(path: Path, target: Target) -> Eagle3Drafter:
    """Load a folder of any layout."""
    found = read_drafter(path, target.tokenizer.get_vocab() if target.tokenizer else None, target.num_layers)
    sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    check_fits(found.config, **sizes)
    if found.borrowed is not None:
        check_borrowed(path, found.borrowed, target)
    with torch.device("meta"):
        network = Eagle3Network(found.config)
    network.load_state_dict(found.tensors, assign=True)
    return Eagle3Drafter(network, target, path)


DRAFTER = Entry(
    load,
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    claims=lambda raw: find_layout("eagle3").recognises(raw),
    network=Eagle3Network,
    layouts=("eagle3", "eagle3_speculators"),
    variant="eagle3",
    drafter=Eagle3Drafter,
)
