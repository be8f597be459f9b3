"""Training of MTP heads: the input of each step, and equality with drafting."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.drafters import load_drafter
from blockdraft.drafters.mtp.network import MTPNetwork
from blockdraft.formats import read_drafter
from blockdraft.targets import Target
from blockdraft_tools.export import ExportFormat, export
from blockdraft_train.batches import PackedSequences
from blockdraft_train.objectives import slot_weights
from blockdraft_train.variants.mtp import MTPRecipe, MTPVariant

RECIPE = MTPRecipe(block_size=5, save_dtype="float32")


def random_network(variant: MTPVariant, target: Target) -> MTPNetwork:
    network, random = variant.network(variant.config(target)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    return network.eval()


def test_training_pass_equals_draft_pass_before_the_norm(
    parity: Callable[..., Any], target: Target, tmp_path: Path
) -> None:
    variant = MTPVariant(replace(RECIPE, normed_feedback=False))
    network = random_network(variant, target)
    export(tmp_path / "head", ExportFormat("mtp"), network.config, variant.saved(network.state_dict()), target)
    parity(variant, network, load_drafter(tmp_path / "head", target=target), target)


def test_steps_see_what_the_drafter_knows_by_then(target: Target) -> None:
    """A step sees states before the anchor in its document, and the block's tokens up to its own."""
    variant = MTPVariant(RECIPE)
    network = random_network(variant, target)
    tokens, hidden_states = torch.arange(12)[None] + 20, torch.randn(1, 12, target.hidden_size)
    documents = torch.tensor([[0] * 3 + [1] * 9])
    positions = torch.cat([torch.arange(3), torch.arange(9)])[None]
    anchor = 7

    def hidden(hidden_states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        block = tokens[:, None, anchor : anchor + 5]
        rows = PackedSequences(tokens, positions, documents, torch.tensor([[anchor]]), block, block[:, :, 1:] > 0)
        with torch.no_grad():
            return variant.hidden(network, target, hidden_states, rows)[0, 0]

    before = hidden(hidden_states, tokens)
    for place in range(12):
        other = hidden_states.clone()
        other[0, place] += 1
        assert (hidden(other, tokens) != before).any() == (3 <= place < anchor), place
        others = tokens.clone()
        others[0, place] += 50
        changed = (hidden(hidden_states, others) != before).any(dim=-1).tolist()
        # The first token of a document has no entry.
        assert changed == [3 < place <= anchor + step for step in range(4)], place


def test_the_layer_has_the_targets_shape(target: Target) -> None:
    config = MTPVariant(RECIPE).config(target)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.intermediate_size, config.block_size, config.target_layers) == (64, 5, (3,))
    weights = slot_weights(torch.ones(1, 3, dtype=torch.bool), MTPVariant(RECIPE).gamma)[0]
    torch.testing.assert_close(weights / weights.sum(), torch.tensor([0.51, 0.31, 0.18]), atol=0.01, rtol=0)


def test_training_begins_with_a_head_that_is_there(target: Target, tiny_mtp_dir: Path) -> None:
    variant = MTPVariant(replace(RECIPE, init=str(tiny_mtp_dir)))  # of three steps, for four
    config = variant.config(target)
    network = variant.network(config)
    variant.fit_head(network, target)
    theirs = read_drafter(tiny_mtp_dir, None, 3).tensors
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in network.state_dict().items())
    with pytest.raises(ValueError, match="normed_feedback of .* must be that of the recipe.*, got True"):
        variant.network(replace(config, normed_feedback=False))
