"""Configurations read without transformers equal those of transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from blockdraft.targets import decoder_config
from blockdraft.targets.model_config import DEFAULTS, ModelConfig, architecture_of, load_config, own_config

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"head_dim": 12, "eos_token_id": [1, 7], "tie_word_embeddings": True},
    {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "bos_token_id": 4},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": YARN, "rope_parameters": None},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 77.0, **YARN}},
    {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 12},
    {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "use_sliding_window": True},
    {"sliding_window_pattern": 2},
    {"final_logit_softcapping": None, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 7},
    {"rope_parameters": NESTED, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {"architectures": ["SomeForCausalLM"], "quantization_config": {"quant_method": "gptq", "bits": 4}},
]


@pytest.mark.parametrize("changes", CHANGES, ids=map(str, range(len(CHANGES))))
@pytest.mark.parametrize("family", DEFAULTS)
def test_fields_and_decoders_equal_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    if changes.get("rope_parameters") is NESTED and "layer_types" not in DEFAULTS[family]:
        pytest.skip("has one kind of layers")
    raw = {"model_type": family, **SIZES, **({"rope_parameters": NESTED} if family == "gemma3_text" else {}), **changes}
    if raw["rope_theta"] is None:
        del raw["rope_theta"]
    own = own_config(raw)
    if family == "gemma3_text" and ("rope_scaling" in raw or raw["rope_parameters"] is not NESTED):
        assert own is None  # left to transformers
        return
    assert own is not None
    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    for name, value in own.to_dict().items():
        assert getattr(theirs, name) == value, name
    assert decoder_config(own) == decoder_config(theirs)
    assert architecture_of(own) == architecture_of(theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "32"},
        {"hidden_size": 33},
        {"rope_theta": "x"},
        {"layer_types": ["full_attention"]},
        {"tie_word_embeddings": "no"},
        {"model_type": "gpt2"},
        {"rms_norm_eps": None},
    ],
)
def test_what_is_unusual_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert own_config({"model_type": "qwen3", **SIZES, **changes}) is None


def test_a_folder(tiny_target_dir: Path) -> None:
    config = load_config(tiny_target_dir)
    assert isinstance(config, ModelConfig)
    assert decoder_config(config) == decoder_config(AutoConfig.from_pretrained(tiny_target_dir))


IMPORTS = """
import sys, blockdraft, blockdraft.cli
from blockdraft import Engine, SamplingParams, load_drafter, load_target
[getattr(blockdraft, name) for name in blockdraft.__all__ if 'DFlash' not in name]
print('transformers' in sys.modules)
slow = {'torch._dynamo', 'torch.distributed.tensor', 'sympy'}
load_target('bundled', device='cpu', compile='off')
print(sorted((slow | {'transformers.activations'}) & set(sys.modules)))
target = load_target('bundled', backend='native')
Engine(target, load_drafter(target=target)).generate(['Hi'], SamplingParams(4))
print(sorted((slow | {'transformers.modeling_utils'}) & set(sys.modules)))
"""


@pytest.mark.slow
def test_modules_that_take_long_to_import_are_imported_when_they_are_needed() -> None:
    """Not transformers to import this package, and to load a target and decode natively neither the code of its models
    nor what torch compiles with. Classes of configurations import such code, which takes longer to import than
    torch."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["False", "[]", "[]", ""]
