import dataclasses

import pytest
import torch

from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork
from blockdraft.nn.draft_config import LayerAttention

CONFIG = DSparkConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=20,
    block_size=4,
    mask_token_id=19,
    target_layers=(1,),
    num_target_layers=3,
    rope_theta=1e4,
    layers=(LayerAttention(False, None),),
    markov_rank=3,
)


def test_a_new_network_adds_nothing_to_the_backbone() -> None:
    network = DSparkNetwork(CONFIG)
    tokens = torch.arange(20).view(4, 5)
    assert network.previous(tokens).shape == (4, 5, 3) and network.previous(tokens).any()
    assert not network.bias(network.previous(tokens)).any()


def test_the_bias_of_candidates_is_a_part_of_the_whole() -> None:
    network = DSparkNetwork(CONFIG)
    torch.nn.init.normal_(network.markov_head.markov_w2.weight)
    before = network.previous(torch.tensor([[[4, 5], [6, 7]]]))  # [B, D, P, r]
    candidates = torch.tensor([[[1, 3, 8], [19, 0, 2]]])  # [B, D, K]
    whole, part = network.bias(before), network.bias(before, candidates)
    assert whole.shape == (1, 2, 2, 20) and part.shape == (1, 2, 2, 3)
    for slot in range(2):
        torch.testing.assert_close(part[0, slot], whole[0, slot][:, candidates[0, slot]])
    expected = network.markov_head.markov_w2(network.markov_head.markov_w1(torch.tensor(6)))
    torch.testing.assert_close(whole[0, 1, 0], expected)


def test_the_confidence_sees_the_token_before_only_where_it_should() -> None:
    hidden = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    for with_markov in (True, False):
        network = DSparkNetwork(dataclasses.replace(CONFIG, confidence_head_with_markov=with_markov))
        first, second = (
            network.confidence_logits(hidden, network.previous(torch.full((2, 4), token))) for token in (3, 4)
        )
        assert first.shape == (2, 4) and torch.equal(first, second) is not with_markov


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 0}, "markov_rank must be a whole number of at least 1.*, got 0"),
        ({"markov_head_type": "gated"}, "markov_head_type must be vanilla, the one that is supported.*, got 'gated'"),
        (
            {"confidence_temperatures": (1.0, 2.0)},
            "confidence_temperatures must be 4 positive numbers, one per",
        ),
        ({"confidence_temperatures": (1.0, 2.0, 0.0, 1.0)}, "confidence_temperatures"),
    ],
)
def test_config_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
