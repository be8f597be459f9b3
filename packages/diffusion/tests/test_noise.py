"""Noise: masked tokens and their weights."""

import math
from itertools import pairwise

import pytest
import torch

from blockdraft_diffusion.noise import counted_noise, stratified, training_noise


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_each_stratum_is_sampled_once_in_random_order() -> None:
    numbers = stratified((16, 64), seeded())
    assert sorted((numbers.flatten() * 1024).ceil().long().tolist()) == list(range(1, 1025))
    # The levels of a sequence cover the whole interval, and are not sorted.
    assert (numbers.std(dim=1) > 0.2).all()
    assert any(a > b for a, b in pairwise(numbers[0].tolist()))


@pytest.mark.parametrize("clip", [(0.001, 1.0), (0.3, 0.8), (1.0, 1.0)])
def test_mean_weight_of_a_token_is_1(clip: tuple[float, float]) -> None:
    noise = training_noise(torch.ones(4000, 8, dtype=torch.bool), 2, clip, seeded())
    assert noise.weights.mean().item() == pytest.approx(1, rel=0.06)
    assert torch.equal(noise.weights > 0, noise.masked)
    if clip == (1.0, 1.0):
        assert noise.masked.all()


def test_share_of_masked_tokens_follows_the_interval() -> None:
    noise = training_noise(torch.ones(300, 64, dtype=torch.bool), 64, (0.45, 0.95), seeded())
    shares = noise.masked.float().mean(dim=1)
    assert shares.min() > 0.45 - 0.25 and shares.mean().item() == pytest.approx(0.7, abs=0.02)
    # Each block has its own time, so sequences of many blocks have similar shares.
    many = training_noise(torch.ones(300, 64, dtype=torch.bool), 1, (0.45, 0.95), seeded())
    assert many.masked.float().mean(dim=1).std() < shares.std() / 2


def test_counted_noise() -> None:
    """All numbers of masked tokens are equally likely, and the mean weight of each token is 1."""
    eligible = torch.ones(3000, 7, dtype=torch.bool)
    eligible[:, 0] = False  # the blocks have 3 eligible tokens each
    noise = counted_noise(eligible, 4, seeded())
    assert not noise.masked[:, 0].any()
    assert torch.equal(noise.weights > 0, noise.masked)
    for begin, num_eligible in ((0, 3), (4, 3)):
        counts = noise.masked[:, begin : begin + 4].sum(dim=1)
        assert counts.bincount().tolist() == pytest.approx([0] + [3000 / num_eligible] * num_eligible, abs=150)
        weights = noise.weights[:, begin : begin + 4].sum(dim=1)
        assert torch.allclose(weights, torch.tensor(float(num_eligible)))
    assert torch.allclose(noise.weights.mean(dim=0)[1:], torch.ones(6), atol=0.06)


def test_blocks_of_one_token_are_always_masked() -> None:
    eligible = torch.tensor([[False, True, True, True]])
    noise = counted_noise(eligible, 1, seeded())
    assert torch.equal(noise.masked, eligible) and noise.weights.tolist() == [[0, 1, 1, 1]]


def test_same_seed_same_noise() -> None:
    eligible = torch.ones(4, 8, dtype=torch.bool)
    noise, same, other = (training_noise(eligible, 4, (0.001, 1.0), seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(noise.weights, same.weights) and not torch.equal(noise.weights, other.weights)
    assert math.isfinite(noise.weights.sum())
