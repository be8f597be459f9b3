"""The block mask, against its definition written out for one pair of tokens."""

from typing import Any

import pytest
import torch

from blockdraft.diffusion.mask import block_causal, flex_mask, training_mask, training_rule


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


@pytest.mark.parametrize(("length", "size"), [(8, 1), (8, 4), (8, 8), (7, 3), (5, 9)])
def test_the_rule_of_flex_attention_is_the_mask(length: int, size: int) -> None:
    rule, places, none = training_rule(length, size), torch.arange(2 * length), torch.tensor(0)
    assert torch.equal(rule(none, none, places[:, None], places[None, :]), training_mask(length, size))


@pytest.mark.filterwarnings("ignore")  # that it is slow where it is not compiled
@torch.no_grad()
def test_flex_attention_is_the_dense_mask(model_of: Any) -> None:
    network, length = model_of(4).network, 64
    tokens = torch.randint(5, 200, (2, 2 * length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).repeat(2)[None]
    dense = network.hidden(tokens, positions, training_mask(length, 4)[None])
    flex = network.hidden(tokens, positions, flex_mask(length, 4, torch.device("cpu")))
    assert torch.allclose(dense, flex, atol=1e-4)
    assert not torch.allclose(dense, network.hidden(tokens, positions, training_mask(length, 8)[None]), atol=1e-4)
