"""Layout of MTP heads in a folder of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.drafters import load_drafter
from blockdraft.formats import Checkpoint, layout_of, layouts, read_drafter
from blockdraft.formats.trained import Trained
from blockdraft.targets import load_target
from blockdraft_tools.export import ExportFormat, convert


def test_tensors_have_qwen3_nexts_names_and_norms(tiny_mtp_dir: Path) -> None:
    written, actual = load_file(tiny_mtp_dir / "model.safetensors"), read_drafter(tiny_mtp_dir, None, 3)
    assert {name for name in written if "layers" not in name} == {
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
    }
    assert "mtp.layers.0.self_attn.q_proj.weight" in written and "mtp.layers.0.input_layernorm.weight" in written
    for name in ("norm", "pre_fc_norm_hidden", "layers.0.self_attn.k_norm", "layers.0.post_attention_layernorm"):
        torch.testing.assert_close(written[f"mtp.{name}.weight"] + 1, actual.tensors[f"{name}.weight"])
    assert torch.equal(written["mtp.fc.weight"], actual.tensors["fc.weight"])


def test_round_trip(tmp_path: Path, tiny_mtp_dir: Path, tiny_target_dir: Path) -> None:
    actual, target = read_drafter(tiny_mtp_dir, None, 3), load_target(tiny_target_dir)
    half = {name: tensor.bfloat16() for name, tensor in actual.tensors.items()}
    checkpoint = Checkpoint(actual.config, half, trained=Trained("abc", 4))
    layouts()["mtp"].write(tmp_path / "head", checkpoint)
    again = read_drafter(tmp_path / "head", None, 3)
    assert (again.config, again.trained) == (actual.config, Trained("abc", 4))
    assert all(torch.equal(again.tensors[name], half[name]) for name in half)
    convert(tiny_mtp_dir, tmp_path / "copy", ExportFormat("mtp"), target)
    assert type(load_drafter(tmp_path / "copy", target=target)).__name__ == "MTPDrafter"
    with pytest.raises(ValueError, match="MTPConfig is a configuration that z-lab's layout"):
        convert(tiny_mtp_dir, tmp_path / "other", ExportFormat("zlab"), target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size must be a whole number of at least 2.*, got 1"),
        ({"block_size": None}, "block_size must be .*is absent"),
        ({"normed_feedback": 1}, "normed_feedback must be .*got 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, 3.*, got 4"),
        ({"intermediate_size": 60}, "mtp.layers.0.mlp.gate_proj.weight: expected .60, 32., found .64, 32."),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, tiny_mtp_dir: Path
) -> None:
    raw = json.loads((tiny_mtp_dir / "config.json").read_text()) | changes
    kept = {name: value for name, value in raw.items() if value is not None or name not in changes}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    save_file(load_file(tiny_mtp_dir / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        read_drafter(tmp_path, None, 3)


def test_it_goes_by_its_architecture(tiny_drafter_dir: Path) -> None:
    assert layout_of({"architectures": ["MTPDraftModel"]}) is layouts()["mtp"]
    assert layout_of({"architectures": ["Qwen3NextForCausalLM"], "num_nextn_predict_layers": 1}) is None
    with pytest.raises(ValueError, match="the configuration must be MTPConfig, the only one .*, got 'DraftConfig'"):
        layouts()["mtp"].check(read_drafter(tiny_drafter_dir, None, 3).config)
