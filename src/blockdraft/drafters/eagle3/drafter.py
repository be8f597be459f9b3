"""EAGLE-3 (arXiv 2503.01840): one small layer drafts one token after the other.

The first draft token comes from the target's hidden states, the next ones from the layer's own. The draft is a chain,
or a tree that grows at probable tokens (arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.drafting import draft_chain, log_probabilities
from blockdraft.decode.proposal import Plan, Proposal, SampledPlan, chain
from blockdraft.decode.step_time import best_count
from blockdraft.decode.tree import best_of
from blockdraft.drafters.base import DraftCost, DrafterSpec, RunnerDrafter, filled_network, read_fitting
from blockdraft.drafters.eagle3.network import BLOCK_SIZE, DRAFT_VOCAB, Eagle3Network
from blockdraft.formats import find_layout
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_network import LayeredNetwork
from blockdraft.nn.draft_runner import WIDTH, DraftNodes, DraftRunner
from blockdraft.targets import Target
from blockdraft.timing import CONTEXT, DRAFT_CHOICE, OBSERVE, mark


class Eagle3Drafter(RunnerDrafter):
    """Drafts with an EAGLE-3 network. The embedding is the target's.

    The state has a KV slot for each token of a sequence; see `nn/draft_runner.py`. Entries of draft tokens read the
    network's own hidden states. They are dropped at the end of a step, and accepted tokens are observed with the
    target's hidden states like any other token.

    In a chain, each draft token is the most probable one or, with a `SampledPlan`, sampled from the network's
    distribution under the sequence's sampling parameters, cut to the `SPARSE_SIZE` most probable tokens. With
    `plan.step_seconds` the chain ends as soon as a further token, even one as probable as the last, would not save
    time. A sampled chain does not, because its length must not depend on the sample. A tree continues the `WIDTH` most
    probable nodes of each level with `WIDTH` children each, and proposes the most probable of all nodes.

    Args:
        network: Draft network, which is moved to the target's device and dtype.
        target: Target that the network was trained for.
        path: Folder or file that the network was read from.
        owned: As in `Target.runner`.
    """

    chooses_tree_size = chooses_length = True

    def __init__(self, network: LayeredNetwork, target: Target, path: Path | None = None, owned: bool = False) -> None:
        self.network = network.to(target.device, target.dtype).eval()
        self.config, self.path = network.config, path
        self.target_layers, self.block_size = self.config.target_layers, self.config.block_size
        self.target, self._own_kept = target, self.network.kept
        self.runner: DraftRunner = target.runner(self.network, owned=owned)

    @property
    def kept(self) -> Tensor:
        """Ids of the tokens that logits are about."""
        grown = self.runner.grown_vocabulary
        return self._own_kept if grown is None else grown

    @property
    def slots_beside(self) -> int:
        return self.runner.slots_beside(self.block_size, WIDTH)

    @torch.no_grad()
    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        assert hidden_states is not None
        mark(OBSERVE)
        self.runner.observe(state, tokens, hidden_states)
        mark(CONTEXT)
        state.commit([range(length) for length in lengths])

    @torch.no_grad()
    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        if plan.block_size == 1:
            return chain(anchor[:, None])
        width = 0 if isinstance(plan, SampledPlan) else min(WIDTH, plan.tree_budget, len(self.kept))
        if not width:
            return self._chain(state, anchor, plan)
        nodes = self.runner.nodes(state, plan.block_size, width, plan.draft_window)
        return self._tree(nodes, anchor, plan, width)

    def _chain(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        draws = plan.uniforms if isinstance(plan, SampledPlan) else None
        seconds = plan.step_seconds if draws is None else None
        most = plan.block_size - 1 if seconds is None else min(plan.block_size, len(seconds)) - 1
        plain = draws is None and (seconds is None or all(params.temperature in (0, 1) for params in plan.params))
        drafted = (
            self.runner.chain(state, anchor, most, plan.draft_window, seconds, plan.calibration)
            if plain and most
            else None
        )
        if drafted is not None:
            tokens, expected = drafted
            accepted = None if expected is None else tuple(expected.tolist())
            return Proposal(tokens, chain(tokens).parents, expected=accepted)
        nodes = self.runner.nodes(state, plan.block_size, 1, plan.draft_window)
        rooms = [plan.block_size - 1] * len(anchor)
        return draft_chain(anchor, plan, rooms, lambda tokens: nodes(tokens[:, None])[:, 0], self.kept)

    def _tree(self, nodes: DraftNodes, anchor: Tensor, plan: Plan, width: int) -> Proposal:
        # Of the nodes continued last: log probabilities of their paths, and their indices among all nodes.
        likely = torch.zeros(len(anchor), 1, device=anchor.device)
        tokens, places = anchor[:, None], torch.full((len(anchor), 1), -1, device=anchor.device)
        above = None  # indices of their parents in the level above
        levels: list[tuple[Tensor, Tensor, Tensor]] = []  # per node: log probability of its path, parent, token
        for depth in range(plan.block_size - 1):
            mark(DRAFT_CHOICE)
            best = log_probabilities(nodes(tokens, above), plan.params).topk(width, dim=-1)
            children = (likely.unsqueeze(2) + best.values).flatten(1)
            parents = places.repeat_interleave(width, dim=1)
            levels.append((children, parents, self.kept[best.indices].flatten(1)))
            if depth == plan.block_size - 2 or nodes.room < width:
                break
            count = num_continued([level[0] for level in levels], children + best.values.flatten(1), plan, width)
            if not count:
                break
            likely, chosen = children.topk(count, dim=1)
            above = chosen // width
            tokens, places = levels[-1][2].gather(1, chosen), chosen + sum(level[0].size(1) for level in levels[:-1])
        likely, places, tokens = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        return best_of(anchor, likely, places, tokens, plan.tree_budget, plan.step_seconds, plan.calibration)


def num_continued(levels: Sequence[Tensor], following: Tensor, plan: Plan, width: int) -> int:
    """Return how many nodes of the last level a tree is continued from, at most `width`; 0 ends it.

    A child is no likelier than its parent. So nodes outside the tree have no children inside it, where the tree is the
    `plan.tree_budget` most probable nodes so far or, with `plan.step_seconds`, those that pay. It ends where no child
    of the last level would pay either, if it were accepted as often as its parent.

    Args:
        levels: Log probabilities `[B, N]` of the paths to the nodes of each level.
        following: The same for the likeliest child of each node of the last level, `[B, N]`, if it is accepted as often
            as its parent.
    """
    nodes = torch.cat([*levels], dim=1)
    best = nodes.topk(min(plan.tree_budget + 1, nodes.size(1)), dim=1).values
    count = plan.tree_budget
    if plan.step_seconds is not None:
        count = best_count(best[:, :count].exp().tolist(), plan.step_seconds, plan.calibration)
    if count >= best.size(1):
        return width
    outside: list[float] = best[:, count].tolist()  # the likeliest node outside the tree
    if plan.step_seconds is not None:
        likeliest = following.amax(dim=1).tolist()
        if all(log_prob <= limit for log_prob, limit in zip(likeliest, outside, strict=True)):
            return 0
    last: list[list[float]] = levels[-1].tolist()
    counts = [sum(log_prob > limit for log_prob in row) for row, limit in zip(last, outside, strict=True)]
    return min(max(counts), width)


def load_eagle3(path: Path, target: Target) -> Eagle3Drafter:
    return Eagle3Drafter(filled_network(read_fitting(path, target), Eagle3Network), target, path, owned=True)


DRAFTER = DrafterSpec(
    load_eagle3,
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    claims=lambda raw: find_layout("eagle3").recognises(raw),
    network=Eagle3Network,
    layouts=("eagle3", "eagle3_speculators"),
    drafter=Eagle3Drafter,
    cost=DraftCost(layers=1, block_size=BLOCK_SIZE, serial=True, head_vocabulary=DRAFT_VOCAB),
)
