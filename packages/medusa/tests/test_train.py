"""Training of Medusa's heads: their input and first weights, and equality with drafting."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.drafters import load_drafter
from blockdraft.formats import read_drafter
from blockdraft.targets import Target
from blockdraft_medusa.train import MedusaRecipe, MedusaVariant
from blockdraft_tools.export import ExportFormat, export
from blockdraft_train.batches import PackedSequences
from blockdraft_train.objectives import slot_weights

RECIPE = MedusaRecipe(block_size=5, layers=2, save_dtype="float32")


@pytest.mark.parametrize("share_head", [False, True])
def test_training_pass_equals_draft_pass(
    share_head: bool, parity: Callable[..., Any], target: Target, tmp_path: Path
) -> None:
    variant = MedusaVariant(replace(RECIPE, share_head=share_head))
    config = variant.config(target)
    network = variant.network(config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=random)
    export(tmp_path / "heads", ExportFormat("medusa"), config, variant.saved(network.state_dict()), target)
    parity(variant, network.eval(), load_drafter(tmp_path / "heads", target=target), target)


def test_new_heads_draft_what_the_targets_head_predicts(target: Target) -> None:
    """New residual blocks change little, so the first loss is not high."""
    variant = MedusaVariant(RECIPE)
    network = variant.network(variant.config(target))
    variant.fit_head(network, target)
    with torch.no_grad():
        for head in network:
            for block in head[:2]:  # type: ignore[index]
                block.linear.bias.zero_()
        hidden = torch.randn(1, 3, target.hidden_size)
        logits = variant.logits(network, target, network(hidden))
        torch.testing.assert_close(logits, target.head(hidden)[:, :, None].expand(-1, -1, 4, -1))


def test_hidden_states_from_the_anchor_on_are_not_read(target: Target) -> None:
    variant = MedusaVariant(RECIPE)
    network = variant.network(variant.config(target))
    anchors, places = torch.tensor([[0, 4, -1]]), torch.arange(9)[None]
    blocks = torch.zeros(1, 3, 5, dtype=torch.long)
    rows = PackedSequences(places, places, places * 0, anchors, blocks, blocks[:, :, 1:] > 0)
    hidden_states = torch.randn(1, 9, target.hidden_size)
    hidden = variant.hidden(network, target, hidden_states, rows)
    for place in range(9):
        other = hidden_states.clone()
        other[0, place] += 1
        changed = (variant.hidden(network, target, other, rows) != hidden).flatten(2).any(dim=-1)[0, :2].tolist()
        assert changed == [False, place == 3]


def test_heads_weigh_less_the_farther_they_look() -> None:
    weights = slot_weights(torch.ones(1, 4, dtype=torch.bool), MedusaVariant(RECIPE).gamma)[0]
    torch.testing.assert_close(weights, 0.8 ** torch.arange(4.0), atol=2e-3, rtol=0)


@pytest.mark.parametrize("field", ["block_size", "layers"])
def test_recipes_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least .*, got 0"):
        MedusaRecipe(**{field: 0})


def test_training_begins_with_heads_that_are_there(target: Target, tiny_medusa_dir: Path, tiny_mtp_dir: Path) -> None:
    variant = MedusaVariant(replace(RECIPE, block_size=4, init=str(tiny_medusa_dir)))
    network = variant.network(variant.config(target))
    variant.fit_head(network, target)
    theirs = read_drafter(tiny_medusa_dir, None, 3).tensors
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in network.state_dict().items())
    with pytest.raises(ValueError, match="num_heads of .* must be that of the recipe and target, 4.*, got 3"):
        other = replace(variant.recipe, block_size=5)
        MedusaVariant(other).network(MedusaVariant(other).config(target))
    with pytest.raises(ValueError, match="the kind of .* must be MedusaConfig.*, got 'MTPConfig'"):
        other = replace(variant.recipe, init=str(tiny_mtp_dir))
        MedusaVariant(other).network(MedusaVariant(other).config(target))
