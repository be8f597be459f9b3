"""The block mask, against its definition written out for one pair of tokens."""

import pytest
import torch

from blockdraft.diffusion.mask import block_causal, training_mask


def may_see(query: int, key: int, length: int, size: int) -> bool:
    """Whether one place of `[x_t ; x_0]` may attend to another one."""
    own_block, other_block = query % length // size, key % length // size
    is_noisy, other_is_noisy = query < length, key < length
    if is_noisy and other_is_noisy:
        return own_block == other_block
    if is_noisy:
        return other_block < own_block
    return not other_is_noisy and other_block <= own_block


@pytest.mark.parametrize(("length", "size"), [(8, 1), (8, 2), (8, 4), (8, 8), (7, 3), (5, 9), (1, 1)])
def test_mask_is_its_definition(length: int, size: int) -> None:
    places = range(2 * length)
    slow = torch.tensor([[may_see(query, key, length, size) for key in places] for query in places])
    assert torch.equal(training_mask(length, size), slow)
    assert torch.equal(block_causal(length, size), slow[length:, length:])


def test_share_of_the_mask() -> None:
    """At 1024 tokens in blocks of 16, about a quarter of the square: one attention over the length."""
    assert training_mask(1024, 16).float().mean().item() == pytest.approx(0.2539, abs=1e-4)
