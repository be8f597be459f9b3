"""EAGLE-3 in GGUF files: metadata for llama.cpp, and round trips."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.drafters.eagle3.layout import tensor_shapes
from blockdraft.drafters.eagle3.network import BLOCK_SIZE, Eagle3Config
from blockdraft.errors import UsageError
from blockdraft.formats import Borrowed, Checkpoint, read_drafter
from blockdraft.formats.gguf import open_gguf
from blockdraft.formats.gguf.drafter import drafter_config
from blockdraft.formats.stored import stored
from blockdraft.formats.trained import UNKNOWN, Trained
from blockdraft.nn.quantization import best_group
from blockdraft.nn.quantize_weight import QUICK, quantize_weight
from blockdraft_medusa.network import MedusaConfig
from blockdraft_tools.engines import llama_cpp_line
from blockdraft_tools.gguf.drafters import drafter_metadata, write_drafter
from blockdraft_tools.gguf.files import write_gguf

KEPT = torch.tensor([0, 3, 4, 9, 62])
CONFIG = Eagle3Config(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    draft_vocab_size=5,
    target_layers=(1, 4, 6),
    num_target_layers=10,
    block_size=6,
    max_position_embeddings=128,
)
WHOLE = replace(CONFIG, draft_vocab_size=64)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = [
    CONFIG,
    WHOLE,
    replace(CONFIG, norm_before_residual=True, norm_before_fc=True, rms_norm_eps=1e-5, rope_theta=5e5),
    replace(CONFIG, rope_scaling=LLAMA3),
    replace(WHOLE, rope_scaling=YARN, head_dim=16),
    replace(CONFIG, norm_output=True, fc_norm=True),
    replace(CONFIG, tied_head=True),
]


def drafter(config: Eagle3Config = CONFIG) -> Checkpoint:
    random, size = torch.Generator().manual_seed(0), config.draft_vocab_size
    actual = {name: torch.randn(*shape, generator=random) for name, shape in tensor_shapes(config).items()}
    actual["d2t"] = KEPT - torch.arange(5) if size == 5 else torch.zeros(size, dtype=torch.int64)
    return Checkpoint(config, actual, Borrowed(None, None, None), Trained("0123456789abcdef", 8))


def write(path: Path, one: Checkpoint, weights: Any = "f32") -> Path:
    write_drafter(path, one, {"tokenizer.ggml.tokens": [f"t{i}" for i in range(one.config.vocab_size)]}, weights)
    return path


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip(config: Eagle3Config, tmp_path: Path) -> None:
    expected = drafter(config)
    actual = read_drafter(write(tmp_path / "d.gguf", expected), None, 10)
    assert actual.config == config and actual.trained == expected.trained
    assert actual.borrowed == Borrowed(None, None, None)
    assert actual.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(actual.tensors[name], expected.tensors[name]) for name in actual.tensors)


def test_quantized(tmp_path: Path) -> None:
    """Rotary channels are put into our order after dequantisation."""
    expected = drafter().tensors
    for weights, near in (("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 2e-2), ("q4_0", 0.4)):
        actual = read_drafter(write(tmp_path / f"{weights}.gguf", drafter(), weights), None, 10).tensors
        assert all(
            torch.allclose(actual[name].float(), expected[name].float(), atol=near, rtol=near) for name in actual
        )
        assert not torch.equal(actual["midlayer.self_attn.q_proj.weight"], expected["midlayer.self_attn.q_proj.weight"])


def test_without_a_tokenizer(tmp_path: Path) -> None:
    """The number of the target's tokens is enough."""
    write_drafter(tmp_path / "d.gguf", drafter(), {}, "f32")
    file = open_gguf(tmp_path / "d.gguf")
    assert file.metadata["tokenizer.ggml.model"] == "none" and file.metadata["eagle3.vocab_size"] == 64
    assert read_drafter(file.path, None, 10).config == CONFIG


def test_trained_for_4_bits(tmp_path: Path) -> None:
    """Q4_0 holds the values of the drafter that was trained, head included, and quantizing again changes none."""
    trained = replace(drafter(), trained=Trained("0123456789abcdef", 4))
    path = write(tmp_path / "d.gguf", trained, "q4_0")
    assert {tensor.kind for tensor in open_gguf(path).tensors.values() if len(tensor.shape) == 2} == {"Q4_0"}
    actual = read_drafter(path, None, 10).tensors
    for name, weight in trained.tensors.items():
        expected = weight
        if weight.ndim == 2:
            expected, again = (
                quantize_weight(tensor, 4, best_group(tensor.size(1)), shares=QUICK).dequantize()
                for tensor in (weight, actual[name])
            )
            assert torch.equal(again, expected)
        assert torch.equal(actual[name], expected)


def test_metadata_for_llama_cpp(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "d.gguf", drafter()))
    metadata = {
        key: value for key, value in file.metadata.items() if key.startswith(("eagle3.", "general.architecture"))
    }
    assert metadata == {
        "general.architecture": "eagle3",
        "eagle3.block_count": 1,
        "eagle3.context_length": 128,
        "eagle3.embedding_length": 32,
        "eagle3.feed_forward_length": 64,
        "eagle3.attention.head_count": 4,
        "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 8,
        "eagle3.attention.value_length": 8,
        "eagle3.attention.layer_norm_rms_epsilon": 1e-6,
        "eagle3.rope.freq_base": 10000.0,
        "eagle3.target_layers": [2, 5, 7],  # the layers that the target layers enter
        "eagle3.target_hidden_size": 32,
        "eagle3.norm_before_residual": False,
        "eagle3.norm_before_fc": False,
    }
    layer = "attn_q attn_k attn_v attn_output attn_norm attn_norm_2 ffn_norm ffn_gate ffn_up ffn_down"
    names = {f"blk.0.{name}.weight" for name in layer.split()} | {"fc.weight", "output_norm.weight", "output.weight"}
    assert set(file.tensors) == names | {"d2t"}
    assert torch.equal(file.tensors["d2t"].read(), KEPT)  # type: ignore[arg-type]
    ours = drafter().tensors
    for name, theirs in (("input_layernorm", "attn_norm"), ("hidden_norm", "attn_norm_2")):
        assert torch.equal(file.tensors[f"blk.0.{theirs}.weight"].read(), ours[f"midlayer.{name}.weight"])  # type: ignore[arg-type]
    turned = file.tensors["blk.0.attn_k.weight"].read()  # neighbours are turned together
    order = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert torch.equal(turned, ours["midlayer.self_attn.k_proj.weight"][order])  # type: ignore[arg-type]


def test_metadata_of_the_optional_fields(tmp_path: Path) -> None:
    whole = open_gguf(write(tmp_path / "w.gguf", drafter(WHOLE)))
    assert "d2t" not in whole.tensors and whole.tensors["output.weight"].shape == (64, 32)
    normed = open_gguf(write(tmp_path / "n.gguf", drafter(CONFIGS[2])))
    assert normed.metadata["eagle3.norm_before_residual"] is normed.metadata["eagle3.norm_before_fc"] is True
    assert normed.tensors["enc.output_norm.weight"].shape == (96,)
    assert open_gguf(write(tmp_path / "r.gguf", drafter(CONFIGS[3]))).tensors["rope_freqs.weight"].shape == (4,)


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ({"target_layers": (1, 4)}, "the number of target layers must be 3 in llama.cpp.*, got 2"),
        ({"target_layers": (1, 4, 9)}, "a target layer must be below the target's last layer, 9.*, got 9"),
        ({"qk_norm": True}, "qk_norm must be false in llama.cpp.*, got True; use another engine"),
        ({"attention_bias": True}, "attention_bias must be false in llama.cpp.*, got True"),
    ],
)
def test_what_llama_cpp_cannot_run(differences: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        drafter_metadata(replace(CONFIG, **differences))


def test_llama_cpp_refuses_files_with_our_own_flags(tmp_path: Path) -> None:
    """It would read them as if the flags were not set, but finds no norm behind the layer, or tensors too many."""
    for flag, tensor in (("norm_output", "output_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        config = replace(CONFIG, **{flag: True})
        tensors = open_gguf(write(tmp_path / f"{flag}.gguf", drafter(config))).tensors
        assert ("output_norm.weight" in tensors) is (flag == "fc_norm")
        assert any(name.startswith("blockdraft.") for name in tensors) and tensor not in tensors or flag == "fc_norm"
        with pytest.raises(UsageError, match=f"{flag} must be false in llama.cpp.*, got True; use another engine"):
            llama_cpp_line(config, "d.gguf", "t.gguf")


def test_kinds_that_llama_cpp_has_not() -> None:
    with pytest.raises(UsageError, match=r"is 'Medusa'; llama.cpp .* LlamaForCausalLMEagle3 alone. Train one of these"):
        drafter_metadata(MedusaConfig(32, 64, 10, num_heads=3))


def test_files_of_other_programs(tmp_path: Path) -> None:
    """They hold only what llama.cpp needs, and maybe a copy of the embedding."""
    file = open_gguf(write(tmp_path / "d.gguf", drafter()))
    kept = {key: value for key, value in file.metadata.items() if not key.startswith("blockdraft.")}
    left_out = dict.fromkeys(f"eagle3.{key}" for key in ("attention.key_length", "rope.freq_base"))
    tensors = {name: tensor.read() for name, tensor in file.tensors.items()}

    def again(changes: Mapping[str, Any], **more: torch.Tensor | None) -> Path:
        values = {key: value for key, value in {**kept, **changes}.items() if value is not None}
        values.pop("general.architecture")
        given = {name: stored(tensor) for name, tensor in {**tensors, **more}.items() if tensor is not None}
        write_gguf(tmp_path / "e.gguf", "eagle3", values, given, "f32")
        return tmp_path / "e.gguf"

    assert drafter_config(open_gguf(again(left_out)), 10) == replace(CONFIG, block_size=BLOCK_SIZE)
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    actual = read_drafter(again({}, **{"token_embd.weight": table}), None, 10)
    assert actual.trained == UNKNOWN and actual.borrowed is not None and torch.equal(actual.borrowed.embedding, table)  # type: ignore[arg-type]
    order, head = torch.tensor([3, 0, 4, 1, 2]), tensors["output.weight"]
    assert isinstance(head, torch.Tensor)
    by_frequency = read_drafter(again({}, **{"d2t": KEPT[order], "output.weight": head[order]}), None, 10).tensors
    usual = read_drafter(again({}), None, 10).tensors
    assert all(torch.equal(by_frequency[name], usual[name]) for name in usual)
    for changes, more, message in (
        ({"eagle3.block_count": 2}, {}, "eagle3.block_count must be 1.*, got 2; no other is supported"),
        ({"eagle3.target_hidden_size": 64}, {}, "eagle3.target_hidden_size must be 32.*, got 64"),
        ({"eagle3.target_layers": [0, 5, 7]}, {}, "a target layer must be .*got -1"),
        ({}, {"output.weight": None}, "output.weight must be in the file.*, but is absent"),
        ({}, {"d2t": None}, "d2t must be given, since draft_vocab_size is not vocab_size, 64.*, but is absent"),
        ({}, {"d2t": KEPT.where(KEPT != 62, 64)}, r"offsets to tokens below 64, got .*; it leads to \[64\]"),
        (
            {},
            {"d2t": KEPT.where(KEPT != 62, 9)},
            r"offsets to different tokens, got .*; it leads to \[9\] more than once",
        ),
        ({}, {"blk.0.attn_q.bias": torch.ones(32)}, "a tensor must be one that is known here, got .*attn_q.bias"),
        ({}, {"fc.weight": None}, "fc.weight"),
    ):
        with pytest.raises(UsageError, match=message):
            read_drafter(again(changes, **more), None, 10)  # type: ignore[arg-type]
