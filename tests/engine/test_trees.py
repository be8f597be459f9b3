"""Decoding with draft trees equals decoding plainly, for batches, sampling, stop tokens and exact lengths."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.decode.tree import best_first
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Completion, Engine, mean_tau
from blockdraft.targets import Cache, Target, load_target
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[5 + i, 9, *range(20, 20 + 3 * i % 7), 17 - i] for i in range(16)]
BLOCK_SIZE, RANKS = 8, 4


class Oracle(Drafter):
    """Asks the target for its next tokens, and hides each at a random rank among wrong draft tokens of its depth."""

    target_layers: tuple[int, ...] = ()
    block_size = BLOCK_SIZE

    def __init__(self, target: Target, worst_rank: int) -> None:
        self.target, self.worst_rank = target, worst_rank
        self.generator = torch.Generator().manual_seed(0)

    def new_state(self, batch: int, capacity: int) -> Cache:
        return self.target.new_cache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return self.target.cache_bytes(batch, capacity)

    def weight_bytes(self) -> int:
        return 0

    def propose(self, state: Cache, anchor: Tensor, plan: Plan) -> Proposal:
        tokens = anchor[:, None]
        for _ in range(plan.block_size - 1):
            logits = self.target.forward(tokens, chain(tokens).parents, state).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=-1)], dim=1)
        right = tokens[:, 1:, None]
        ids = (right + torch.arange(RANKS)) % self.target.vocab_size
        at = torch.randint(self.worst_rank + 1, right.shape, generator=self.generator)
        ids[:, :, :1] = ids.gather(2, at)
        ids.scatter_(2, at, right)
        spread = torch.rand(ids.shape, generator=self.generator).sort(dim=-1, descending=True).values
        return best_first(anchor, (3 * spread).log_softmax(dim=-1), ids, plan.tree_budget)

    def observe(self, state: Cache, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        self.target.forward(tokens, chain(tokens).parents, state)
        state.commit([range(length) for length in lengths])


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(params=["random", "oracle", "hidden"])
def drafter(request: pytest.FixtureRequest, target: Target, tiny_drafter_dir: Path) -> Drafter:
    if request.param == "random":
        return load_drafter(tiny_drafter_dir, target=target)
    return Oracle(target, worst_rank=0 if request.param == "oracle" else RANKS - 1)


def decode(
    target: Target, drafter: Drafter, tree_budget: int, prompts: list[list[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    engine = Engine(target, drafter, max_batch_size=16, drafting=Drafting(tree_budget=tree_budget))
    return engine.generate(prompts, params)


def plain(target: Target, prompts: list[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [c.token_ids for c in decode(target, NoDrafter(), 0, prompts, params)]


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_greedy_trees_change_nothing_and_lengths_are_exact(target: Target, drafter: Drafter, batch: int) -> None:
    params = [SamplingParams(25 - 5 * row % 23, ignore_eos=True) for row in range(batch)]
    completions = decode(target, drafter, 32, PROMPTS[:batch], params)
    assert [c.token_ids for c in completions] == plain(target, PROMPTS[:batch], params)
    assert [len(c.token_ids) for c in completions] == [p.max_new_tokens for p in params]
    if isinstance(drafter, Oracle):
        tau = mean_tau([c.stats for c in completions])
        assert tau > 3.5 if drafter.worst_rank == 0 else tau > 1.5
        assert all(max(c.stats.committed) <= BLOCK_SIZE for c in completions)


@pytest.mark.parametrize("budget", [1, 5, 200])
def test_trees_of_any_size_change_nothing(target: Target, budget: int) -> None:
    params = [SamplingParams(14, ignore_eos=True)] * 2
    completions = decode(target, Oracle(target, worst_rank=2), budget, PROMPTS[:2], params)
    assert [c.token_ids for c in completions] == plain(target, PROMPTS[:2], params)


@pytest.mark.parametrize("shape", [{"temperature": 0.8}, {"temperature": 1.2, "top_k": 9, "top_p": 0.9}])
def test_the_same_seed_gives_the_same_tokens_with_tree_chain_and_none(
    target: Target, tiny_drafter_dir: Path, shape: dict[str, float]
) -> None:
    params = [SamplingParams(20, seed=row, ignore_eos=True, **shape) for row in range(3)]  # type: ignore[arg-type]
    params[1] = SamplingParams(20, ignore_eos=True)  # greedy among sampled
    expected = plain(target, PROMPTS[:3], params)
    network = load_drafter(tiny_drafter_dir, target=target)
    for drafter, budget in ((network, 0), (network, 32), (Oracle(target, 1), 32)):
        completions = decode(target, drafter, budget, PROMPTS[:3], params)
        assert [c.token_ids for c in completions] == expected
    assert mean_tau([c.stats for c in completions]) > 1.2  # the oracle is right often enough to matter


@pytest.mark.parametrize("worst_rank", [0, 2])
def test_a_stop_token_inside_an_accepted_path_ends_the_answer(target: Target, worst_rank: int) -> None:
    [answer] = plain(target, PROMPTS[:1], [SamplingParams(12, ignore_eos=True)])
    inside = 0
    for index in (i for i in range(1, 12) if answer[i] not in answer[:i]):
        params = [SamplingParams(12, stop_token_ids=(answer[index],), ignore_eos=True)]
        [completion] = decode(target, Oracle(target, worst_rank), 32, PROMPTS[:1], params)
        assert completion.token_ids == answer[: index + 1] and completion.finish_reason == "stop"
        inside += completion.drafted[-1]
    assert inside > 0


def test_forward_after_committing_a_path_of_a_tree_equals_forward_from_scratch(target: Target) -> None:
    """Rows of different lengths, each with a best-first tree of its own, for several steps."""
    generator = torch.Generator().manual_seed(0)
    history, cache = [PROMPTS[1], PROMPTS[2]], target.new_cache(2, 200)
    longest = max(len(ids) for ids in history)
    prompts = chain(torch.tensor([ids + [0] * (longest - len(ids)) for ids in history]))
    target.forward(prompts.tokens, prompts.parents, cache)
    cache.commit([range(len(ids)) for ids in history])
    for _ in range(4):
        anchor = torch.randint(40, (2,), generator=generator)
        dists = torch.randn(2, 6, 10, generator=generator).log_softmax(dim=-1).sort(dim=-1, descending=True)
        tree = best_first(anchor, dists.values, dists.indices, 40)
        output = target.forward(tree.tokens, tree.parents, cache)
        paths = []
        for row, ids in enumerate(history):
            path = [int(torch.randint(1, 41, (), generator=generator))]
            while path[0]:
                path.insert(0, int(tree.parents[row, path[0]]))
            paths.append(path)
            history[row] = [*ids, *tree.tokens[row, path].tolist()]
            tokens = chain(torch.tensor([history[row]]))
            scratch = target.forward(tokens.tokens, tokens.parents, target.new_cache(1, 200)).logits
            torch.testing.assert_close(output.logits[row, path], scratch[0, -len(path) :], atol=2e-5, rtol=1e-4)
        cache.commit(paths)
    assert cache.lengths == [len(ids) for ids in history]
