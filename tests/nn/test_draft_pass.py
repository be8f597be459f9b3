"""The draft pass as decoding runs it, against the network that training runs and a readable attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.draft_pass import DraftPass

CONFIG = DraftConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    block_size=4,
    mask_token_id=1,
    taps=(0, 2),
    num_target_layers=4,
    rope_theta=10000.0,
    layers=(LayerAttention(False, None), LayerAttention(True, None), LayerAttention(False, 3)),
    attention_bias=True,
    input_embedding_scale=1.5,
    max_position_embeddings=64,
)


@pytest.fixture
def network() -> DFlashNetwork:
    torch.manual_seed(0)
    made = DFlashNetwork(CONFIG).requires_grad_(False)
    for name, weight in made.named_parameters():  # as a training leaves them, not as they begin
        weight += 0.3 * torch.randn_like(weight) if "norm" in name or "bias" in name else 0
    return made


def twin(network: DFlashNetwork, features_TF: Tensor, block_NH: Tensor, window: int | None) -> Tensor:
    """One row, slot by slot."""
    length, count = len(features_TF), len(block_NH)
    context = network.context(features_TF[None], torch.arange(length)[None])

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (torch.cat([old[layer], new], dim=2) for old, new in zip(context, (keys, values), strict=True))
        kind, out = network.config.layers[layer], torch.zeros_like(queries)
        for slot in range(count):
            seen = [
                at
                for at in range(length + count)
                if (at >= length or window is None or at >= length - window)
                and not (kind.causal and at > length + slot)
                and not (kind.window is not None and abs(length + slot - at) >= kind.window)
            ]
            for head in range(queries.size(1)):
                scores = keys[0, head // 2, seen] @ queries[0, head, slot] * 8**-0.5
                out[0, head, slot] = scores.softmax(0) @ values[0, head // 2, seen]
        return out

    return network(block_NH[None], torch.arange(length, length + count)[None], attend)[0]


@pytest.mark.parametrize("window", [None, 1, 4, 99])
@pytest.mark.parametrize("lengths", [[5], [7, 7], [3, 9, 6]])
@pytest.mark.parametrize("plain_layers", [False, True])
def test_the_same_as_the_network(
    network: DFlashNetwork, lengths: list[int], window: int | None, plain_layers: bool
) -> None:
    if plain_layers:  # those of most checkpoints, which go without a mask where rows are of one length
        network.config = replace(CONFIG, layers=(LayerAttention(False, None),) * 3)
    features, blocks = torch.randn(len(lengths), 9, 32), torch.randn(len(lengths), 4, 16)
    expected = [twin(network, f[:n], b, window) for f, b, n in zip(features, blocks, lengths, strict=True)]
    run, state = DraftPass(network), KVCache(len(lengths), 16)
    for begin, end in ((0, 3), (3, 9)):  # the rows part in the second half
        run.observe(state, features[:, begin : max(min(max(lengths), end), begin + 1)])
        state.commit([range(max(min(length, end) - begin, 0)) for length in lengths])
    assert state.lengths == lengths
    for _ in range(2):  # a pass leaves no trace
        torch.testing.assert_close(run(state, blocks, window), torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_more_context_than_rotary_angles_were_made_for(network: DFlashNetwork) -> None:
    run = DraftPass(network)
    for capacity in (16, 2000):
        state, features, block = KVCache(1, capacity), torch.randn(1, capacity - 4, 32), torch.randn(1, 4, 16)
        run.observe(state, features)
        state.commit([range(capacity - 4)])
        assert torch.isfinite(run(state, block, window=8)).all()
    last = twin(network, features[0], block[0], window=8)
    torch.testing.assert_close(run(state, block, window=8)[0], last, atol=1e-4, rtol=1e-3)


def test_memory_is_shared_and_checkpoints_stay(network: DFlashNetwork) -> None:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    run = DraftPass(network)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fused = run.network.layers[0].self_attn.qkv.weight  # type: ignore[union-attr]
    assert after["layers.0.self_attn.k_proj.weight"].untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
