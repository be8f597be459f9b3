"""EAGLE-3 (arXiv 2503.01840): one small layer guesses one token after the other.

The first guess is made from the target's features, the next ones from the layer's own states. The draft is a chain, or
a tree that grows where guesses are likely (arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.distributions import probabilities
from blockdraft.decode.proposal import Plan, Proposal, SparseDistribution, chain, chain_q, sparsify
from blockdraft.decode.sampling import best_tokens, draw
from blockdraft.decode.tree import best_of, next_pays
from blockdraft.drafters.base import DraftCost, Drafter, DrafterSpec, filled_network
from blockdraft.drafters.dflash.drafter import check_borrowed, log_probabilities
from blockdraft.drafters.eagle3.network import BLOCK_SIZE, DRAFT_VOCAB, Eagle3Network
from blockdraft.formats import check_fits, find_layout, read_drafter
from blockdraft.nn.autoregressive import WIDTH, AutoregressiveNetwork, DraftNodes
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, DRAFT_TOKENS, OBSERVE, mark


class Eagle3Drafter(Drafter):
    """Drafts with an EAGLE-3 network. The target lends its embedding.

    The cache has a slot for each token of a text. Slot s holds the keys and values of the entry of token s, which reads
    the target's feature at s - 1. It also holds the feature at s, which the entry of token s + 1 will read. Slot 0 has
    no feature before it, so no entry attends to it. Entries of guesses read the network's own states. They are dropped
    at the end of a cycle, and accepted tokens are observed with the target's features like any other token.

    In a chain, each guess is the most probable token or, if `plan.draws` is set, sampled from the network's
    distribution under the row's sampling parameters, cut to the `SPARSE_SIZE` most probable tokens. With
    `plan.cycle_seconds` the chain ends as soon as a further guess, even one as likely as the last, would not save time.
    This does not hold for a sampled chain, whose length must not depend on what was sampled. A tree continues the
    `WIDTH` likeliest guesses of each level with `WIDTH` children each, and proposes the likeliest of all guesses.

    Args:
        network: Draft network, which is moved to the target's device and dtype.
        target: Target that the network was trained for.
        path: Folder or file that the network was read from.
        owned: As in `Target.runner`.
    """

    knows_probabilities = knows_lengths = True

    def __init__(
        self, network: AutoregressiveNetwork, target: Target, path: Path | None = None, owned: bool = False
    ) -> None:
        self.network = network.to(target.device, target.dtype).eval()
        self.config, self.path = network.config, path
        self.target_layers, self.block_size = self.config.target_layers, self.config.block_size
        self._target, self._kept = target, self.network.kept
        self._run = target.runner(self.network, owned=owned)

    @property
    def compile_reason(self) -> str | None:
        """Reason why the network is not compiled for a CPU; None where it is."""
        return self._run.compile_reason

    @property
    def bits(self) -> int | None:
        return self._run.bits

    @property
    def slots_beside(self) -> int:
        """Most slots behind a row's text that a draft uses."""
        return self._run.slots_beside(self.block_size, WIDTH)

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return self._run.new_state(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return self._run.state_bytes(batch, capacity)

    def weight_bytes(self) -> int:
        kept = (*self.network.parameters(), *self.network.buffers())
        memory = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in kept}
        head = self._target.draft_head
        own = sum(each.nbytes() for each in memory.values()) + (head.nbytes if head else 0)
        return own + self._run.weight_bytes()

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return self._run.workspace_bytes(batch, nodes, slots)

    @torch.no_grad()
    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        assert hidden_states is not None
        mark(OBSERVE)
        self._run.observe(state, tokens, hidden_states)
        mark(CONTEXT)
        state.commit([range(length) for length in lengths])

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        sampled = plan.draws is not None and any(params.temperature > 0 for params in plan.params)
        width = 0 if sampled else min(WIDTH, plan.tree_budget, len(self._kept))
        if not width:
            return self._chain(state, anchor, plan)
        nodes = self._run.nodes(state, plan.block_size, width, plan.draft_window)
        return self._tree(nodes, anchor, plan, width)

    def _chain(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        draws = plan.draws if any(params.temperature > 0 for params in plan.params) else None
        seconds = plan.cycle_seconds if draws is None else None
        most = plan.block_size - 1 if seconds is None else min(plan.block_size, len(seconds)) - 1
        plain = draws is None and (seconds is None or all(params.temperature in (0, 1) for params in plan.params))
        found = (
            self._run.chain(state, anchor, most, plan.draft_window, seconds, plan.calibration)
            if plain and most
            else None
        )
        if found is not None:
            tokens, upper_bounds = found
            return Proposal(
                tokens, chain(tokens).parents, expected=None if upper_bounds is None else tuple(upper_bounds.tolist())
            )
        nodes = self._run.nodes(state, plan.block_size, 1, plan.draft_window)
        draft_tokens, dists = [anchor], list[SparseDistribution]()
        expected = torch.zeros(len(anchor), device=anchor.device)  # expected accepted guesses of each row
        survival = following = torch.ones_like(expected)
        for depth in range(most):
            if seconds and not next_pays(expected, following, depth, seconds, plan.calibration):
                break
            mark(DRAFT_TOKENS)
            logits = nodes(draft_tokens[-1][:, None])
            if draws is not None:
                dist = sparsify(probabilities(logits, plan.params))  # [B, 1, K]
                dists.append(SparseDistribution(self._kept[dist.ids], dist.probs))
                ranks = draw(dist.probs, draws[:, depth : depth + 1]).to(anchor.device)
                draft_tokens.append(dists[-1].ids[:, 0].gather(1, ranks)[:, 0])
                continue
            if seconds:
                best = log_probabilities(logits, plan.params)[:, 0].amax(dim=-1)
                survival = survival * best.exp()
                following = survival * best.exp()
                expected += survival
            draft_tokens.append(self._kept[best_tokens(logits)[:, 0].to(anchor.device)])
        tokens = torch.stack(draft_tokens, dim=1)
        if not dists:
            return Proposal(tokens, chain(tokens).parents, expected=tuple(expected.tolist()) if seconds else None)
        sampled_from = SparseDistribution(
            torch.cat([dist.ids for dist in dists], 1), torch.cat([dist.probs for dist in dists], 1)
        )
        return Proposal(tokens, chain(tokens).parents, chain_q(sampled_from, len(dists), plan.params))

    def _tree(self, nodes: DraftNodes, anchor: Tensor, plan: Plan, width: int) -> Proposal:
        # Of the nodes continued last: log probabilities of their paths, and their indices among all guesses.
        likely = torch.zeros(len(anchor), 1, device=anchor.device)
        tokens, places = anchor[:, None], torch.full((len(anchor), 1), -1, device=anchor.device)
        above = None  # indices of their parents in the level above
        levels: list[tuple[Tensor, Tensor, Tensor]] = []  # per guess: log probability of its path, parent, token
        for depth in range(plan.block_size - 1):
            mark(DRAFT_TOKENS)
            best = log_probabilities(nodes(tokens, above), plan.params).topk(width, dim=-1)
            children = (likely.unsqueeze(2) + best.values).flatten(1)
            parents = places.repeat_interleave(width, dim=1)
            levels.append((children, parents, self._kept[best.indices].flatten(1)))
            last = depth == plan.block_size - 2 or nodes.room < width
            if last or _enough([level[0] for level in levels], plan.tree_budget):
                break
            likely, chosen = children.topk(width, dim=1)
            above = chosen // width
            tokens, places = levels[-1][2].gather(1, chosen), chosen + sum(level[0].size(1) for level in levels[:-1])
        likely, places, tokens = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        return best_of(anchor, likely, places, tokens, plan.tree_budget, plan.cycle_seconds, plan.calibration)


def _enough(levels: Sequence[Tensor], budget: int) -> bool:
    """Whether no guess behind the last level can be among the `budget` likeliest guesses of any row."""
    so_far = torch.cat([*levels], dim=1)
    if so_far.size(1) < budget:
        return False
    return bool((levels[-1].amax(dim=1) <= so_far.topk(budget, dim=1).values[:, -1]).all())


def load(path: Path, target: Target) -> Eagle3Drafter:
    """Load a folder of any layout."""
    found = read_drafter(path, target.tokenizer.get_vocab() if target.tokenizer else None, target.num_layers)
    sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocab_size": target.vocab_size}
    check_fits(found.config, **sizes)
    if found.borrowed is not None:
        check_borrowed(path, found.borrowed, target)
    return Eagle3Drafter(filled_network(found, Eagle3Network), target, path, owned=True)


DRAFTER = DrafterSpec(
    load,
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    claims=lambda raw: find_layout("eagle3").recognises(raw),
    network=Eagle3Network,
    layouts=("eagle3", "eagle3_speculators"),
    drafter=Eagle3Drafter,
    cost=DraftCost(layers=1, block_size=BLOCK_SIZE, serial=True, head_vocabulary=DRAFT_VOCAB),
)
