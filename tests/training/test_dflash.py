"""The training pass at an anchor is the draft pass at that anchor, and the loss is the paper's."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.proposal import chain
from blockdraft.targets import load_target
from blockdraft.training.dflash import (
    accepted_length,
    block_tokens,
    decayed_cross_entropy,
    default_gamma,
    draft_hidden,
    sample_anchors,
)

KINDS = {
    "bidirectional": (LayerAttention(False, None),) * 2,
    "causal": (LayerAttention(True, None),) * 2,
    "window": (LayerAttention(False, 5), LayerAttention(True, 12)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_pass_equals_draft_pass(kind: str, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    config, _ = read_checkpoint(tiny_drafter_dir)
    torch.manual_seed(2)
    network = DFlashNetwork(dataclasses.replace(config, layers=KINDS[kind]))
    drafter = DFlashDrafter(network, target)
    tokens = torch.randint(5, 200, (2, 30))
    proposal = chain(tokens)
    cache = target.new_cache(2, 30)
    features = target.forward(proposal.tokens, proposal.parents, cache, drafter.taps).features
    assert features is not None
    anchors = torch.tensor([[4, 17, 28], [9, 10, 23]])
    block, _ = block_tokens(tokens, anchors, config.block_size)
    mask = target.embed(torch.tensor(config.mask_token_id))
    hidden = draft_hidden(network, features, anchors, target.embed(block[:, :, 0]), mask)
    trained = target.head(hidden)
    for row in range(2):
        for column in range(3):
            anchor = int(anchors[row, column])
            state = drafter.new_state(1, 60)
            drafter.observe(state, tokens[row : row + 1, :anchor], features[row : row + 1, :anchor], [anchor])
            masked = torch.tensor([[int(tokens[row, anchor]), *[config.mask_token_id] * (config.block_size - 1)]])
            torch.testing.assert_close(
                drafter._draft_logits(state, masked)[0], trained[row, column], atol=1e-5, rtol=1e-4
            )


def test_anchors_are_supervised_distinct_and_leave_a_token_to_predict() -> None:
    supervised = torch.zeros(2, 20, dtype=torch.bool)
    supervised[0, 5:12] = True
    supervised[1, 3:5] = True
    anchors = sample_anchors(supervised, 8, torch.Generator().manual_seed(0))
    assert sorted(a for a in anchors[0].tolist() if a >= 0) == [5, 6, 7, 8, 9, 10]
    assert [a for a in anchors[1].tolist() if a >= 0] == [3]
    draws = {tuple(sample_anchors(supervised, 2)[0].tolist()) for _ in range(20)}
    assert len(draws) > 3


def test_block_tokens_follow_the_anchor() -> None:
    tokens = torch.arange(10, 20)[None]
    block, positions = block_tokens(tokens, torch.tensor([[2, 8]]), 3)
    assert block.tolist() == [[[12, 13, 14], [18, 19, 19]]]
    assert positions.tolist() == [[[2, 3, 4], [8, 9, 10]]]


def test_loss_is_weighted_by_distance_and_skips_what_is_not_supervised() -> None:
    logits = torch.randn(1, 1, 3, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[[4, 0, 6]]])
    supervised = torch.tensor([[[True, True, False]]])
    total, weight = decayed_cross_entropy(logits, labels, supervised, gamma=2.0)
    losses = [-float(logits[0, 0, k].log_softmax(-1)[labels[0, 0, k]]) for k in range(3)]
    assert float(total) == pytest.approx(losses[0] + math.exp(-0.5) * losses[1], rel=1e-5)
    assert float(weight) == pytest.approx(1 + math.exp(-0.5))


def test_gamma_of_the_paper() -> None:
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]


def test_accepted_length_counts_the_leading_right_slots_and_the_bonus() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[[1, 2, 3], [1, 0, 3], [0, 2, 3]]]), 5).float()
    labels = torch.tensor([[[1, 2, 3]] * 3])
    assert accepted_length(logits, labels, torch.ones(1, 3, 3, dtype=torch.bool)).tolist() == [[4, 2, 1]]
