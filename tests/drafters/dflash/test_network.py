import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.formats.zlab import read_checkpoint


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}]
)
def test_angles_equal_transformers_and_survive_a_cast(
    scaling: dict[str, object] | None, tiny_drafter_dir: Path
) -> None:
    config = dataclasses.replace(read_checkpoint(tiny_drafter_dir)[0], rope_scaling=scaling, rope_theta=5e5)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    rotary = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=8, max_position_embeddings=config.max_position_embeddings, rope_parameters=rope)
    )
    positions = torch.tensor([[0, 1, 77, 4000]])
    expected = rotary(torch.empty(()), positions)
    for network in (DFlashNetwork(config), DFlashNetwork(config).to(torch.bfloat16)):
        for ours, theirs in zip(network.angles(positions, torch.float32), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_context_of_all_layers_at_once_equals_layer_by_layer(tiny_drafter_dir: Path) -> None:
    config, tensors = read_checkpoint(tiny_drafter_dir)
    config = dataclasses.replace(config, attention_bias=True)
    torch.manual_seed(0)
    network = DFlashNetwork(config)
    hidden_states, positions = torch.randn(2, 5, tensors["fc.weight"].size(1)), torch.arange(5).expand(2, 5)
    keys, values = network.context(hidden_states, positions)
    rows = network.hidden_norm(network.fc(hidden_states))
    cos, sin = network.angles(positions, torch.float32)
    for index, layer in enumerate(network.layers):
        attention = layer.self_attn
        key = attention.k_norm(attention.k_proj(rows).unflatten(-1, (-1, config.head_dim))).transpose(1, 2)
        half = torch.cat([-key[..., config.head_dim // 2 :], key[..., : config.head_dim // 2]], dim=-1)
        key = key * cos[:, None] + half * sin[:, None]
        torch.testing.assert_close(keys[index], key)
        value = attention.v_proj(rows).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        torch.testing.assert_close(values[index], value)


def test_soft_cap_and_scale(tiny_drafter_dir: Path) -> None:
    config = dataclasses.replace(
        read_checkpoint(tiny_drafter_dir)[0], output_multiplier=0.5, final_logit_softcapping=20.0
    )
    logits = torch.tensor([-300.0, 0.0, 10.0])
    torch.testing.assert_close(DFlashNetwork(config).adjust_logits(logits), 20 * torch.tanh(logits * 0.5 / 20))
