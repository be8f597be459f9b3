"""Best-first trees against their definition, the best of all sets of paths that contain their own beginnings."""

from itertools import combinations, product
from math import prod

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import Proposal, depths
from blockdraft.decode.step_time import best_count
from blockdraft.decode.tree import best_first, best_of, best_tree, lattice_tree

ANCHOR = torch.tensor([7])


def dists(depth: int, vocabulary: int, seed: int, spread: float = 2.0, batch: int = 1) -> Tensor:
    """Random log probabilities `[B, D, V]`; a wide spread makes peaked distributions."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(batch, depth, vocabulary, generator=generator)).log_softmax(dim=-1)


def build(log_probs: Tensor, budget: int, step_seconds: list[float] | None = None) -> Proposal:
    ranked = log_probs.sort(dim=-1, descending=True)
    anchor = ANCHOR.expand(len(log_probs))
    return best_first(anchor, ranked.values, ranked.indices, budget, step_seconds)


def path_probs(proposal: Proposal, log_probs: Tensor, row: int = 0) -> list[float]:
    """Probability of the path of each draft token, without anchor and padding."""
    parents, tokens = proposal.parents[row].tolist(), proposal.tokens[row].tolist()
    scores, depth = [1.0], depths(proposal.parents)[row].tolist()
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            scores.append(scores[parents[node]] * log_probs[row, depth[node] - 1, tokens[node]].exp().item())
    return scores[1:]


def best_expected_length(log_probs: Tensor, budget: int) -> float:
    """The readable twin: the best of all sets of `budget` paths that are trees."""
    probs = log_probs[0].exp().tolist()
    depth, vocabulary = len(probs), len(probs[0])
    paths = [path for length in range(1, depth + 1) for path in product(range(vocabulary), repeat=length)]
    value = {path: prod(probs[i][token] for i, token in enumerate(path)) for path in paths}
    return max(
        sum(value[path] for path in tree)
        for tree in combinations(paths, min(budget, len(paths)))
        if all(path[:-1] in {(), *tree} for path in tree)
    )


@pytest.mark.parametrize(("depth", "vocabulary"), [(3, 2), (2, 3), (1, 5)])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7])
def test_no_tree_has_a_larger_expected_length(depth: int, vocabulary: int, budget: int) -> None:
    for seed in range(3):
        log_probs = dists(depth, vocabulary, seed)
        actual = sum(path_probs(build(log_probs, budget), log_probs))
        assert actual == pytest.approx(best_expected_length(log_probs, budget))


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_trees_are_trees(spread: float) -> None:
    log_probs = dists(6, 20, seed=1, spread=spread, batch=3)
    proposal = build(log_probs, 64)
    assert proposal.tokens.shape == (3, 65) and proposal.tokens[:, 0].tolist() == [7] * 3
    assert depths(proposal.parents).max() <= 6
    for row in range(3):
        parents, tokens = proposal.parents[row].tolist(), proposal.tokens[row].tolist()
        assert parents[0] == -1 and all(0 <= parents[node] < node for node in range(1, 65))
        assert len(set(zip(parents, tokens, strict=True))) == 65  # siblings are distinct
        scores = path_probs(proposal, log_probs, row)
        assert all(later <= earlier * (1 + 1e-6) for earlier, later in zip(scores, scores[1:], strict=False))
        alone = build(log_probs[row : row + 1], 64)
        assert alone.parents.tolist() == [parents] and alone.tokens.tolist() == [tokens]


def test_a_smaller_budget_is_a_beginning() -> None:
    log_probs = dists(5, 9, seed=2)
    large = build(log_probs, 40)
    for budget in (1, 3, 17):
        small = build(log_probs, budget)
        assert torch.equal(small.tokens, large.tokens[:, : budget + 1])
        assert torch.equal(small.parents, large.parents[:, : budget + 1])


def test_one_candidate_a_depth_makes_a_chain() -> None:
    best = dists(4, 9, seed=3, batch=2).max(dim=-1, keepdim=True)
    proposal = best_first(torch.tensor([5, 6]), best.values, best.indices, 9)
    assert proposal.parents.tolist() == [[-1, 0, 1, 2, 3]] * 2
    assert proposal.tokens.tolist() == [[5, *best.indices[0, :, 0].tolist()], [6, *best.indices[1, :, 0].tolist()]]
    assert best_first(torch.tensor([5, 6]), best.values, best.indices, 2).parents.tolist() == [[-1, 0, 1]] * 2


def test_impossible_tokens_are_no_candidates_and_rows_are_filled_up() -> None:
    log_probs = dists(2, 3, seed=4, batch=2)
    log_probs[0, 0] = torch.tensor([-torch.inf, 0.0, -torch.inf])
    log_probs[0, 1] = torch.tensor([-torch.inf, -torch.inf, 0.0])
    proposal = build(log_probs, 100)
    assert proposal.tokens.shape == (2, 1 + 3 + 9)  # the second row has all there is
    assert proposal.parents[0].tolist() == [-1, 0, 1] + [-1] * 10
    assert proposal.tokens[0, :3].tolist() == [7, 1, 2]
    nothing = build(torch.full((1, 2, 3), torch.nan), 5)
    assert nothing.tokens.tolist() == [[7]]


def test_step_seconds_cut_all_rows_to_the_count_that_pays_best() -> None:
    log_probs = dists(5, 9, seed=5, batch=2)
    whole = build(log_probs, 30)
    scores = [path_probs(whole, log_probs, row) for row in range(2)]
    counts = set()
    for slope in (0.0, 0.02, 0.2, 5.0):
        seconds = [1 + slope * n for n in range(31)]
        cut = build(log_probs, 30, seconds)
        count = best_count(scores, seconds)
        assert torch.equal(cut.tokens, whole.tokens[:, : count + 1])
        assert torch.equal(cut.parents, whole.parents[:, : count + 1])
        counts.add(count)
    assert len(counts) == 4 and {0, 30} <= counts
    cut = build(log_probs, 30, [1 + 0.2 * n for n in range(31)])
    assert cut.expected == pytest.approx([sum(row[: cut.tokens.size(1) - 1]) for row in scores], rel=1e-5)


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 9.0])
@pytest.mark.parametrize("budget", [1, 5, 30])
def test_as_many_ranks_as_the_budget_are_enough(spread: float, budget: int) -> None:
    log_probs = dists(4, 60, seed=6, spread=spread)
    best = log_probs.topk(budget, dim=-1)
    cut = best_first(ANCHOR, best.values, best.indices, budget)
    lengths = [sum(path_probs(proposal, log_probs)) for proposal in (cut, build(log_probs, budget))]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-6)


@pytest.mark.parametrize("cost", [1e-5, 0.003, 0.03, 0.3, 10.0])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_tree_that_pays_is_the_one_cut_from_the_whole_budget(cost: float, spread: float) -> None:
    """From no draft token at all to the whole budget."""
    log_probs = dists(depth=9, vocabulary=60, seed=3, spread=spread, batch=2)
    seconds = [1 + cost * draft_tokens for draft_tokens in range(301)]
    expected = build(log_probs, 300, seconds)
    actual = best_tree(ANCHOR.expand(2), log_probs, 300, seconds)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)


def test_a_best_tree_keeps_to_its_budget_where_more_would_pay() -> None:
    actual = best_tree(ANCHOR, dists(6, 20, seed=7, spread=0.5), 50, [1.0] * 500)
    assert actual.tokens.shape == (1, 51)


def test_a_larger_tree_is_not_grown_where_a_quarter_of_a_small_one_does_not_pay() -> None:
    seconds = [1.0] * 17 + [9.0] * 20 + [0.1] * 463  # 16 draft tokens pay, and from 37 on far more would
    log_probs = dists(6, 20, seed=7, spread=0.5)
    assert best_tree(ANCHOR, log_probs, 200, seconds).tokens.shape == (1, 17)
    assert best_first(ANCHOR, *log_probs.topk(20), 200, seconds).tokens.shape == (1, 201)


def lattice(depth: int, count: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Random log probabilities `[B, D, K, K]` and tokens `[B, D, K]`."""
    log_probs = dists(depth * count, count + 1, seed, batch=batch)[..., :count].unflatten(1, (depth, count))
    log_probs[:, 0] = log_probs[:, 0, :1]
    return log_probs, torch.stack([100 * d + torch.randperm(count) for d in range(depth)]).expand(batch, -1, -1)


@pytest.mark.parametrize("budget", [1, 4, 9, 200])
def test_a_lattice_tree_holds_the_best_paths(budget: int) -> None:
    """A path is never likelier than its beginnings, so the best tree is that of the best paths."""
    for seed in range(3):
        log_probs, ids = lattice(depth=4, count=3, seed=seed, batch=2)
        proposal = lattice_tree(torch.tensor([7, 8]), log_probs, ids, budget)
        for row in range(2):
            worth: dict[tuple[int, ...], float] = {}
            for length in range(1, 5):
                for path in product(range(3), repeat=length):
                    steps = zip((0, *path), path, strict=False)
                    worth[path] = sum(float(log_probs[row, d, p, k]) for d, (p, k) in enumerate(steps))
            best = sorted(worth, key=lambda path: -worth[path])[:budget]
            nodes: list[tuple[int, ...]] = [()]
            for node in range(1, proposal.tokens.size(1)):
                parent = nodes[proposal.parents[row, node]]
                rank = ids[row, len(parent)].tolist().index(int(proposal.tokens[row, node]))
                nodes.append((*parent, rank))
            assert nodes[1:] == best
            assert int(proposal.tokens[row, 0]) == 7 + row


def test_a_lattice_whose_steps_do_not_depend_on_each_other_is_a_plain_tree() -> None:
    log_probs = dists(5, 6, seed=8, batch=2)
    ids = torch.arange(6).expand(2, 5, 6)
    actual = lattice_tree(ANCHOR.expand(2), log_probs[:, :, None].expand(-1, -1, 6, -1), ids, 50)
    expected = build(log_probs, 50)
    assert torch.equal(actual.tokens, expected.tokens) and torch.equal(actual.parents, expected.parents)


@pytest.mark.parametrize("cost", [1e-5, 0.003, 0.03, 10.0])
def test_a_lattice_tree_that_pays_is_the_one_cut_from_the_whole_budget(cost: float) -> None:
    log_probs, ids = lattice(depth=6, count=5, seed=9, batch=2)
    whole = lattice_tree(ANCHOR.expand(2), log_probs, ids, 200)
    seconds = [1 + cost * draft_tokens for draft_tokens in range(201)]
    cut = lattice_tree(ANCHOR.expand(2), log_probs, ids, 200, seconds)
    worth = []
    for row in range(2):
        worth.append([1.0])
        for node in range(1, 201):
            parent, depth = int(whole.parents[row, node]), int(depths(whole.parents)[row, node]) - 1
            before = 0 if depth == 0 else ids[row, depth - 1].tolist().index(int(whole.tokens[row, parent]))
            rank = ids[row, depth].tolist().index(int(whole.tokens[row, node]))
            worth[row].append(worth[row][parent] * float(log_probs[row, depth, before, rank].exp()))
    count = best_count([row[1:] for row in worth], seconds)
    assert torch.equal(cut.tokens, whole.tokens[:, : count + 1])
    assert torch.equal(cut.parents, whole.parents[:, : count + 1])


def test_impossible_candidates_of_a_lattice_are_left_out() -> None:
    log_probs, ids = lattice(depth=2, count=3, seed=10)
    log_probs[0, 0, :, 1:] = -torch.inf
    log_probs[0, 1, 0, 2] = -torch.inf
    proposal = lattice_tree(ANCHOR, log_probs, ids, 100)
    assert proposal.parents.tolist() == [[-1, 0, 1, 1]]
    nothing = lattice_tree(ANCHOR, torch.full((1, 2, 3, 3), torch.nan), ids, 5)
    assert nothing.tokens.tolist() == [[7]]


def grown(depth: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of two rows, grown level by level: each has `width` children of random acceptance probabilities."""
    generator = torch.Generator().manual_seed(seed)
    log_probs, parents, begin = torch.zeros(2, 0), [-1], 0
    places: list[int] = []
    for level in range(depth):
        new = [parent for parent in parents for _ in range(width)]
        before = torch.zeros(2, len(new)) if level == 0 else log_probs[:, new]
        log_probs = torch.cat([log_probs, before - 3 * torch.rand(2, len(new), generator=generator)], dim=1)
        places += new
        parents, begin = list(range(begin, begin + len(new))), begin + len(new)
    return log_probs, torch.tensor([places, places]), torch.arange(100, 100 + len(places)).expand(2, -1)


@pytest.mark.parametrize("budget", [1, 5, 12, 99])
def test_of_grown_draft_tokens_the_likeliest_are_taken_with_their_parents(budget: int) -> None:
    log_probs, parents, tokens = grown(depth=3, width=3, seed=1)
    log_probs[1, 4:] = -torch.inf
    log_probs[1, 3] = torch.nan
    proposal = best_of(torch.tensor([7, 8]), log_probs, parents, tokens, budget)
    for row, count in enumerate((min(budget, 39), min(budget, 3))):
        kept = log_probs[row].where(~log_probs[row].isnan(), -torch.inf).topk(count).indices.tolist()
        actual, before = proposal.tokens[row].tolist(), proposal.parents[row].tolist()
        assert actual[: 1 + count] == [7 + row, *(100 + draft_token for draft_token in kept)]
        for node in range(1, 1 + count):
            parent = int(parents[row, actual[node] - 100])
            assert actual[before[node]] == (100 + parent if parent >= 0 else 7 + row)
        assert before[1 + count :] == [-1] * (len(before) - 1 - count)


def test_grown_draft_tokens_are_cut_to_those_that_pay() -> None:
    log_probs, parents, tokens = grown(depth=3, width=3, seed=2)
    seconds = [1 + 0.1 * n for n in range(40)]
    cut = best_of(torch.tensor([7, 8]), log_probs, parents, tokens, 39, seconds, calibration=0.8)
    worth = log_probs.exp().sort(dim=-1, descending=True).values.tolist()
    count = best_count(worth, seconds, 0.8)
    assert 0 < count < 39 and cut.tokens.shape == (2, 1 + count)
    assert cut.expected == pytest.approx([sum(row[:count]) for row in worth])


@pytest.mark.parametrize(("calibration", "count"), [(0.5, 1), (1.0, 2), (2.0, 3)])
def test_calibration_decides_how_many_nodes_of_a_grown_tree_pay(calibration: float, count: int) -> None:
    log_probs, parents = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([[-1, -1, -1]])
    seconds = [1.0, 1.1, 1.25, 1.32]
    found = best_of(ANCHOR, log_probs, parents, torch.tensor([[1, 2, 3]]), 3, seconds, calibration)
    assert found.tokens.tolist() == [[7, 1, 2, 3][: 1 + count]]
