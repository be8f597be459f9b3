"""Checkpoints of gpt-oss with experts in MXFP4, against the dequantized model in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from blockdraft.decode.proposal import chain
from blockdraft.errors import UsageError
from blockdraft.targets import load_target

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rope_parameters": {"rope_theta": 500.0},
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the same model in float32."""
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.2 * (parameter.ndim == 1), std=0.2)
    for folder in (packed, dense):
        model.save_pretrained(folder)
    tensors, chance = load_file(dense / "model.safetensors"), torch.Generator().manual_seed(1)
    few = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=chance)
        scales = torch.randint(122, 125, blocks.shape[:3], dtype=torch.uint8, generator=chance)
        del few[name]
        few |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    save_file(few, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, dense


def logits(folder: Path, **options: Any) -> torch.Tensor:
    target, tokens = load_target(folder, dtype="float32", device="cpu", **options), torch.arange(10, 30)[None]
    return target.forward(tokens, chain(tokens).parents, target.new_cache(1, 20)).logits


def test_weights_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    packed, dense = (
        dict(load_target(folder, dtype="float32", device="cpu", backend="native").named_weights()) for folder in folders
    )
    assert packed.keys() == dense.keys()
    assert all(torch.equal(packed[name], dense[name]) for name in dense)


def test_logits_are_near_those_of_transformers(folders: tuple[Path, Path]) -> None:
    packed, dense = folders
    expected = logits(dense, backend="hf")
    torch.testing.assert_close(logits(dense, backend="native"), expected, rtol=1e-4, atol=1e-4)
    compiled, plain = (logits(packed, backend="native", compile=mode) for mode in ("on", "off"))
    errors = [float((own - expected).norm() / expected.norm()) for own in (compiled, plain)]
    assert max(errors) < 0.03, errors  # inputs of experts are quantized to 8 bits
    layer = load_target(packed, device="cpu", quantize="int8").decoder.layers[0]  # type: ignore[attr-defined]
    assert (layer.gate_up.bits, layer.qkv.bits, layer.router.bits) == (4, 8, None)
    all_few = logits(packed, backend="native", compile="on", quantize="int8")
    assert errors[0] < float((all_few - expected).norm() / expected.norm()) < 0.1


def test_incomplete_checkpoints_are_refused(folders: tuple[Path, Path]) -> None:
    packed, _ = folders
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    for scales, message in ((tensors[name][:, :-1], f"{name} is of U8"), (None, f"its checkpoint lacks {name}")):
        own = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(own if scales is None else own | {name: scales.contiguous()}, packed / "model.safetensors")
        with pytest.raises(UsageError, match=message):
            load_target(packed, dtype="float32", device="cpu", backend="native")
