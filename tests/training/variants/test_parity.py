"""For every variant: the training forward at an anchor is the draft pass at that anchor.

The tokens behind each anchor are taken to be the drafter's own guesses, because `Variant.guesses` looks at a slot as if
all guesses before it had been right.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.data.features import tapped_features
from blockdraft.drafters import load_drafter
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.proposal import Plan
from blockdraft.settings import read_settings
from blockdraft.targets import Target, load_target
from blockdraft.training.batches import Batch
from blockdraft.training.blocks import draft_hidden
from blockdraft.training.export import ZLAB, export
from blockdraft.training.objectives import Slots
from blockdraft.training.variants import Variant, find_variant, variant_names
from blockdraft.types import SamplingParams

# Those that z-lab's layout has words for.
KINDS = {
    "bidirectional": (LayerAttention(False, None),) * 2,
    "causal": (LayerAttention(True, None),) * 2,
    "window": (LayerAttention(False, 5),) * 2,
    "full and causal window": (LayerAttention(False, None), LayerAttention(True, 6)),
}
LENGTHS, ANCHORS = (17, 30, 23), ((3, 11, 16), (1, 9, 22, 29), (8, 20))


def made(name: str, kind: str, target: Target, folder: Path) -> tuple[Variant[Any, Any], Any]:
    """A variant and its network, of which every part does something, saved to the folder."""
    recipe = read_settings(
        find_variant(name).recipe_class,
        flags={"layers": "2", "taps": "0,2", "block-size": "6", "save-dtype": "float32"},
    )
    variant = find_variant(name)(recipe)
    assert target.tokenizer is not None
    config = dataclasses.replace(variant.config(target, target.tokenizer.mask_token_id), layers=KINDS[kind])
    network = variant.network(config)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=random)
    export(folder, ZLAB, config, variant.saved(network.state_dict()), target)
    return variant, network.eval()


def drafted(drafter: Any, target: Target, tokens: Tensor, anchor: int) -> tuple[list[int], Tensor | None]:
    """What the drafter guesses behind the anchor, greedily, and its logits where it shows them."""
    [features] = tapped_features(target, drafter.taps, [tokens])
    state = drafter.new_state(1, 64)
    drafter.observe(state, tokens[None, :anchor], features[None, :anchor], [anchor])
    plan = Plan(block_size=drafter.block_size, params=(SamplingParams(),))
    proposal = drafter.propose(state, tokens[anchor : anchor + 1], plan)
    masked = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    masked[0, 0] = tokens[anchor]
    logits = drafter._draft_logits(state, masked)[0] if hasattr(drafter, "_draft_logits") else None
    return proposal.tokens[0, 1:].tolist(), logits


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", variant_names())
def test_training_pass_equals_draft_pass(name: str, kind: str, tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target_dir)
    variant, network = made(name, kind, target, tmp_path / "drafter")
    drafter = load_drafter(tmp_path / "drafter", target=target)
    random = torch.Generator().manual_seed(1)
    documents = [torch.randint(5, 200, (length,), generator=random) for length in LENGTHS]

    # Three documents in one row, with room behind them.
    starts = [sum(LENGTHS[:i]) for i in range(3)]
    length = sum(LENGTHS) + 4
    tokens, places, owners = (torch.zeros(1, length, dtype=torch.long) for _ in range(3))
    owners[:] = -1
    features = torch.zeros(1, length, len(drafter.taps) * target.hidden_size)
    for number, (start, document) in enumerate(zip(starts, documents, strict=True)):
        part = slice(start, start + len(document))
        tokens[0, part], places[0, part], owners[0, part] = document, torch.arange(len(document)), number
        features[0, part] = tapped_features(target, drafter.taps, [document])[0]
    where = [(number, anchor) for number in range(3) for anchor in ANCHORS[number]]
    expected = [drafted(drafter, target, documents[number], anchor) for number, anchor in where]
    anchors = torch.tensor([[starts[number] + anchor for number, anchor in where]])

    mask = target.embed(torch.tensor(network.config.mask_token_id))
    hidden = draft_hidden(network, features, owners, places, anchors, target.embed(tokens[0][anchors]), mask)[0]
    logits = network.adjust_logits(target.head(hidden))
    guesses = torch.tensor([found for found, _ in expected])
    assert guesses.size(1) == variant.taught_slots
    blocks = torch.cat([tokens[0][anchors].T, guesses], dim=1)
    taught = torch.ones_like(guesses, dtype=torch.bool)
    first = variant.first_slot
    slots = Slots(hidden[:, first:], logits[:, first:], blocks, taught)
    assert torch.equal(variant.guesses(network, slots), guesses)
    assert len(set(guesses.flatten().tolist())) > 10  # else nothing is compared
    for ours, (_, theirs) in zip(logits, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_batches_have_the_shape_that_the_test_assumes() -> None:
    assert {"tokens_BS", "positions_BS", "documents_BS", "anchors_BA"} <= {f.name for f in dataclasses.fields(Batch)}
