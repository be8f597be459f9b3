"""Rotary frequencies equal those of transformers, and unknown scalings are refused."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.errors import UsageError
from blockdraft.nn.rotary import rotary_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "x"},
        {"rope_type": "yarn"},
        {"rope_type": "linear", "factor": []},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.5]},
    ],
)
def test_unknown_scalings_are_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="rope_scaling is .*, which cannot be used .*; set rope_type to one of"):
        rotary_frequencies(8, 64, 1e4, scaling)
    assert rotary_frequencies(8, 64, 1e4, None)[0].shape == (4,)


@pytest.mark.parametrize("head", [8, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 123456.0, 1e6])
def test_unscaled_frequencies_equal_those_of_transformers(head: int, theta: float) -> None:
    config = Qwen3Config(head_dim=head, rope_parameters={"rope_type": "default", "rope_theta": theta})
    frequencies, scale = rotary_frequencies(head, 64, theta, None)
    assert torch.equal(frequencies, Qwen3RotaryEmbedding(config).inv_freq) and scale == 1.0
    assert frequencies.dtype == torch.float32


@pytest.mark.parametrize("theta", [1e4, 500_000.0, 1_000_000])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "linear", "factor": 8.0, "partial_rotary_factor": 0.5},
        {"rope_type": "dynamic", "factor": 3.7},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 20, "beta_slow": 2},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
        {"rope_type": "longrope", "short_factor": [1 + i / 7 for i in range(32)], "long_factor": [2.0] * 32},
        {
            "rope_type": "longrope",
            "short_factor": [1 + i / 9 for i in range(32)],
            "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 4096,
        },
    ],
)
def test_scaled_frequencies_equal_those_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    config = Qwen3Config(head_dim=64, max_position_embeddings=16384, rope_parameters={**scaling, "rope_theta": theta})
    expected, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    frequencies, own_scale = rotary_frequencies(64, 16384, theta, scaling)
    assert torch.equal(frequencies, expected) and own_scale == scale and frequencies.dtype == torch.float32
