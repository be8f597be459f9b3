"""Key/value cache of a block-diffusion model: same states as without it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.diffusion import context
from blockdraft.diffusion.context import Context
from blockdraft.diffusion.losses import block_causal
from blockdraft.diffusion.model import DiffusionModel

MASK = 3  # of the tiny tokenizer


def uncached(model: DiffusionModel, tokens: Tensor) -> Tensor:
    """States that predict the last block of a text, from a pass over all of it."""
    length, size = len(tokens), model.config.block_size
    positions, visible = torch.arange(length)[None], block_causal(length, size)[None]
    states = model.network.hidden(tokens[None], positions, visible)[0]
    return states[-size - 1 : -1] if model.config.token_shift else states[-size:]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("size", [1, 4])
@torch.no_grad()
def test_cached_is_uncached(model_of: Any, size: int, shift: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, in passes that commit some of them and not others."""
    monkeypatch.setattr(context, "PIECE", 8)  # a prompt is read in several pieces
    model, random = model_of(size, shift), torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 200, (begin,), generator=random) for begin in (12, 4, 20)]
    found = Context(model, 3, 40)
    for row, text in enumerate(texts):
        found.read(row, text.tolist())
    rows = [0, 1, 2]
    for round in range(4):
        blocks = torch.randint(5, 200, (len(rows), size), generator=random)
        known = [(row + round) % 2 == 0 for row in rows]
        for place, whole in enumerate(known):
            if not whole:
                blocks[place, torch.rand(size, generator=random) < 0.5] = MASK
        states = found.look(rows, blocks, known)
        for place, row in enumerate(rows):
            wanted = uncached(model, torch.cat([texts[row], blocks[place]]))
            assert torch.allclose(model.network.logits(states[place]), model.network.logits(wanted), atol=1e-4)
            if known[place]:
                texts[row] = torch.cat([texts[row], blocks[place]])
            assert found.length(row) == len(texts[row])
        if round == 1:
            rows = [2, 0]  # one leaves, and the others change places


def test_the_first_token_needs_no_pass(model_of: Any) -> None:
    model = model_of(4, True)
    found = Context(model, 1, 16)
    assert not found.knows_first(0)
    found.read(0, [5, 6, 7, 8])
    assert found.knows_first(0)
    states = found.look([0], torch.full((1, 4), MASK), [False])
    assert torch.equal(found.first(0), states[0, 0])
    found.clear(0)
    assert found.length(0) == 0 and not found.knows_first(0)
    assert not Context(model_of(4, False), 1, 16).knows_first(0)
