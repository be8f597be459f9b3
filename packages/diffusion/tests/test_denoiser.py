"""The network of block-diffusion models that were causal ones: with a causal mask it is the causal model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft.nn.cache import KVCache
from blockdraft.targets import decoder_config
from blockdraft_diffusion.denoiser import CausalDenoiser, why_not_denoiser

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_causal_mask(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(config).eval()
        for parameter in theirs.parameters():
            if parameter.ndim == 1:  # biases and norms that matter
                parameter.add_(torch.randn_like(parameter) * 0.2)
        tokens = torch.randint(96, (2, 9))
    ours = CausalDenoiser(decoder_config(config))
    weights = theirs.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    ours.load_state_dict(weights)
    positions, causal = torch.arange(9)[None], torch.ones(9, 9, dtype=torch.bool).tril()[None]
    actual = ours.logits(ours.hidden(tokens, positions, causal))
    assert torch.allclose(actual, theirs(tokens).logits, atol=1e-4)
    # The same with keys and values of the first tokens kept.
    cache = KVCache(2, 9)
    ours.hidden(tokens[:, :5], positions[:, :5], causal[:, :5, :5], cache)
    cache.commit([range(5)] * 2)
    again = ours.logits(ours.hidden(tokens[:, 5:], positions[:, 5:], causal[:, 5:], cache))
    assert torch.allclose(again, actual[:, 5:], atol=1e-4)


def test_what_it_cannot_run_is_said() -> None:
    config = decoder_config(AutoConfig.for_model("qwen3", **SHAPE, head_dim=16))
    assert why_not_denoiser(config) is None
    windowed = replace(config, layers=(replace(config.layers[0], window=4), config.layers[1]))
    assert "it has sliding windows, which" in str(why_not_denoiser(windowed))
    gemma = replace(config, final_softcap=3.0, norm_plus_one=True)
    assert "soft-caps and norm weights that begin at 0" in str(why_not_denoiser(gemma))


def test_positions_stay_exact_in_bfloat16() -> None:
    network = CausalDenoiser(decoder_config(AutoConfig.for_model("qwen3", **SHAPE, head_dim=16))).bfloat16()
    assert network.frequencies.dtype == torch.float32
