"""Layout of MTP heads in the speculators format."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.drafters.mtp.layout import SPECULATORS, parse_config
from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, DrafterTarget, layout_of, layouts, read_drafter
from blockdraft.formats.trained import Trained

CONFIG = MTPConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=40,
    num_target_layers=5,
    block_size=4,
    rope_theta=3e5,
    max_position_embeddings=128,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BOTH = [CONFIG, replace(CONFIG, attention_bias=True, rope_scaling=YARN, rms_norm_eps=1e-5)]


def tensors_of(config: MTPConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = MTPNetwork(config).state_dict()
    return {name: torch.randn(one.shape, generator=generator).bfloat16() for name, one in shapes.items()}


def write(path: Path, config: MTPConfig = CONFIG) -> dict[str, Any]:
    SPECULATORS.write(
        path,
        Checkpoint(config, tensors_of(config), trained=Trained("abc", 4)),
        DrafterTarget("some/target", ("ForCausalLM",)),
    )
    raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    return raw


@pytest.mark.parametrize("config", BOTH)
def test_round_trip(config: MTPConfig, tmp_path: Path) -> None:
    raw = write(tmp_path / "head", config)
    assert layout_of(raw) is layouts()["mtp_speculators"]
    actual, expected = read_drafter(tmp_path / "head", None, 5), tensors_of(config)
    assert (actual.config, actual.trained) == (config, Trained("abc", 4))
    assert actual.tensors.keys() == expected.keys()
    assert all(torch.equal(actual.tensors[name], one) for name, one in expected.items())


def test_keys_and_names(tmp_path: Path) -> None:
    raw, stored = write(tmp_path / "head"), load_file(tmp_path / "head" / "model.safetensors")
    assert (raw["architectures"], raw["speculators_model_type"]) == (["MTPDraftModel"], "mtp")
    assert raw["num_nextn_predict_layers"] == 1
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    layers = raw["transformer_layer_config"]
    assert (layers["model_type"], layers["num_hidden_layers"], layers["vocab_size"]) == ("qwen3", 5, 40)
    tensors = tensors_of(CONFIG)
    for ours, theirs in (
        ("pre_fc_norm_embedding", "token_layernorm"),
        ("pre_fc_norm_hidden", "hidden_layernorm"),
        ("fc", "input_proj"),
        ("norm", "final_layernorm"),
        ("layers.0.self_attn.q_norm", "self_attn.q_norm"),
    ):
        assert torch.equal(stored.pop(f"mtp_layers.0.{theirs}.weight"), tensors.pop(f"{ours}.weight"))
    assert len(stored) == len(tensors) and all(name.startswith("mtp_layers.0.") for name in stored)


def test_copies_of_the_targets_weights_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    save_file(load_file(file) | {"embed_tokens.weight": torch.ones(40, 16)}, file)
    assert read_drafter(tmp_path / "head", None, 5).config == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 1.*, got 2"),
        ({"speculators_config": {}}, "speculative_tokens must be .*is absent"),
        ({"transformer_layer_config": 3}, "transformer_layer_config must be .*got 3"),
    ],
)
def test_unsupported_values_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = write(tmp_path / "head") | changes
    with pytest.raises(UsageError, match=message):
        parse_config(raw, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama"},
            "model_type of transformer_layer_config must be one of qwen3, .*, got 'llama'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act must be .*got 'gelu'"),
        (
            {"layer_types": ["sliding_attention"] * 5, "sliding_window": 9, "use_sliding_window": True},
            "the first of layer_types must be .*got 'sliding_attention'",
        ),
    ],
)
def test_layers_of_another_kind_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = write(tmp_path / "head")
    raw["transformer_layer_config"] |= changes
    with pytest.raises(UsageError, match=message):
        parse_config(raw, 5)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp_layers.0.input_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(UsageError, match=r"mtp_layers.0.input_proj.weight: expected \(16, 32\), found None"):
        read_drafter(tmp_path / "head", None, 5)


def test_what_the_format_cannot_express_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="normed_feedback must be true, .*, got False; keep the layout mtp"):
        SPECULATORS.check(replace(CONFIG, normed_feedback=False))
    with pytest.raises(UsageError, match="the configuration must be MTPConfig.*, got 'dict'"):
        SPECULATORS.check({})
    with pytest.raises(UsageError, match="readers cannot load model.gguf"):
        SPECULATORS.check(CONFIG, DrafterTarget("model.gguf"))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    name = "mtp_layers.0.input_proj.weight"
    save_file(load_file(file) | {name: torch.ones(16, 32, dtype=torch.int8)}, file)
    with pytest.raises(UsageError, match=f"head: {name} is of type I8; weights must be of one of F64, F32, BF16, F16"):
        read_drafter(tmp_path / "head", None, 5)
