"""The schemas of published drafters in z-lab's layout: each loads, and means what its makers mean. Widths are shrunk;
keys and where they stand, depths, target layers, block sizes, windows, rotary bases and vocabularies are as
published."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.formats import read_drafter
from blockdraft.formats.architectures import tensor_shapes
from blockdraft.formats.zlab import parse_config
from blockdraft.nn.draft_config import LayerAttention

FULL, SLIDING = "full_attention", "sliding_attention"
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
V1, V2 = {"architectures": ["DFlashDraftModel"]}, {"architectures": ["DFlash2DraftModel"]}
EVERY = LayerAttention(causal=False, window=None)
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
SLIDES = {"sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 5}


def causal(window: int) -> LayerAttention:
    return LayerAttention(causal=True, window=window)


@dataclass(frozen=True)
class Case:
    """Attributes:
    raw: Of config.json, without widths.
    target_layers, layers, theta, mask, block: What it means.
    others: Further fields of the configuration.
    """

    raw: dict[str, Any]
    target_layers: tuple[int, ...]
    layers: tuple[LayerAttention, ...]
    theta: float
    mask: int
    block: int
    others: dict[str, Any] = field(default_factory=dict)


QWEN3 = {
    **V1,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "layer_types": [FULL] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_cache": True,
}
QWEN35 = {
    **V1,
    "model_type": "qwen3",
    "num_target_layers": 64,
    "num_hidden_layers": 5,
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "max_position_embeddings": 262144,
    "layer_types": [FULL] * 5,
    "attention_bias": False,
}
GPT_OSS = {
    **V1,
    "model_type": "gpt_oss",
    "block_size": 8,
    "num_target_layers": 24,
    "num_hidden_layers": 8,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": YARN,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
GEMMA4 = {
    **V1,
    "model_type": "qwen3",
    "num_target_layers": 60,
    "num_hidden_layers": 5,
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 4,
        "target_layer_ids": [1, 12, 23, 35, 46, 57],
        "final_logit_softcapping": 30.0,
    },
    "vocab_size": 262144,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "layer_types": [SLIDING] * 4 + [FULL],
    **SLIDES,
}
DFLASH2 = {
    **V2,
    "model_type": "qwen3",
    "is_causal": False,
    "num_target_layers": 64,
    "num_hidden_layers": 5,
    "dflash_config": {
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 2,
        "selector_top_k": 16,
        "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "vocab_size": 248320,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "max_position_embeddings": 262144,
    "layer_types": [SLIDING] * 5,
    **SLIDES,
}
CONV = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 2, "selector_top_k": 16}


def with_draft(raw: dict[str, Any], **draft: Any) -> dict[str, Any]:
    """Config with keys set in dflash_config."""
    return raw | {"dflash_config": raw["dflash_config"] | draft}


CODER = with_draft(QWEN3 | {"num_hidden_layers": 8, "num_target_layers": 48, "layer_types": [FULL] * 8})
CASES = {
    "Qwen3-8B": Case(QWEN3, (1, 9, 17, 25, 33), (EVERY,) * 5, 1e6, 151669, 16, {"rope_scaling": None}),
    "Qwen3-Coder-30B, more layers than target layers": Case(
        with_draft(CODER, target_layer_ids=[1, 12, 23, 34, 45]), (1, 12, 23, 34, 45), (EVERY,) * 8, 1e6, 151669, 16
    ),
    "Qwen3.5-27B": Case(QWEN35, (1, 16, 31, 46, 61), (EVERY,) * 5, 1e7, 248070, 16, {"rope_scaling": None}),
    "Qwen3.5-27B, six layers": Case(
        QWEN35 | {"num_hidden_layers": 6, "layer_types": [SLIDING] * 5 + [FULL], "sliding_window": 4096},
        (1, 16, 31, 46, 61),
        (causal(4096),) * 5 + (EVERY,),
        1e7,
        248070,
        16,
    ),
    "Qwen3.6-27B": Case(
        QWEN35 | {"layer_types": [SLIDING] * 4 + [FULL]} | SLIDES,
        (1, 16, 31, 46, 61),
        (causal(2048),) * 4 + (EVERY,),
        1e7,
        248070,
        16,
    ),
    "Llama-3.1-8B": Case(
        with_draft(
            QWEN3
            | {"block_size": 10, "num_target_layers": 32, "vocab_size": 128256, "rope_theta": 500000.0}
            | {"rope_scaling": LLAMA3},
            mask_token_id=128002,
            target_layer_ids=[1, 8, 15, 22, 29],
        ),
        (1, 8, 15, 22, 29),
        (EVERY,) * 5,
        5e5,
        128002,
        10,
        {"rope_scaling": LLAMA3},
    ),
    "gpt-oss-20b": Case(
        GPT_OSS,
        (1, 6, 11, 16, 21),
        (EVERY,) * 8,
        150000,
        200000,
        8,
        {"attention_bias": True, "rope_scaling": YARN, "rms_norm_eps": 1e-5},
    ),
    "gpt-oss-120b": Case(
        with_draft(GPT_OSS | {"block_size": 10, "num_target_layers": 36}, target_layer_ids=[1, 9, 17, 25, 33]),
        (1, 9, 17, 25, 33),
        (EVERY,) * 8,
        150000,
        200000,
        10,
    ),
    "gemma-4-31B": Case(
        GEMMA4,
        (1, 12, 23, 35, 46, 57),
        (causal(2048),) * 4 + (EVERY,),
        1e6,
        4,
        16,
        {"final_logit_softcapping": 30.0},
    ),
    "ModelOpt": Case(
        with_draft(
            QWEN3 | {"rope_parameters": {"rope_theta": 1000000}}, use_swa=True, swa_window_size=512, causal=False
        ),
        (1, 9, 17, 25, 33),
        (LayerAttention(causal=False, window=512),) * 5,
        1e6,
        151669,
        16,
    ),
    "DFlash2, Qwen3.8-27B": Case(
        DFLASH2, (5, 19, 33, 47, 61), (LayerAttention(causal=False, window=2048),) * 5, 1e7, 248070, 8, CONV
    ),
    "DFlash2, Muse-Glimmer-30B": Case(
        with_draft(
            DFLASH2 | {"num_target_layers": 52},
            block_size=16,
            target_layer_ids=[1, 13, 25, 37, 49],
            final_logit_softcapping=20.0,
            output_multiplier=0.196116135,
        ),
        (1, 13, 25, 37, 49),
        (LayerAttention(causal=False, window=2048),) * 5,
        1e7,
        248070,
        16,
        CONV | {"final_logit_softcapping": 20.0, "output_multiplier": 0.196116135},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_published_schemas_load(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    raw = {**case.raw, **SMALL}
    shapes = tensor_shapes(parse_config(raw))
    generator = torch.Generator().manual_seed(0)
    tensors = {one: torch.randn(*shape, generator=generator).bfloat16() for one, shape in shapes.items()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    actual = read_drafter(tmp_path, None, raw["num_target_layers"])
    config = actual.config
    assert config.target_layers == case.target_layers and config.layers == case.layers
    assert (config.rope_theta, config.mask_token_id, config.block_size) == (case.theta, case.mask, case.block)
    assert config.num_target_layers == raw["num_target_layers"] and config.vocab_size == raw["vocab_size"]
    assert {key: getattr(config, key) for key in case.others} == case.others
    assert actual.borrowed is None  # so that embedding, head and all of the vocabulary are the target's
    with torch.device("meta"):
        network = (DFlash2Network if isinstance(config, DFlash2Config) else DFlashNetwork)(config)  # type: ignore[arg-type]
    network.load_state_dict(actual.tensors, assign=True)
    assert network.fc.weight.shape == (16, 16 * len(case.target_layers))


def test_a_cut_vocabulary_is_refused() -> None:
    raw = {**QWEN3, **SMALL}
    assert parse_config({**raw, "draft_vocab_size": raw["vocab_size"]}).vocab_size == raw["vocab_size"]
    with pytest.raises(ValueError, match="draft_vocab_size must be .*got 32000"):
        parse_config({**raw, "draft_vocab_size": 32000})
