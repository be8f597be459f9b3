"""Frequencies equal to those of transformers, and scalings that it does not know."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.errors import UsageError
from blockdraft.nn.rotary import rotary_frequencies


@pytest.mark.parametrize("scaling", [{"rope_type": "x"}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": []}])
def test_scalings_that_transformers_does_not_know(scaling: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="which transformers does not accept .*; name a rope_type"):
        rotary_frequencies(8, 64, 1e4, scaling)
    assert rotary_frequencies(8, 64, 1e4, None)[0].shape == (4,)


@pytest.mark.parametrize("head", [8, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 123456.0, 1e6])
def test_frequencies_without_scaling_are_those_of_transformers(head: int, theta: float) -> None:
    config = Qwen3Config(head_dim=head, rope_parameters={"rope_type": "default", "rope_theta": theta})
    frequencies, scale = rotary_frequencies(head, 64, theta, None)
    assert torch.equal(frequencies, Qwen3RotaryEmbedding(config).inv_freq) and scale == 1.0
    assert frequencies.dtype == torch.float32
