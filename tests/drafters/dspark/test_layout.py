"""Layouts of DSpark: SpecForge's nested and DeepSpec's flat configuration, and other tensor names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.drafters.dspark.network import DSparkConfig
from blockdraft.formats.architectures import tensor_shapes
from blockdraft.formats.zlab import config_dict, parse_config, read_checkpoint, write_checkpoint
from blockdraft.nn.draft_config import LayerAttention

CONFIG = DSparkConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=20,
    block_size=7,
    mask_token_id=19,
    target_layers=(1, 3),
    num_target_layers=6,
    rope_theta=1e6,
    layers=(LayerAttention(False, None),),
    markov_rank=3,
)
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 20,
    "num_target_layers": 6,
    "rope_theta": 1e6,
    "layer_types": ["full_attention"],
    "block_size": 7,
}
HEADS: dict[str, Any] = {
    "markov_rank": 3,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
OWN: dict[str, Any] = {"mask_token_id": 19, "target_layer_ids": [1, 3], **HEADS}
NESTED = {
    **SHAPE,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {**OWN, "projector_type": "dspark", "confidence_head_alpha": 1.0},
}
FLAT = {**SHAPE, **OWN, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}


def tensors_of(config: DSparkConfig = CONFIG) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*s, generator=generator) for name, s in tensor_shapes(config).items()}


@pytest.mark.parametrize(
    "raw",
    [
        NESTED,
        FLAT,
        {**NESTED, **HEADS, "architectures": ["Qwen3DSparkModel"]},  # what SpecForge's own export makes of it
        {**NESTED, "dflash_config": {**NESTED["dflash_config"], "shift_label": True, "sample_from_anchor": True}},
    ],
)
def test_layouts(raw: dict[str, Any]) -> None:
    assert parse_config(raw) == CONFIG


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**FLAT, "markov_rank": None}, "markov_rank must be .*is absent"),
        ({**FLAT, "markov_rank": 0}, "markov_rank must be .*got 0"),
        ({**FLAT, "markov_head_type": "rnn"}, "markov_head_type must be vanilla.*, got 'rnn'"),
        ({**FLAT, "sample_from_anchor": False}, "sample_from_anchor must be .*got False"),
        ({**FLAT, "shift_label": False}, "shift_label must be .*got False"),
        ({**FLAT, "target_layer_ids": [-1, 3]}, "a target layer must be .*got -1"),
        ({**NESTED, "dflash_config": {**OWN, "projector_type": "domino"}}, "projector_type must be .*got 'domino'"),
        ({**NESTED, "architectures": ["DFlashDraftModel"]}, "markov_rank must be absent.*, got 3"),
    ],
)
def test_refusals(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(raw)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, enable_confidence_head=False),
        replace(CONFIG, confidence_head_with_markov=False, confidence_temperatures=(1.0,) * 6 + (2.5,)),
    ],
)
def test_round_trip(tmp_path: Path, config: DSparkConfig) -> None:
    tensors = tensors_of(config)
    write_checkpoint(tmp_path / "draft", config, tensors)
    actual, read = read_checkpoint(tmp_path / "draft")
    assert actual == config
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_liquids_files_rotate_neighbouring_channels(tmp_path: Path) -> None:
    tensors = tensors_of()
    rotated = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm"}
    theirs = {
        name: tensor.view(-1, 2, 4, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if any(part in name for part in rotated)
        else tensor
        for name, tensor in tensors.items()
    }
    raw = {**SHAPE, **HEADS, "architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    raw["dflash_config"] = {"mask_token_id": 19, "target_layer_ids": [1, 3], "num_target_layers": 6}
    save_file(theirs, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, read = read_checkpoint(tmp_path)
    assert config == CONFIG and all(torch.equal(read[name], tensors[name]) for name in tensors)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_is_neox_style": "yes"}))
    with pytest.raises(ValueError, match="rope_is_neox_style must be true or false, got 'yes'"):
        read_checkpoint(tmp_path)


def test_what_is_written_is_nested() -> None:
    raw = config_dict(CONFIG)
    assert raw["architectures"] == ["DSparkDraftModel"] and raw["block_size"] == 7
    assert raw["dflash_config"]["projector_type"] == "dspark"
    assert {name: raw["dflash_config"][name] for name in HEADS} == HEADS and not HEADS.keys() & raw.keys()


def test_names_of_other_writers(tmp_path: Path) -> None:
    tensors = tensors_of()
    names = {
        "markov_head.markov_w1.weight": "logit_head.markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        "confidence_head.proj.weight": "confidence_proj.weight",
    }
    copies = {"embed_tokens.weight": torch.zeros(20, 16), "lm_head.weight": torch.zeros(20, 16)}
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    save_file({**{names.get(n, n): t for n, t in tensors.items()}, **copies}, tmp_path / "model.safetensors")
    _, read = read_checkpoint(tmp_path)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
