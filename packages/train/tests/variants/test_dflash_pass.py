"""Attention mask of training, compared with a twin that decides pair by pair, and equality of both attentions."""

import pytest
import torch

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft_train.dflash_pass import dense_mask, draft_hidden, mask_rule

KINDS = {
    "full": LayerAttention(False, None),
    "causal": LayerAttention(True, None),
    "window": LayerAttention(False, 3),
    "causal window": LayerAttention(True, 4),
}
# A row of two documents, of 7 and 5 tokens, and two tokens of padding, and a row of a single document.
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 5 + [-1] * 2, [0] * 14])
ANCHORS = torch.tensor([[2, 6, 9, -1], [0, 5, 6, 13]])
SIZE = 4


def sees(row: int, block: int, slot: int, key: int, kind: LayerAttention) -> bool:
    """Readable twin of the mask; key S + i is position i % N of block i // N."""
    length, anchor = DOCUMENTS.size(1), int(ANCHORS[row, block])
    if key >= length:
        other_block, other = divmod(key - length, SIZE)
        near = kind.window is None or abs(other - slot) < kind.window
        return other_block == block and near and (not kind.causal or other <= slot)
    if anchor < 0 or key >= anchor or DOCUMENTS[row, key] != DOCUMENTS[row, anchor]:
        return False
    return kind.window is None or anchor + slot - key < kind.window


@pytest.mark.parametrize("name", KINDS)
def test_mask_equals_its_twin(name: str) -> None:
    kind, length, blocks = KINDS[name], DOCUMENTS.size(1), ANCHORS.size(1)
    rule = mask_rule(DOCUMENTS, ANCHORS, SIZE, kind)
    dense = dense_mask(DOCUMENTS, ANCHORS, SIZE, kind).view(2, blocks, SIZE, -1)
    for row in range(2):
        for block in range(blocks):
            for slot in range(SIZE):
                expected = [sees(row, block, slot, key, kind) for key in range(length + blocks * SIZE)]
                query = torch.tensor(block * SIZE + slot)
                actual = [bool(rule(row, None, query, torch.tensor(key))) for key in range(len(expected))]
                assert actual == expected
                own = slice(length + block * SIZE, length + (block + 1) * SIZE)
                assert dense[row, block, slot].tolist() == expected[:length] + expected[own]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_flex_attention_equals_the_dense_mask(name: str) -> None:
    torch.manual_seed(0)
    config = DraftConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        block_size=SIZE,
        mask_token_id=3,
        target_layers=(0, 1),
        num_target_layers=4,
        rope_theta=10000.0,
        layers=(KINDS[name], KINDS["full"]),
    )
    network = DFlashNetwork(config)
    positions = torch.tensor([[*range(7), *range(5), 0, 0], [*range(14)]])
    inputs = torch.randn(2, 14, 64), DOCUMENTS, positions, ANCHORS, torch.randn(2, 4, 32), torch.randn(32)
    dense = draft_hidden(network, *inputs)
    with torch.no_grad():
        flex = draft_hidden(network, *inputs, flex=True)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-4)
