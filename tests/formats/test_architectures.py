"""Values of DFlash2 beyond DFlash in z-lab's layout."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_sizes import SIZES
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.drafters.dflash2.network import DFlash2Config
from blockdraft.formats.architectures import tensor_shapes
from blockdraft.formats.zlab import config_dict, parse_config, read_checkpoint, write_checkpoint
from blockdraft.nn.draft_config import DraftConfig, LayerAttention

CONFIG = DFlash2Config(
    **SIZES,
    block_size=4,
    mask_token_id=63,
    target_layers=(1, 5, 7),
    rope_theta=1e7,
    layers=(LayerAttention(causal=False, window=9),) * 2,
    conv_kernel_size=3,
    conv_group_size=4,
    selector_rank=5,
    selector_top_k=6,
)
# As in z-lab's files: no block size at the top level, windows that are not causal, the rest nested.
RAW: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    **SIZES,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 9,
    "use_sliding_window": True,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "dflash_config": {
        "block_size": 4,
        "conv_kernel_size": 3,
        "conv_group_size": 4,
        "selector_rank": 5,
        "selector_top_k": 6,
        "mask_token_id": 63,
        "target_layer_ids": [1, 5, 7],
    },
}


def nested(**changes: Any) -> dict[str, Any]:
    draft = {**RAW["dflash_config"], **changes}
    return {**RAW, "dflash_config": {key: value for key, value in draft.items() if value is not None}}


def make_tensors(config: DraftConfig = CONFIG) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*s, generator=generator).bfloat16() for name, s in tensor_shapes(config).items()}


def put(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RAW))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_parse() -> None:
    config = parse_config(RAW)
    assert config == CONFIG and type(config) is DFlash2Config
    flat = {**RAW, **RAW["dflash_config"], "dflash_config": None}
    assert parse_config(flat) == CONFIG
    scales = {"output_multiplier": 0.196116135, "final_logit_softcapping": 20.0}
    assert parse_config(nested(**scales)) == replace(CONFIG, **scales) == parse_config({**RAW, **scales})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (nested(conv_kernel_size=None), "conv_kernel_size must be .*is absent"),
        (nested(conv_kernel_size=0), "conv_kernel_size must be .*got 0"),
        (nested(conv_group_size=3), "conv_group_size must be a divisor of hidden_size, 16.*, got 3"),
        (nested(selector_rank=None), "selector_rank must be .*is absent"),
        (nested(selector_top_k=65), "selector_top_k must be at most vocab_size, 64.*, got 65"),
        (nested(selector_top_k="6"), "selector_top_k must be .*got '6'"),
        ({**RAW, "selector_rank": 6}, "selector_rank is 6 but dflash_config.selector_rank is 5"),
        (nested(gate="new"), "gate must be .*got 'new'"),
        ({**RAW, "architectures": ["DFlashDraftModel"]}, "conv_kernel_size must be absent.*, got 3"),
    ],
)
def test_parse_refuses(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(raw)


def test_config_is_written_as_zlab_does() -> None:
    raw = config_dict(CONFIG)
    assert {key: raw[key] for key in RAW if key != "dflash_config"} == {k: RAW[k] for k in RAW if k != "dflash_config"}
    assert "block_size" not in raw and "conv_kernel_size" not in raw
    neutral = {"causal": False, "input_embedding_scale": 1.0, "output_multiplier": 1.0}
    assert raw["dflash_config"] == {**RAW["dflash_config"], **neutral}
    assert config_dict(replace(CONFIG, final_logit_softcapping=20.0))["dflash_config"]["final_logit_softcapping"] == 20


@pytest.mark.parametrize("changes", [{}, {"layers": (LayerAttention(False, None),) * 2, "attention_bias": True}])
def test_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    tensors = make_tensors(config)
    write_checkpoint(tmp_path / "draft", config, tensors)
    read_config, read_tensors = read_checkpoint(tmp_path / "draft")
    assert asdict(read_config) == asdict(config) and type(read_config) is DFlash2Config
    assert read_tensors.keys() == tensors.keys()
    assert all(torch.equal(read_tensors[name], tensors[name]) for name in tensors)


def test_other_writers_tensors_are_mapped(tmp_path: Path) -> None:
    tensors = make_tensors()
    renamed = {name + ".weight" if name.endswith("_codebook") else name: tensor for name, tensor in tensors.items()}
    _, actual = read_checkpoint(put(tmp_path / "embeddings", renamed))
    assert actual.keys() == tensors.keys() and all(torch.equal(actual[name], tensors[name]) for name in tensors)

    kernels = [name for name in tensors if name.endswith("base_kernel")]
    _, actual = read_checkpoint(put(tmp_path / "flat", {**tensors, **{k: tensors[k].flatten(0, 1) for k in kernels}}))
    assert all(torch.equal(actual[name], tensors[name]) for name in tensors)
    _, actual = read_checkpoint(put(tmp_path / "shared", {**tensors, **{k: tensors[k][0] for k in kernels}}))
    assert all(torch.equal(actual[name], tensors[name][:1].expand(2, -1, -1)) for name in kernels)


def test_what_is_missing_or_left_over_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    missing = {name: tensor for name, tensor in tensors.items() if name != "layers.1.mlp_conv.base_kernel"}
    with pytest.raises(ValueError, match="layers.1.mlp_conv.base_kernel: expected .2, 3, 16., found None"):
        read_checkpoint(put(tmp_path / "missing", missing))
    name = "candidate_selector.predecessor_codebook"
    with pytest.raises(ValueError, match=f"1 tensors .*{name}.weight: expected None, found .64, 5."):
        read_checkpoint(put(tmp_path / "twice", {**tensors, f"{name}.weight": tensors[name].clone()}))
    kernel = {"layers.0.mlp_conv.base_kernel": torch.zeros(5, 16).bfloat16()}
    with pytest.raises(ValueError, match=r"mlp_conv.base_kernel: expected .2, 3, 16., found .5, 16."):
        read_checkpoint(put(tmp_path / "shape", {**tensors, **kernel}))
