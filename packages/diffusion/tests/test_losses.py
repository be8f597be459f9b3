"""Attention mask, states and losses against slow definitions of them."""

from collections.abc import Iterator
from itertools import combinations
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft_diffusion.losses import block_causal, flex_mask, losses, predicting_states, training_mask, training_rule
from blockdraft_diffusion.model import DiffusionModel, hide_mask_token
from blockdraft_diffusion.noise import Noise, counted_noise

MASK = 3  # of the tiny tokenizer


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 200, (batch, length), generator=torch.Generator().manual_seed(seed))


def alone(model: DiffusionModel, tokens: Tensor) -> Tensor:
    """Return the states of one clean text, or of one whose last block is noisy."""
    length = len(tokens)
    visible = block_causal(length, model.config.block_size)[None]
    return model.network.hidden(tokens[None], torch.arange(length)[None], visible)[0]


def slow_states(model: DiffusionModel, noisy: Tensor, clean: Tensor) -> Tensor:
    """Compute `predicting_states` of one sequence block by block."""
    size, blocks = model.config.block_size, []
    for begin in range(0, len(clean), size):
        end = min(begin + size, len(clean))
        states = alone(model, torch.cat([clean[:begin], noisy[begin:end]]))[begin:]
        if model.config.token_shift:
            before = alone(model, clean[:begin])[-1:] if begin else alone(model, clean[:size])[:1]
            states = torch.cat([before, states[:-1]])
        blocks.append(states)
    return torch.cat(blocks)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("shift", [True, False])
@torch.no_grad()
def test_one_pass_equals_a_pass_per_block(model_of, size: int, shift: bool) -> None:
    model, clean = model_of(size, shift), some_tokens(2, 8)
    noisy = clean.masked_fill(torch.rand(clean.shape, generator=torch.Generator().manual_seed(1)) < 0.5, MASK)
    states = predicting_states(model, noisy, clean)
    for row in range(2):
        assert torch.allclose(states[row], slow_states(model, noisy[row], clean[row]), atol=1e-5)


@pytest.mark.parametrize("shift", [True, False])
@torch.no_grad()
def test_losses(model_of, shift: bool) -> None:
    """The loss of a masked token is its weight times -log p, without the mask token; other tokens have loss 0."""
    model, clean = model_of(4, shift), some_tokens(2, 8)
    masked = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0, 0]]).bool()
    weights = torch.rand(2, 8) * masked
    states = predicting_states(model, clean.masked_fill(masked, MASK), clean)
    logits = model.network.logits(states)
    logits[..., MASK] = -torch.inf
    dists = logits.log_softmax(dim=-1)
    expected = -dists.gather(-1, clean[..., None]).squeeze(-1) * weights
    actual = losses(model, clean, Noise(masked, weights))
    assert torch.allclose(actual, expected.masked_fill(~masked, 0), atol=1e-5)
    assert not losses(model, clean, Noise(torch.zeros_like(masked), weights)).any()


def test_gradients_are_those_of_the_loss(model_of) -> None:
    """Recomputing the logits in the backward pass does not change the gradients."""
    model, clean = model_of(4, False), some_tokens(1, 8)
    masked = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1]]).bool()
    table = model.network.model.embed_tokens.weight.requires_grad_(True)
    losses(model, clean, Noise(masked, masked.float())).sum().backward()
    actual = table.grad.clone()
    table.grad = None
    logits = model.network.logits(predicting_states(model, clean.masked_fill(masked, MASK), clean)[masked])
    others = torch.arange(logits.size(-1)) != MASK
    (logits[:, others].logsumexp(dim=-1) - logits.gather(-1, clean[masked][:, None]).squeeze(-1)).sum().backward()
    assert torch.allclose(actual, table.grad, atol=1e-4) and actual.any()


def test_mask_token_has_no_probability() -> None:
    hidden = hide_mask_token(torch.ones(2, 3, dtype=torch.bfloat16), 1)
    assert hidden.dtype == torch.float32 and hidden.softmax(dim=-1).tolist() == [[0.5, 0, 0.5]] * 2


def masks_of(positions: list[int], length: int) -> Iterator[tuple[float, Tensor]]:
    """Yield every way to mask some of these n positions, with the weight of its losses in the bound.

    k masked positions weigh 1 / k in the mean over all choices of them.
    """
    for count in range(1, len(positions) + 1):
        for chosen in combinations(positions, count):
            masked = torch.zeros(1, length, dtype=torch.bool)
            masked[0, list(chosen)] = True
            yield 1 / count / comb(len(positions), count), masked


@torch.no_grad()
def test_mean_over_noise_is_the_bound(model_of) -> None:
    """The mean over noise samples equals the sum over all masks of each block."""
    model, clean = model_of(3, False), some_tokens(1, 6)
    bound = 0.0
    for positions in ([1, 2], [3, 4, 5]):
        for weight, masked in masks_of(positions, 6):
            bound += weight * losses(model, clean, Noise(masked, masked.float())).sum().item()
    eligible = torch.ones(1500, 6, dtype=torch.bool)
    eligible[:, 0] = False
    noise = counted_noise(eligible, 3, torch.Generator().manual_seed(0))
    samples = losses(model, clean.repeat(1500, 1), noise).sum(dim=1)
    error = samples.std().item() / 1500**0.5
    assert samples.mean().item() == pytest.approx(bound, abs=4 * error) and error < 0.02 * bound


def test_invalid_tokens(model_of) -> None:
    model = model_of()
    model.check_tokens([5, 6], "It")
    with pytest.raises(UsageError, match=rf"^It contains the mask token \(id {MASK}\)"):
        model.check_tokens([5, MASK], "It")
    with pytest.raises(UsageError, match="It contains the token id 5000; the model's ids are 0 to 264"):
        model.check_tokens([5000], "It")


def may_attend(query: int, key: int, length: int, size: int) -> bool:
    """Return whether one position of `[x_t ; x_0]` may attend to another."""
    own_block, other_block = query % length // size, key % length // size
    is_noisy, other_is_noisy = query < length, key < length
    if is_noisy and other_is_noisy:
        return own_block == other_block
    if is_noisy:
        return other_block < own_block
    return not other_is_noisy and other_block <= own_block


@pytest.mark.parametrize(("length", "size"), [(8, 1), (8, 2), (8, 4), (8, 8), (7, 3), (5, 9), (1, 1)])
def test_training_mask_matches_its_definition(length: int, size: int) -> None:
    positions = range(2 * length)
    slow = torch.tensor([[may_attend(query, key, length, size) for key in positions] for query in positions])
    assert torch.equal(training_mask(length, size), slow)
    assert torch.equal(block_causal(length, size), slow[length:, length:])


@pytest.mark.parametrize(("length", "size"), [(8, 1), (8, 4), (8, 8), (7, 3), (5, 9)])
def test_flex_attention_rule_is_the_mask(length: int, size: int) -> None:
    rule, positions, none = training_rule(length, size), torch.arange(2 * length), torch.tensor(0)
    assert torch.equal(rule(none, none, positions[:, None], positions[None, :]), training_mask(length, size))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # about uncompiled FlexAttention
@torch.no_grad()
def test_flex_attention_is_the_dense_mask(model_of: Any) -> None:
    network, length = model_of(4).network, 64
    tokens = torch.randint(5, 200, (2, 2 * length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).repeat(2)[None]
    dense = network.hidden(tokens, positions, training_mask(length, 4)[None])
    flex = network.hidden(tokens, positions, flex_mask(length, 4, torch.device("cpu")))
    assert torch.allclose(dense, flex, atol=1e-4)
    assert not torch.allclose(dense, network.hidden(tokens, positions, training_mask(length, 8)[None]), atol=1e-4)
