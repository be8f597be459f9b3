"""Draft tokens of Medusa's heads: the hidden state they read, the token each draft tokens, and trees."""

from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from blockdraft.decode.proposal import Plan, Proposal, TreePlan
from blockdraft.drafters import drafter_of, load_drafter
from blockdraft.drafters.base import read_network
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_medusa.drafter import MedusaDrafter
from blockdraft_medusa.network import MedusaConfig, MedusaNetwork

PROMPT = [7, 60, 33, 12, 9, 21]


@pytest.fixture(scope="module", params=["compiled", "uncompiled"])
def target(tiny_target_dir: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(tiny_target_dir, backend="native", compile="on" if request.param == "compiled" else "off")


@pytest.fixture(scope="module")
def drafter(target: Target, tiny_medusa_dir: Path) -> MedusaDrafter:
    drafter = load_drafter(tiny_medusa_dir, target=target)
    assert isinstance(drafter, MedusaDrafter) and (drafter.compile_reason is None) == (target.compiled is not None)
    return drafter


@pytest.fixture(scope="module")
def distributions(tiny_target_dir: Path, tiny_medusa_dir: Path) -> "Distributions":
    return Distributions(tiny_target_dir, tiny_medusa_dir)


class Distributions:
    """Distributions of each head after a text, computed from the files alone."""

    def __init__(self, target: Path, heads: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target).eval()
        self._tensors = torch.load(heads / "medusa_lm_head.pt", weights_only=True)

    @torch.no_grad()
    def __call__(self, text: list[int]) -> Tensor:
        """Probabilities `[3, V]` of the three tokens behind the anchor that follows the text."""
        last = self.model.model(torch.tensor([text])).last_hidden_state[0, -1]
        actual = []
        for head in "012":
            x = last
            for block in "01":
                linear = f"{head}.{block}.linear"
                x = x + F.silu(self._tensors[f"{linear}.weight"] @ x + self._tensors[f"{linear}.bias"])
            actual.append((self._tensors[f"{head}.2.weight"] @ x).softmax(dim=-1))
        return torch.stack(actual)


class Watched(MedusaDrafter):
    """Records proposals, and the number of tokens before each."""

    def __init__(self, network: MedusaNetwork, target: Target) -> None:
        super().__init__(network, target)
        self.seen: list[tuple[list[int], Proposal]] = []

    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        self.seen.append((state.lengths, super().propose(state, anchor, plan)))
        return self.seen[-1][1]


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_each_head_drafts_its_token_from_the_last_hidden_state(
    backend: str, distributions: Distributions, tiny_medusa_dir: Path, tiny_target_dir: Path
) -> None:
    target = load_target(tiny_target_dir, backend=backend)
    watched = Watched(read_network(tiny_medusa_dir, target, MedusaNetwork), target)
    [answer] = Engine(watched.target, watched, drafting=Drafting(None)).generate(
        [PROMPT], SamplingParams(12, ignore_eos=True)
    )
    text = PROMPT + answer.token_ids
    assert sum(proposal.tokens.size(1) == 4 for _, proposal in watched.seen) > 5
    for [length], proposal in watched.seen:
        anchor, *draft_tokens = proposal.tokens[0].tolist()
        assert anchor == text[length]
        assert draft_tokens == distributions(text[:length]).argmax(dim=-1).tolist()[: len(draft_tokens)]


def test_the_network_of_a_folder_drafts_like_its_drafter(
    drafter: MedusaDrafter, tiny_medusa_dir: Path, target: Target
) -> None:
    again = drafter_of(read_network(tiny_medusa_dir, target, MedusaNetwork), target)
    if drafter.compile_reason is None:
        with pytest.raises(UsageError, match="weights of this network were packed and freed"):
            drafter_of(drafter.network, target)
    assert (again.compile_reason is None) == (drafter.compile_reason is None)
    answers = [
        Engine(target, each, drafting=Drafting(None)).generate([PROMPT], SamplingParams(12, ignore_eos=True))[0]
        for each in (drafter, again)
    ]
    assert answers[0].token_ids == answers[1].token_ids and answers[0].stats.committed == answers[1].stats.committed


def test_draft_tokens_are_those_of_heads_that_know_the_answer(target: Target) -> None:
    """Heads that draft what the target's head says k tokens later: all their draft tokens are accepted."""
    [plain] = Engine(target, load_drafter("none", target=target)).generate(
        [PROMPT], SamplingParams(13, ignore_eos=True)
    )
    text = PROMPT + plain.token_ids
    cache = target.new_cache(1, len(text))
    tokens = torch.tensor([text])
    parents = torch.arange(-1, len(text) - 1)[None]
    states = target.forward(tokens, parents, cache, [target.num_layers]).hidden_states
    assert states is not None
    network = MedusaNetwork(MedusaConfig(target.hidden_size, target.vocab_size, target.num_layers, num_heads=2))
    wanted = range(len(PROMPT) - 1, len(text) - 3)
    inputs = states[0, wanted]
    with torch.no_grad():
        for k, head in enumerate(network.projections()):
            network[k][0].linear.bias.zero_()  # so that the block changes nothing
            labels = F.one_hot(torch.tensor([text[place + 2 + k] for place in wanted]), target.vocab_size).float()
            head.weight.copy_((torch.linalg.pinv(inputs) @ labels).T)
    [completion] = Engine(target, MedusaDrafter(network, target), drafting=Drafting(None)).generate(
        [PROMPT], SamplingParams(13, ignore_eos=True)
    )
    assert completion.token_ids == plain.token_ids
    assert completion.stats.committed[:3] == [3, 3, 3]


def test_a_tree_holds_the_likeliest_paths(distributions: Distributions, drafter: MedusaDrafter) -> None:
    state = drafter.new_state(1, 40)
    hidden = distributions.model.model(torch.tensor([PROMPT])).last_hidden_state.detach()
    drafter.observe(state, torch.tensor([PROMPT]), hidden, [len(PROMPT)])
    proposal = drafter.propose(state, torch.tensor([5]), TreePlan(4, [SamplingParams()], 9))
    probs, best = distributions(PROMPT).topk(9, dim=-1)
    ranks = [path for depth in (1, 2, 3) for path in product(range(9), repeat=depth)]
    likeliest = sorted(ranks, key=lambda path: -prod(float(probs[depth, rank]) for depth, rank in enumerate(path)))[:9]
    expected = {tuple(int(best[depth, rank]) for depth, rank in enumerate(path)) for path in likeliest}
    parents, tokens, paths = proposal.parents[0].tolist(), proposal.tokens[0].tolist(), [()]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    assert {*paths[1:]} == expected and len({len(path) for path in expected}) > 1


def test_a_head_that_is_the_targets(target: Target, tmp_path: Path) -> None:
    config = MedusaConfig(target.hidden_size, target.vocab_size, target.num_layers, num_heads=2, shared_head=True)
    network = MedusaNetwork(config)
    hidden = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = network.logits(network(hidden), target.head)
        expected = target.head(hidden + F.silu(network[1][0].linear.bias))  # a new block multiplies by zero
    torch.testing.assert_close(logits[:, 1], expected)
    drafting = Drafting(tree_budget=6)
    [answer] = Engine(target, MedusaDrafter(network, target), drafting=drafting).generate([PROMPT], SamplingParams(9))
    [plain] = Engine(target, load_drafter("none", target=target)).generate([PROMPT], SamplingParams(9))
    assert answer.token_ids == plain.token_ids
