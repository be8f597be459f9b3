"""Sampling tokens, and random numbers."""

import torch

from blockdraft.decode.sampling import RandomNumbers, draw


def test_draw_follows_the_distribution_and_never_draws_what_has_no_mass() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    sampled = draw(probs.expand(1, count, -1), uniforms[None])
    torch.testing.assert_close(torch.bincount(sampled[0], minlength=6) / count, probs, atol=1e-3, rtol=0)
    edges = torch.tensor([[0.0, 1 - 2**-53]], dtype=torch.float64)
    assert draw(probs.expand(1, 2, -1), edges).tolist() == [[1, 4]]


def test_random_numbers_belong_to_positions() -> None:
    numbers, same = RandomNumbers(7), RandomNumbers(7)
    assert numbers.at([3, 4]).tolist() == same.at([4, 3]).tolist()[::-1]
    assert numbers.at(range(10)).tolist() != RandomNumbers(8).at(range(10)).tolist()
    late = same.at([700])  # asked for early or late, in one go or many
    assert float(RandomNumbers(7).at(range(701))[700]) == float(late)


def test_fresh_numbers_belong_to_a_step() -> None:
    numbers, same = RandomNumbers(7), RandomNumbers(7)
    numbers.at(range(5))
    assert numbers.fresh(3, 6).tolist() == same.fresh(3, 6).tolist()
    assert numbers.fresh(3, 4).tolist() == same.fresh(3, 6).tolist()[:4]
    streams = torch.stack([RandomNumbers(seed).fresh(start, 999) for seed in (7, 8) for start in (0, 1, 2)])
    streams = torch.cat([streams, RandomNumbers(7).at(torch.arange(999))[None]])
    assert streams.dtype == torch.float64 and float(streams.min()) >= 0 and float(streams.max()) < 1
    assert float((torch.corrcoef(streams) - torch.eye(len(streams))).abs().max()) < 0.15
    unseeded = RandomNumbers(None)
    assert unseeded.fresh(0, 3).tolist() == unseeded.fresh(0, 3).tolist() != RandomNumbers(None).fresh(0, 3).tolist()
