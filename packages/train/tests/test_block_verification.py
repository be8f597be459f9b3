"""What the objective says of the target's texts, in the mean, against block verification over all paths."""

from collections.abc import Callable
from itertools import product
from math import exp, prod

import pytest
import torch
from torch.nn.functional import pad

from blockdraft_train.objectives import Slots, find_objective

Distribution = list[float]
Logits = dict[tuple[int, ...], Distribution]  # of the token behind a path
VOCAB, DEPTH = 3, 3
OBJECTIVE = find_objective("block_verification")


def softmax(logits: Distribution) -> Distribution:
    powers = [exp(x) for x in logits]
    return [x / sum(powers) for x in powers]


def expected_length(p: Logits, q: Logits, depth: int) -> float:
    """By the algorithm of arXiv 2403.10444: draft token i is the last accepted if its test is the last to succeed."""
    total = 0.0
    for path in product(range(VOCAB), repeat=depth):
        p_of, q_of = ([softmax(dist[path[:i]]) for i in range(depth + 1)] for dist in (p, q))
        ratio, acceptance_probs = 1.0, list[float]()
        for i, token in enumerate(path, 1):
            ratio = min(1.0, ratio * p_of[i - 1][token] / q_of[i - 1][token])
            left = sum(max(ratio * a - b, 0) for a, b in zip(p_of[i], q_of[i], strict=True))
            acceptance_probs.append(ratio if i == depth or ratio == 1 else left / (left + 1 - ratio))
        lengths = [
            i * acceptance_probs[i - 1] * prod(1 - later for later in acceptance_probs[i:]) for i in range(1, depth + 1)
        ]
        total += prod(q_of[i][token] for i, token in enumerate(path)) * sum(lengths)
    return total


def random_distributions(seed: int, seen: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Logits:
    """A distribution behind each path, of what is `seen` of the path."""
    random = torch.Generator().manual_seed(seed)
    paths = [path for depth in range(DEPTH + 1) for path in product(range(VOCAB), repeat=depth)]
    sampled = {seen(path): (1.5 * torch.randn(VOCAB, generator=random)).tolist() for path in paths}
    return {path: sampled[seen(path)] for path in paths}


# The target's distributions look at the whole path. A drafter's look at the place alone (DFlash), at the token before
# as well (DSpark), or at everything (EAGLE-3).
TARGET = random_distributions(0, lambda path: path)
DRAFTERS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "slots": lambda path: (len(path),),
    "pairs": lambda path: (len(path), *path[-1:]),
    "paths": lambda path: path,
}


def by_text(dists: Logits, depth: int) -> torch.Tensor:
    """The logits `[T, K, V]` of the K slots of all T texts of this length."""
    texts = product(range(VOCAB), repeat=depth)
    return torch.tensor([[dists[text[:k]] for k in range(depth)] for text in texts])


def mean_over_texts(q_TKV: torch.Tensor) -> torch.Tensor:
    """What the target's own texts say, each as often as the target writes it."""
    depth = q_TKV.size(1)
    tokens_TK = torch.tensor(list(product(range(VOCAB), repeat=depth)))
    p_TKV, taught_TK = by_text(TARGET, depth), torch.ones_like(tokens_TK, dtype=torch.bool)
    slots = Slots(torch.zeros(*tokens_TK.shape, 1), q_TKV, pad(tokens_TK, (1, 0)), taught_TK, p_TKV)
    acceptance_probs_T = p_TKV.double().softmax(-1).gather(-1, tokens_TK.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
    return (acceptance_probs_T * (1 - OBJECTIVE.losses(slots).double()).sum(dim=-1)).sum()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_mean_over_the_targets_texts_is_the_expected_length(kind: str, depth: int) -> None:
    q = random_distributions(1, DRAFTERS[kind])
    assert float(mean_over_texts(by_text(q, depth))) == pytest.approx(expected_length(TARGET, q, depth), rel=1e-5)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_gradients_mean_is_the_gradient_of_the_expected_length(kind: str) -> None:
    seen, step = DRAFTERS[kind], 1e-5
    q = random_distributions(1, seen)
    q_TKV = by_text(q, DEPTH).requires_grad_()
    mean_over_texts(q_TKV).backward()
    assert q_TKV.grad is not None
    texts = list(product(range(VOCAB), repeat=DEPTH))
    for dist in {seen(path) for path in q if len(path) < DEPTH}:
        at = [(t, k) for t, text in enumerate(texts) for k in range(DEPTH) if seen(text[:k]) == dist]
        gradient_V = torch.stack([q_TKV.grad[place] for place in at]).sum(dim=0)
        for token in range(VOCAB):
            sides = []
            for change in (step, -step):
                moved = {path: [*logits] for path, logits in q.items()}
                for path, logits in moved.items():
                    if seen(path) == dist:
                        logits[token] += change
                sides.append(expected_length(TARGET, moved, DEPTH))
            assert float(gradient_V[token]) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-3, abs=1e-5)


def test_going_uphill_makes_a_drafter_that_sees_the_path_the_target() -> None:
    texts = list(product(range(VOCAB), repeat=2))
    seen = sorted({text[:k] for text in texts for k in range(2)})
    places_TK = torch.tensor([[seen.index(text[:k]) for k in range(2)] for text in texts])
    logits = torch.zeros(len(seen), VOCAB, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        (-mean_over_texts(logits[places_TK])).backward()
        optimizer.step()
    assert 1.9 < float(mean_over_texts(logits[places_TK].detach())) < 2.001


def test_far_apart_distributions_have_finite_losses_and_gradients() -> None:
    far = torch.tensor([[200.0, -200.0, 0.0]]).repeat(16, 1)[None]
    logits = far.clone().requires_grad_()
    for token in range(VOCAB):  # on a text that only the drafter, only the target, or neither expects
        tokens = torch.full((1, 17), token)
        losses = OBJECTIVE.losses(Slots(torch.zeros(1, 16, 1), logits, tokens, torch.ones(1, 16).bool(), -far))
        losses.sum().backward()
        assert logits.grad is not None
        assert losses.isfinite().all() and logits.grad.isfinite().all() and losses.min() >= 0 and losses.max() <= 1
