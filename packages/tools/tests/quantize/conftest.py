"""Small models of several families that can be rounded in groups."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},  # biases, and a head of its own
    "llama": {"tie_word_embeddings": True},
    "gemma2": WINDOWS | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 8},
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint of each family, with weights that all matter."""
    made = {}
    for name, fields in MODELS.items():
        config = AutoConfig.for_model(name, **SMALL | fields)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            for label, parameter in model.named_parameters():
                table = "embed_tokens" in label or "lm_head" in label  # large ones, so that some tokens are likely
                torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.5 if table else 0.25)
        made[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(made[name])
    return made
