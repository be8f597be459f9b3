"""Block cache: the states are those of a pass over the whole sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft_diffusion.block_cache import BlockCache
from blockdraft_diffusion.losses import block_causal
from blockdraft_diffusion.model import DiffusionModel

MASK = 3  # of the tiny tokenizer


def uncached(model: DiffusionModel, tokens: Tensor) -> Tensor:
    """Return the states that predict the last block, from a pass over the whole sequence."""
    length, size = len(tokens), model.config.block_size
    positions, visible = torch.arange(length)[None], block_causal(length, size)[None]
    states = model.network.hidden(tokens[None], positions, visible)[0]
    return states[-size - 1 : -1] if model.config.token_shift else states[-size:]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("size", [1, 4])
@torch.no_grad()
def test_cached_states_are_uncached_states(model_of: Any, size: int, shift: bool) -> None:
    """Sequences of different lengths, prefilled in chunks, in passes that complete some of them and not others."""
    model, generator = model_of(size, shift), torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 200, (length,), generator=generator) for length in (12, 4, 20)]
    cache = BlockCache(model, 3, 40, prefill_chunk=8)
    for index, text in enumerate(texts):
        cache.prefill(index, text.tolist())
    indices = [0, 1, 2]
    for step in range(4):
        blocks = torch.randint(5, 200, (len(indices), size), generator=generator)
        complete = [(index + step) % 2 == 0 for index in indices]
        for b, is_complete in enumerate(complete):
            if not is_complete:
                blocks[b, torch.rand(size, generator=generator) < 0.5] = MASK
        states = cache.forward(indices, blocks, complete)
        for b, index in enumerate(indices):
            expected = uncached(model, torch.cat([texts[index], blocks[b]]))
            assert torch.allclose(model.network.logits(states[b]), model.network.logits(expected), atol=1e-4)
            if complete[b]:
                texts[index] = torch.cat([texts[index], blocks[b]])
            assert cache.length(index) == len(texts[index])
        if step == 1:
            indices = [2, 0]  # one sequence leaves, and the others change places


def test_token_shift_predicts_the_first_token_without_a_pass(model_of: Any) -> None:
    model = model_of(4, True)
    cache = BlockCache(model, 1, 16)
    assert not cache.predicts_first(0)
    cache.prefill(0, [5, 6, 7, 8])
    assert cache.predicts_first(0)
    states = cache.forward([0], torch.full((1, 4), MASK), [False])
    assert torch.equal(cache.first_state(0), states[0, 0])
    cache.clear(0)
    assert cache.length(0) == 0 and not cache.predicts_first(0)
    assert not BlockCache(model_of(4, False), 1, 16).predicts_first(0)
