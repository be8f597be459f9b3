"""Layout of P-EAGLE drafters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.drafters import load_drafter
from blockdraft.drafters.eagle3 import layout as eagle3
from blockdraft.drafters.eagle3.network import Eagle3Config
from blockdraft.drafters.peagle.network import PEagleConfig, PEagleNetwork
from blockdraft.drafters.peagle.speculators import LAYOUT
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, layout_of, layouts, read_drafter
from blockdraft.formats.trained import Trained
from blockdraft.targets import load_target
from blockdraft.training.export import Format, convert

CONFIG = PEagleConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=64,
    draft_vocab_size=9,
    target_layers=(1, 5, 6),
    num_target_layers=10,
    block_size=7,
    rope_theta=5e5,
    mask_token_id=63,
    num_hidden_layers=3,
)
WHOLE = replace(CONFIG, draft_vocab_size=64, qk_norm=True, num_hidden_layers=1, norm_before_fc=True, mask_token_id=0)


def write(path: Path, config: PEagleConfig) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    network = PEagleNetwork(config)
    network.keep(torch.arange(64)[torch.randperm(64)[: config.draft_vocab_size].sort().values])
    tensors = {name: one.bfloat16() if one.is_floating_point() else one for name, one in network.state_dict().items()}
    LAYOUT.write(path, Checkpoint(config, tensors, trained=Trained("abc", 4)), "some/target", ("ForCausalLM",))
    return json.loads((path / "config.json").read_text()), tensors


@pytest.mark.parametrize("config", [CONFIG, WHOLE, replace(CONFIG, fc_norm=True, norm_before_residual=True)])
def test_round_trip(config: PEagleConfig, tmp_path: Path) -> None:
    raw, tensors = write(tmp_path / "draft", config)
    assert layout_of(raw) is layouts()["peagle_speculators"]
    found = read_drafter(tmp_path / "draft", None, 10)
    assert (found.config, found.trained) == (config, Trained("abc", 4)) and type(found.config) is PEagleConfig
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], one) for name, one in tensors.items())


def test_keys_and_names(tmp_path: Path) -> None:
    raw, tensors = write(tmp_path / "draft", CONFIG)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert (raw["architectures"], raw["speculators_model_type"]) == (["PEagleSpeculator"], "peagle")
    assert (raw["mask_token_id"], raw["draft_vocab_size"], raw["embed_requires_grad"]) == (63, 9, True)
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 6, 7]  # of the layers that the taps enter
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    assert raw["transformer_layer_config"]["num_hidden_layers"] == 3
    assert stored["mask_hidden"].shape == (1, 1, 48) and stored["layers.0.self_attn.q_proj.weight"].shape == (24, 32)
    assert stored["layers.2.self_attn.q_proj.weight"].shape == (24, 16) and int(stored["t2d"].sum()) == 9
    assert torch.equal(stored["embed_tokens.weight"], tensors["embed_tokens.weight"])
    assert not any("q_norm" in name or "midlayer" in name for name in stored)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mask_token_id": None}, "mask_token_id is absent"),
        ({"mask_token_id": 64}, "mask_token_id is 64; it must be below vocab_size, 64"),
        ({"norm_output": True}, "norm_output is True; it must be false"),
        ({"speculators_config": {}}, "speculative_tokens is absent"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 6, 10]}, "must be from 1 to 9"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    raw, _ = write(tmp_path / "draft", CONFIG)
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(UsageError, match=told):
        read_drafter(tmp_path / "draft", None, 10)


@pytest.mark.parametrize(
    "name", ["mask_hidden", "embed_tokens.weight", "layers.2.mlp.up_proj.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    write(tmp_path / "draft", CONFIG)
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(UsageError, match=f"{name}: expected .*, found None"):
        read_drafter(tmp_path / "draft", None, 10)


def test_it_is_no_eagle3_drafter_and_the_reverse(tiny_peagle_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the configuration is 'PEagleConfig'; it must be Eagle3Config"):
        eagle3.LAYOUT.check(CONFIG, None, ())
    values = {name: value for name, value in vars(CONFIG).items() if name not in ("mask_token_id", "num_hidden_layers")}
    with pytest.raises(UsageError, match="the configuration is 'Eagle3Config'; it must be PEagleConfig"):
        LAYOUT.check(Eagle3Config(**values), None, ())
    target = load_target(tiny_target_dir)
    convert(tiny_peagle_dir, tmp_path / "copy", Format("peagle_speculators"), target)
    assert type(load_drafter(tmp_path / "copy", target=target)).__name__ == "PEagleDrafter"
