"""Targets loaded from GGUF files equal the models of transformers that the files were made from."""

import json
import shutil
import struct
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_models import MODELS, SMALL, model_of, scores
from gguf_writer import finish, random_blocks, write_gguf
from pretended_gpu import GPU, pretended_gpu
from safetensors.torch import save_file
from thinned import thinned
from tiny_models import tiny_tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import FLOATS, READERS, open_gguf
from blockdraft.kernels.cpu.build import build
from blockdraft.nn.packed import PackedLinear, pack_weights
from blockdraft.nn.rotary import default_frequencies
from blockdraft.targets import (
    decoder_config,
    describe_target,
    load_target,
    load_target_text,
    weights_fingerprint,
)
from blockdraft.targets.checkpoint import max_context
from blockdraft.targets.gguf.checkpoint import GIB, check_memory
from blockdraft.targets.gguf.config import gguf_config
from blockdraft.targets.gguf.tensors import PACKED_KINDS, SIMILAR_KINDS, GGUFWeights, decoder_weights, fitted
from blockdraft_tools.checkpoint import open_checkpoint


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, (_, metadata, extra) = model_of(name), MODELS[name]
    model.set_attn_implementation("eager")  # Gemma 2 has no soft-caps otherwise before release 5.21
    write_gguf(tmp_path / "m.gguf", model, metadata=metadata, extra=extra)
    target = load_target(tmp_path / "m.gguf", device="cpu", compile="off")
    tokens = torch.randint(0, SMALL["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits
    torch.testing.assert_close(scores(target, tokens), wanted, rtol=1e-4, atol=2e-4)
    assert (
        target.max_context == (64 if name in ("phi3-long", "ministral3") else max_context(model.config)) >= 64
        and target.path == tmp_path / "m.gguf"
        and target.backend == "native"
    )
    family = name.partition("-")[0]
    family = {"mistral": "llama", "glm4_moe_lite": "deepseek_v3"}.get(family, family)  # in GGUF files they are one
    assert target.architecture["model_type"] == family
    assert target.architecture["architectures"] == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]


@pytest.mark.parametrize(("name", "arch"), [("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")])
def test_the_text_part_of_qwen3_vl_is_qwen3(name: str, arch: str, tmp_path: Path) -> None:
    model, (_, metadata, extra) = model_of(name), MODELS[name]
    write_gguf(tmp_path / "m.gguf", model, metadata=metadata | {"n_deepstack_layers": 3}, extra=extra, arch=arch)
    target = load_target(tmp_path / "m.gguf", device="cpu", compile="off")
    tokens = torch.randint(0, SMALL["vocab_size"], (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(scores(target, tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_context_of_ministral_ends_where_its_attention_is_scaled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "m.gguf", model_of("ministral3"), metadata=MODELS["ministral3"][1])
    assert load_target(tmp_path / "m.gguf", device="cpu", compile="off").max_context == 64
    assert "ends at 64 tokens: beyond, its attention is scaled by position" in caplog.text
    assert load_target(tmp_path / "m.gguf", device="cpu", compile="off", max_context=40).max_context == 40


FEW = [kind for kind in READERS if kind not in FLOATS]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 96}
WORDY = WIDE | {"vocab_size": 300}  # with room for a tokenizer
MIXED = {
    "attn_v": "Q6_K",
    "attn_": "Q4_K",
    "ffn_down": "Q6_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q8_0",
    "token": "Q6_K",
    "output.": "Q4_0",
}


@pytest.mark.parametrize(("name", "kinds"), thinned(["llama", "qwen3"], [*READERS, "mixed"], keep=4))
def test_weights_are_those_of_the_package(name: str, kinds: str, tmp_path: Path) -> None:
    model, path = model_of(name, **WIDE), tmp_path / "m.gguf"
    write_gguf(path, model, MIXED if kinds == "mixed" else kinds)
    found = dict(load_target(path, device="cpu", compile="off").named_weights())
    reader, heads = gguf.GGUFReader(path), {"attn_q": 4, "attn_k": 2}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], 3)
    theirs = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    assert len(theirs) == len(found)
    for ours, weight in found.items():
        key = names.get_name(ours, (".weight",))
        assert key is not None
        wanted = theirs[key]
        if name == "llama" and (count := heads.get(key.split(".")[-2])):
            pairs = wanted.view(count, 32, 2, -1)
            wanted = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).view(wanted.shape)
        assert torch.equal(weight, wanted), ours


QUICK = ("Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "F16")  # each stores its factors in another way


@pytest.mark.parametrize(
    "kinds",
    [pytest.param(kinds, marks=() if kinds in QUICK else pytest.mark.slow) for kinds in (*FEW, "mixed", "BF16", "F16")],
)
def test_compiled(kinds: str, tmp_path: Path) -> None:
    """Compiled kernels match the torch operations, which quantize activations the same way."""
    path = tmp_path / "m.gguf"
    wide = WIDE | ({"hidden_size": 512} if kinds.endswith("_K") else {})  # two blocks side by side
    write_gguf(path, model_of("llama", **wide), MIXED if kinds == "mixed" else kinds)
    compiled = load_target(path, device="cpu", compile="on", kv_dtype="float32")
    plain, differences = load_target(path, device="cpu", compile="off"), []
    for seed in range(9):
        tokens = torch.randint(0, 96, (1, 5), generator=torch.Generator().manual_seed(seed))
        expected = scores(plain, tokens)[0]
        differences += ((scores(compiled, tokens)[0] - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()
    # An activation halfway between two codes may round either way: the last bits of torch's products depend on the
    # processor. This affects a minority of positions, and those after it in the same sequence.
    assert np.median(differences) < 1e-5 and max(differences) < 0.05, differences
    of_4 = ("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "mixed")
    bits = dict.fromkeys((*FEW, "mixed"), "int8 weights") | dict.fromkeys(of_4, "int4 weights")
    bits |= {"BF16": "weights kept in bfloat16"}
    assert compiled.running == ", ".join(["native, compiled", *([bits[kinds]] if kinds in bits else [])])


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kind", "most"), [({}, "bfloat16", 0.1), ({"kv_dtype": "int8"}, "int8", 0.15)])
def test_rounded_keys_and_values(options: Any, kind: str, most: float, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, model_of("llama", **WIDE), "Q8_0")
    target, plain = load_target(path, device="cpu", **options), load_target(path, device="cpu", compile="off")
    assert target.running == f"native, compiled, {kind} keys and values, int8 weights"
    tokens = torch.arange(20)[None]
    wanted = scores(plain, tokens)
    assert 0 < (scores(target, tokens) - wanted).norm() < most * wanted.norm()


def test_rounded_scores_are_near_those_of_the_model(tmp_path: Path) -> None:
    model = model_of("qwen3", **WIDE)
    write_gguf(tmp_path / "m.gguf", model, "Q8_0")
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits
    found = scores(load_target(tmp_path / "m.gguf", device="cpu", compile="off"), tokens)
    assert (found - wanted).norm() < 0.06 * wanted.norm()


def test_parts_are_one_target(tmp_path: Path) -> None:
    model = model_of("qwen3")
    write_gguf(tmp_path / "m.gguf", model)
    write_gguf(tmp_path / "split.gguf", model, shard_tensors=20)
    last = tmp_path / "split-00002-of-00002.gguf"
    tokens = torch.arange(20)[None]
    whole, split = (load_target(path, device="cpu", compile="off") for path in (tmp_path / "m.gguf", last))
    assert torch.equal(scores(whole, tokens), scores(split, tokens))
    assert split.path == tmp_path / "split-00001-of-00002.gguf"
    assert load_target_text(last).max_context == 64


def test_fingerprints(tmp_path: Path) -> None:
    """Unquantized files have the fingerprint of their folder; each quantization has its own."""
    model = model_of("llama", **WORDY)
    model.bfloat16().save_pretrained(tmp_path / "folder")
    folder = load_target(tmp_path / "folder", device="cpu", compile="off").source_fingerprint
    found = {}
    for kinds in ("BF16", "F32", "Q8_0", "mixed"):
        path = tmp_path / f"{kinds}.gguf"
        write_gguf(path, model, MIXED if kinds == "mixed" else kinds, tokenizer=tiny_tokenizer())
        target = load_target(path, device="cpu", compile="off")
        found[kinds] = target.source_fingerprint
        assert found[kinds] == weights_fingerprint(target.named_weights()) == describe_target(path).fingerprint()
        with open_checkpoint(path, doing="converted") as opened:
            assert opened.source_fingerprint == found[kinds]
    assert found["BF16"] == found["F32"] == folder
    assert len({folder, found["Q8_0"], found["mixed"]}) == 3


@pytest.mark.parametrize(
    "name", thinned([name for name in MODELS if not name.startswith(("qwen3_5", "qwen3_next"))], keep=2)
)
def test_folder_of_a_file(name: str, tmp_path: Path) -> None:
    """Configuration, weights and tokenizer of `open_checkpoint` make a folder of the same model."""
    model, (_, metadata, extra) = model_of(name, vocab_size=300), MODELS[name]
    path, folder = tmp_path / "m.gguf", tmp_path / "folder"
    write_gguf(path, model, metadata=metadata, extra=extra, tokenizer=tiny_tokenizer())
    folder.mkdir()
    with open_checkpoint(path, doing="read") as opened:
        (folder / "config.json").write_text(json.dumps(opened.raw))
        tensors = {key: tensor.tensor().contiguous() for key, tensor in opened.tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        for file in opened.files:
            shutil.copy(file, folder)
    made, own = (load_target(place, device="cpu", compile="off") for place in (folder, path))
    tokens = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(scores(made, tokens), scores(own, tokens), rtol=1e-5, atol=1e-5)
    text = "One two, and 34!"
    assert made.tokenizer is not None and own.tokenizer is not None
    assert made.tokenizer(text).input_ids == own.tokenizer(text).input_ids
    assert made.eos_token_ids == own.eos_token_ids


def test_latent_attention_in_files(tmp_path: Path) -> None:
    """Keys in 8 bits, an MTP head that is not in the file, and files before 2025 are refused by name."""
    path, model, metadata = tmp_path / "m.gguf", model_of("glm4_moe_lite"), MODELS["glm4_moe_lite"][1]
    write_gguf(path, model, metadata=metadata | {"block_count": 4, "nextn_predict_layers": 1})
    with pytest.raises(ValueError, match="kv_dtype is 'int8', and .* has latent attention"):
        load_target(path, device="cpu", kv_dtype="int8")
    target = load_target(path, device="cpu", compile="on")
    assert load_drafter(target=target).kind == "lookup"
    with pytest.raises(ValueError, match=r"it lacks blk\.3\."):
        load_drafter("mtp", target=target)
    write_gguf(path, model, metadata=metadata | {"attention.key_length_mla": None})
    with pytest.raises(ValueError, match="one matrix makes its keys and values"):
        load_target(path, device="cpu")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "experts": ({"expert_count": 8}, {}, "it is a mixture of experts"),
    "bidirectional": ({"attention.causal": False}, {}, "its attention is bidirectional"),
    "values": ({"attention.value_length": 16}, {}, "its values and keys differ in size"),
    "rotation": ({"rope.dimension_count": 6}, {}, "it rotates a part of each head only"),
    "longrope": ({"rope.scaling.type": "longrope"}, {}, "its rotary embeddings are scaled by longrope"),
    "yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 0.5, "rope.scaling.factor": 2.0},
        {},
        "scaled by yarn attn_factor",
    ),
    "window": (
        {"attention.sliding_window": 4},
        {},
        "it has a sliding window, which llama.cpp ignores in the architecture qwen3",
    ),
    "layers": ({"feed_forward_length": [40, 40, 20]}, {}, "qwen3.feed_forward_length differs from layer to layer"),
    "absent": ({"context_length": None}, {}, "it lacks qwen3.context_length"),
    "strange": (
        {},
        {"blk.0.attn_sinks.weight": np.ones(4, np.float32)},
        "does not know, such as blk.0.attn_sinks.weight",
    ),
    "lacking": ({"block_count": 4}, {}, "it lacks blk.3.attn_q.weight"),
    "shape": ({"feed_forward_length": 48}, {}, r"blk.0.ffn_gate.weight has the shape \[40, 32\] instead of \[48, 32\]"),
    "factors": (
        {},
        {"rope_freqs.weight": np.ones(4, np.float32)},
        r"rope_freqs.weight has the shape \[4\] instead of \[6\]",
    ),
    "factors by length": (
        {},
        {f"rope_factors_{name}.weight": np.ones(6, np.float32) for name in ("short", "long")},
        "does not know, such as rope_factors_long.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    metadata, extra, message = REFUSED[case]
    path = tmp_path / "m.gguf"
    write_gguf(path, model_of("qwen3"), metadata=metadata, extra=extra)
    with pytest.raises(UsageError, match=f"m.gguf cannot be run: .*{message}.*use the folder of the original"):
        load_target(path, device="cpu")


def test_refused_architectures(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    finish(writer)
    message = "its architecture mamba is none of deepseek2, .*llama, "
    for load in (load_target, load_target_text):
        with pytest.raises(UsageError, match=message):
            load(tmp_path / "m.gguf")


def test_refused_types(tmp_path: Path) -> None:
    model, path = model_of("llama", **WIDE), tmp_path / "m.gguf"
    remedy = "use a file of this model in another type, .*llama-quantize --allow-requantize"
    write_gguf(path, model)
    whole = path.read_bytes()
    for tensor, dimensions, number, message in (
        (b"blk.1.ffn_up.weight", 2, 99, f"99, and F32, .* are read; {remedy}"),
        (b"blk.1.ffn_up.weight", 2, 9, f"Q8_1, and F32, .* are read; {remedy}"),
        (b"blk.1.ffn_norm.weight", 1, 8, f"Q8_0, and vectors are read in F32, F16, BF16; {remedy}"),
    ):
        place = whole.index(tensor) + len(tensor) + 4 + 8 * dimensions
        assert whole[place : place + 4] == bytes(4), "the type F32"
        path.write_bytes(whole[:place] + number.to_bytes(4, "little") + whole[place + 4 :])
        with pytest.raises(UsageError, match=f"{tensor.decode()} is of the type {message}"):
            load_target(path, device="cpu")


def test_products_quantized_and_floats(tmp_path: Path) -> None:
    """Fused projections keep their numbers if some are quantized and some are not."""
    model, path = model_of("llama", **WIDE), tmp_path / "m.gguf"
    write_gguf(path, model, {"attn_q": "Q8_0", "blk": "BF16"})
    plain = load_target(path, device="cpu", compile="off")
    compiled = load_target(path, device="cpu", compile="on", kv_dtype="float32")
    weights = dict(plain.named_weights())
    assert weights["model.layers.0.self_attn.k_proj.weight"].dtype == torch.float32
    write_gguf(path, model, {"attn_q": "Q8_0"})
    again = dict(load_target(path, device="cpu", compile="off").named_weights())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights[name], again[name])
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(scores(compiled, tokens), scores(plain, tokens), rtol=1e-4, atol=1e-4)


def test_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that take much more memory than the file are reported, and those that do not fit are refused."""
    path, cpu = tmp_path / "m.gguf", torch.device("cpu")
    write_gguf(path, model_of("llama", **WIDE), "IQ2_XS")
    target = load_target(path, device="cpu", compile="off")
    file = open_gguf(path)
    needed = decoder_weights(file, fitted(decoder_config(gguf_config(file)), file)).nbytes(torch.float32, few=True)
    packed = sum(layer.nbytes for layer in target.decoder.modules() if isinstance(layer, PackedLinear))
    assert needed == pytest.approx(packed, rel=0.05)
    check_memory(file, needed, needed, cpu)
    assert not caplog.text
    check_memory(file, needed + 2 * GIB, 4 * GIB, cpu)
    assert "The weights of" in caplog.text and "take 8 bits" in caplog.text
    with pytest.raises(UsageError, match="m.gguf take 3.0 GiB of memory, and 1.0 GiB are free; .* this one in Q4_K_M"):
        check_memory(file, 3 * GIB, GIB, cpu)
    assert not check_memory(file, 3 * GIB, GIB, cpu, mapped=True)
    assert "take 3.0 GiB of 1.0 GiB of free memory. They are mapped" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": 2**32 - 1}, "it has 4294967295 layers, but only 30 tensors"),
        ({"block_count": 3, "nextn_predict_layers": [-(2**31)]}, "it has 2147483651 layers, but only 30 tensors"),
        ({"block_count": "3"}, "metadata that make no model .TypeError"),
        ({"attention.head_count": 0}, "metadata that make no model .ZeroDivisionError"),
        ({"attention.head_count": 5}, "metadata that make no model"),
    ],
)
def test_metadata_that_lie(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", model_of("llama"), metadata=metadata)
    for load in (load_target_text, load_target):
        with pytest.raises(UsageError, match=message):
            load(tmp_path / "a.gguf")


def test_a_context_that_is_a_list(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", model_of("llama"), metadata={"context_length": [64, 64]})
    with pytest.raises(UsageError, match="metadata that make no model .TypeError"):
        load_target(tmp_path / "a.gguf", device="cpu")


@pytest.mark.parametrize("kind", [0, 99])  # F32, of no bytes; and a type whose size is unknown
def test_experts_without_end(kind: int, tmp_path: Path) -> None:
    """A file may claim more experts than there is memory for their names."""
    path, name = tmp_path / "a.gguf", b"blk.0.ffn_gate_exps.weight"
    write_gguf(path, model_of("qwen3_moe"), metadata=MODELS["qwen3_moe"][1] | {"expert_count": 2**31})
    whole = path.read_bytes()
    place, inner = whole.index(name) + len(name) + 4, 0 if kind == 0 else 32
    sizes = struct.pack("<QQQI", 32, inner, 2**31, kind)
    path.write_bytes(whole[:place] + sizes + whole[place + len(sizes) :])
    with pytest.raises(UsageError, match="it has 2147483648 experts, and .* shape" if kind == 0 else "of the type 99"):
        load_target(path, device="cpu")


def test_every_share_of_a_head_is_rotated(tmp_path: Path) -> None:
    """88 * (30 / 88), rounded down, is 29."""
    metadata = MODELS["phi3"][1] | {"rope.dimension_count": 30}
    write_gguf(tmp_path / "a.gguf", model_of("phi3", head_dim=88, hidden_size=352), metadata=metadata)
    file = open_gguf(tmp_path / "a.gguf")
    [rope] = decoder_config(gguf_config(file)).ropes
    assert rope.inverse_frequencies == tuple(default_frequencies(30, 10000.0).tolist())


@pytest.mark.parametrize("scale", [-0.5, float("nan")])
def test_factors_that_no_layer_is_computed_with(scale: float, tmp_path: Path) -> None:
    metadata = MODELS["granite"][1] | {"residual_scale": scale}
    write_gguf(tmp_path / "a.gguf", model_of("granite"), metadata=metadata)
    with pytest.raises(UsageError, match="its factor on residuals is not above 0"):
        load_target(tmp_path / "a.gguf", device="cpu")


def test_refused_options(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, model_of("llama"))
    for options, message in (
        ({"quantize": "int8"}, "quantize is 'int8', and the weights of a GGUF file are not changed"),
        ({"revision": "main"}, "revision is 'main', which goes with a model folder or hub name"),
        ({"adapter": "x"}, "adapter is 'x', which goes with a model folder or hub name"),
        ({"backend": "hf"}, "The hf backend cannot run .*m.gguf: it reads no GGUF files. Use another backend, or auto"),
    ):
        with pytest.raises(UsageError, match=message):
            load_target(path, device="cpu", **options)
    with pytest.raises(UsageError, match="revision is 'main'"):
        load_target_text(path, "main")
    for options in ({"revision": "main"}, {"adapter": "x"}):
        with pytest.raises(UsageError, match="goes with a model folder or hub name"), open_checkpoint(path, **options):
            pass
    with pytest.raises(UsageError, match="m.gguf cannot be quantized without its tokenizer"), open_checkpoint(path):
        pass
    write_gguf(path, model_of("llama", **WORDY), "Q8_0", tokenizer=tiny_tokenizer())
    with pytest.raises(UsageError, match=r"m.gguf is quantized already \(Q8_0\).* F16, BF16"), open_checkpoint(path):
        pass
    with pytest.raises(UsageError, match="There is no file"):
        load_target(tmp_path / "absent.gguf", device="cpu")


@pytest.mark.parametrize("kinds", ["Q4_1", "F32"])
def test_a_gpu_gets_numbers(kinds: str, tmp_path: Path) -> None:
    """A GPU gets dequantized weights; a CPU quantizes the inputs of products too."""
    path = tmp_path / "m.gguf"
    options: dict[str, Any] = {"dtype": "float32", "backend": "native", "compile": "off"}
    write_gguf(path, model_of("llama", **WIDE), kinds)
    tokens = torch.tensor([[1, 2, 3]])
    expected = load_target(path, device="cpu", **options)
    logits = expected.forward(tokens, chain_parents(1, 3), expected.new_cache(1, 8)).logits
    with pretended_gpu():
        target = load_target(path, device="cuda:0", **options)
        assert target.bits is None and {weight.device for _, weight in target.named_weights()} == {GPU}
        weights = {name: weight.cpu() for name, weight in target.named_weights()}
        found = target.forward(tokens.to(GPU), chain_parents(1, 3), target.new_cache(1, 8)).logits.cpu()
    torch.testing.assert_close(weights, dict(expected.named_weights()), rtol=0, atol=0)
    assert target.source_fingerprint == expected.source_fingerprint
    if kinds == "F32":
        torch.testing.assert_close(found, logits)


@pytest.mark.parametrize(
    "kinds", [*((kind, kind) for kind in sorted(PACKED_KINDS)), *permutations(sorted(SIMILAR_KINDS), 2)]
)
@pytest.mark.parametrize("head_dim", [4, 16])
def test_matrices_packed_from_the_file_are_those_packed_by_torch(
    kinds: tuple[str, str], head_dim: int, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, rows, kind in zip("ab", (32, 48), kinds, strict=True):
        writer.add_tensor(name, random_blocks(kind, (rows, 512), rows), raw_dtype=GGMLQuantizationType[kind])
    finish(writer)
    tensors = dict(open_gguf(tmp_path / "m.gguf").tensors)
    tensors["b"] = replace(tensors["b"], order=torch.randperm(48, generator=torch.Generator().manual_seed(48)))
    weights = GGUFWeights([], tensors)
    library = build(torch.float32, torch.float32, head_dim, integers=True).library()
    assert library is not None
    packed = weights.packed(["a", "b"], library)
    expected = pack_weights([weights.read(name) for name in "ab"], library)
    assert packed is not None and packed.outputs == expected.outputs == 80
    actual, wanted = packed.data.tensors(), expected.data.tensors()  # type: ignore[union-attr]
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == actual[name].dtype and tensor.shape == actual[name].shape
        assert torch.equal(tensor.view(torch.uint8), actual[name].view(torch.uint8)), name


@pytest.mark.parametrize("extremes", [(104, 143), (103, 143), (104, 144), (0, 200)])
def test_scales_of_mxfp4_are_exact(extremes: tuple[int, int], tmp_path: Path) -> None:
    """Powers of two beyond float16 are kept in float32."""
    raw = random_blocks("MXFP4", (32, 2048), 3)
    raw[:, ::17] = np.linspace(*extremes, raw[:, ::17].size).astype(np.uint8).reshape(32, -1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a", raw, raw_dtype=GGMLQuantizationType.MXFP4)
    finish(writer)
    weights = GGUFWeights([], open_gguf(tmp_path / "m.gguf").tensors)
    library = build(torch.float32, torch.float32, 16, integers=True).library()
    assert library is not None
    packed = weights.packed(["a"], library)
    assert (packed is None) == (extremes != (104, 143))
    packed = packed or pack_weights([weights.read("a")], library)
    actual = packed.data.weight().dequantize()  # type: ignore[union-attr]
    assert torch.equal(actual, torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType.MXFP4)))
