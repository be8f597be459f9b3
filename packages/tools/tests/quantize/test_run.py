"""Checkpoints quantized: content, perplexity, and failures of writing."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from math import exp, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf_models import MODELS, model_of, scores
from gguf_writer import write_gguf
from safetensors.torch import load_file, save_file
from thinned import thinned
from tiny_families import write_model
from tiny_models import tiny_tokenizer
from torch import Tensor

from blockdraft.decode.proposal import chain_parents
from blockdraft.errors import UsageError
from blockdraft.formats.stored import dense
from blockdraft.nn.decoder_layer import DecoderLayer
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.nn.quantize_weight import quantize_weight
from blockdraft.targets import Target, load_target
from blockdraft_tools import model_folder
from blockdraft_tools.checkpoint import open_checkpoint
from blockdraft_tools.quantize import run
from blockdraft_tools.quantize.run import quantize
from blockdraft_tools.quantize.settings import CalibrationSettings, QuantizeSettings
from blockdraft_tools.quantize.text import Text, cut_text

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
QUICK = {"device": "cpu", "compile": "off"}


def text_of(path: Path, rows: int = 24) -> Text:
    """Text that this model wrote."""
    target, tokens = load(path), torch.arange(2, rows + 2)[:, None]
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        cache = target.new_cache(*tokens.shape)
        logits = target.forward(tokens, chain_parents(*tokens.shape), cache).logits[:, -1]
        tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1, generator=generator)], 1)
    return Text(tokens[: -rows // 3], tokens[-rows // 3 :])


def load(path: Path, **how: Any) -> Any:
    return load_target(path, **QUICK | how)


def perplexity(target: Target, tokens: Tensor) -> float:
    logits = target.forward(tokens, chain_parents(*tokens.shape), target.new_cache(*tokens.shape)).logits
    return exp(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_written_weights_are_the_rounded_ones(
    models: dict[str, Path], tmp_path: Path, bits: Any, zero_points: bool
) -> None:
    settings = QuantizeSettings(bits, 8, zero_points=zero_points)
    done = quantize(models["qwen2"], tmp_path / "few", settings)
    source, target = load(models["qwen2"]), load(tmp_path / "few")
    weights = dict(target.named_weights())
    for name, weight in source.named_weights():
        own = 8 if name in TABLES else bits
        expected = quantize_weight(weight, own, 8, zero_points).dequantize() if weight.ndim == 2 else weight
        torch.testing.assert_close(weights[name], expected, rtol=1e-3 if zero_points else 0, atol=1e-5 * zero_points)
    assert (target.decoder.bits, target.decoder.embedding.bits, target.decoder.head.bits) == (bits, 8, 8)
    assert target.source_fingerprint == source.source_fingerprint is not None
    assert target.eos_token_ids == source.eos_token_ids
    size = (tmp_path / "few" / "model.safetensors").stat().st_size
    assert done.bytes <= size < done.bytes + 20_000 and done.bytes < done.bytes_before / 2
    assert (done.group, done.perplexity, done.is_calibrated) == (8, None, False)


@pytest.mark.slow
def test_it_runs_in_any_dtype_and_compiled(models: dict[str, Path], tmp_path: Path) -> None:
    quantize(models["qwen2"], tmp_path / "few")
    tokens = text_of(models["qwen2"]).held_out
    for how in ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"compile": "on"}):
        target = load(tmp_path / "few", **how)
        assert "int4 weights" in target.running and ("compiled" in target.running) == ("compile" in how)
        assert perplexity(target, tokens) == pytest.approx(perplexity(load(tmp_path / "few"), tokens), rel=0.05)


def test_tables_may_stay_as_they_are(models: dict[str, Path], tmp_path: Path) -> None:
    for name in ("qwen2", "llama"):
        quantize(models[name], tmp_path / name, QuantizeSettings(tables="keep"))
        source, target = load(models[name]), load(tmp_path / name)
        assert target.decoder.embedding.bits is None and target.decoder.head.bits is None
        assert torch.equal(target.decoder.embedding.weight, source.decoder.embedding.weight)
        assert ("lm_head.weight" in load_file(tmp_path / name / "model.safetensors")) == (name == "qwen2")


def test_transformers_is_not_asked_to_read_rounded_tables(models: dict[str, Path], tmp_path: Path) -> None:
    quantize(models["llama"], tmp_path / "few")
    with pytest.raises(UsageError, match="no embedding of 8 bits.*native backend.*--tables keep"):
        load_target(tmp_path / "few", backend="hf")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("zero_points", [False, True])
def test_transformers_reads_the_same_numbers(models: dict[str, Path], tmp_path: Path, zero_points: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    quantize(models["qwen2"], tmp_path / "few", QuantizeSettings(tables="keep", zero_points=zero_points))
    wide = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if zero_points else {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=torch.float32, **wide)
    target = load(tmp_path / "few")
    tokens = text_of(models["qwen2"]).held_out
    with torch.no_grad():
        theirs = model(tokens).logits  # which unpacks the weights
    state, ours = model.state_dict(), dict(target.named_weights())
    for name, weight in ours.items():
        torch.testing.assert_close(weight, state[name], rtol=2e-3, atol=2e-3)
    logits = target.forward(tokens, chain_parents(*tokens.shape), target.new_cache(*tokens.shape)).logits
    assert (logits - theirs).std() < 0.1 * theirs.std()  # we round inputs, too


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gpt_oss", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_5_text", "qwen3_next"],
)
def test_layers_of_all_kinds_are_quantized_without_their_gates(family: str, tmp_path: Path) -> None:
    source = write_model(family, tmp_path / "source")
    text = text_of(source)
    done = quantize(source, tmp_path / "few", QuantizeSettings(4, 8), text)
    plain = quantize(source, tmp_path / "plain", QuantizeSettings(4, 8))
    assert done.perplexity is not None and plain.perplexity is None
    assert done.perplexity.source == pytest.approx(perplexity(load(source), text.held_out), rel=1e-4)
    assert done.perplexity.nearest == pytest.approx(perplexity(load(tmp_path / "plain"), text.held_out), rel=1e-3)
    if done.is_calibrated:
        assert done.perplexity.calibrated == pytest.approx(perplexity(load(tmp_path / "few"), text.held_out), rel=1e-3)
    for name in ("few", "plain"):
        target = load(tmp_path / name, compile="on")
        assert (target.decoder.layers[0].qkv.bits, target.running) == (4, "native, compiled, int4 weights")
        assert perplexity(target, text.held_out) == pytest.approx(
            perplexity(load(tmp_path / name), text.held_out), rel=0.02
        )
    gates = ("mlp.gate.", "feed_forward.gate.", "shared_expert_gate.", "in_proj_b.", "in_proj_a.")
    exact = dict(load(source).named_weights())
    for label, weight in target.named_weights():  # of the one without a text
        bits = 8 if label in TABLES else 4
        whole = weight.ndim != 2 or any(part in label for part in gates)
        right = exact[label] if whole else quantize_weight(exact[label], bits, 8).dequantize()
        assert torch.equal(weight, right), label
    with open_checkpoint(source) as opened, torch.no_grad():
        calibrated = dict(run._CalibratedRounding(opened, QuantizeSettings(4, 8), 8, text).weights(lambda *_: None))
    assert calibrated.keys() == exact.keys()
    for label, rounded in calibrated.items():
        assert (dense(rounded) - exact[label]).norm() <= 0.3 * exact[label].norm(), label


def test_experts_are_calibrated_on_what_they_read(tmp_path: Path) -> None:
    with open_checkpoint(write_model("qwen3_moe", tmp_path)) as source:
        layer = DecoderLayer(source.wanted, 0, lambda name: source.tensors[name].tensor().float())
    read = list[Tensor]()
    layer.router.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    sums = run.moments(run.LayerwiseForward(layer.config, 20), layer, torch.randn(3, 20, 32))
    [x] = read
    chosen = layer.router(x).topk(2).indices
    for expert, (parts, inputs) in enumerate(run.by_inputs(layer, "down", sums)):
        inner = layer.inner(layer.expert_part("gate_up", expert)(x[(chosen == expert).any(1)]))
        assert [name for name, _ in parts] == [f"model.layers.0.mlp.experts.{expert}.down_proj"]
        torch.testing.assert_close(inputs, inner.T @ inner)
    [(parts, inputs)] = run.by_inputs(layer, "gate_up", sums)
    assert len(parts) == 8
    torch.testing.assert_close(inputs, x.T @ x)


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["glm4_moe_lite", "gpt_oss", "granitemoehybrid", "lfm2_moe", "nemotron_h"])
def test_files_are_quantized_as_folders_are(name: str, tmp_path: Path) -> None:
    metadata, fields = MODELS[name][1], {"vocab_size": 265}
    if name == "glm4_moe_lite":  # sizes of which groups are parts
        fields |= {"q_lora_rank": 16, "qk_nope_head_dim": 16}
        metadata = metadata | {"attention.q_lora_rank": 16, "attention.key_length_mla": 24}
    model = model_of(name, **fields)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "m.gguf", model, "F32", tiny_tokenizer(), metadata=metadata)
    for source, out in (("folder", "few"), ("m.gguf", "too")):
        quantize(tmp_path / source, tmp_path / out, QuantizeSettings(8, 8))
    expected, actual = (load(tmp_path / out) for out in ("few", "too"))
    for (label, weight), (_, right) in zip(actual.named_weights(), expected.named_weights(), strict=True):
        torch.testing.assert_close(weight, right, msg=label)
    tokens = torch.arange(3, 15)[None]
    torch.testing.assert_close(scores(actual, tokens), scores(expected, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(["qwen2", "llama", "gemma2", "gemma3_text"], keep=2))
def test_perplexity_is_that_of_the_models(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Perplexity layer by layer is that of whole targets, and calibration depends on the text."""
    text = text_of(models[name])
    done = quantize(models[name], tmp_path / "few", QuantizeSettings(4, 8), text)
    assert done.perplexity is not None
    assert done.perplexity.source == pytest.approx(perplexity(load(models[name]), text.held_out), rel=1e-4)
    plain = quantize(models[name], tmp_path / "plain", QuantizeSettings(4, 8))
    assert plain.perplexity is None
    assert done.perplexity.nearest == pytest.approx(perplexity(load(tmp_path / "plain"), text.held_out), rel=1e-3)
    if done.is_calibrated:
        assert done.perplexity.calibrated < done.perplexity.nearest
        assert done.perplexity.calibrated == pytest.approx(perplexity(load(tmp_path / "few"), text.held_out), rel=1e-3)
    else:
        assert same_files(tmp_path / "few", tmp_path / "plain")


def same_files(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in os.listdir(one))


def test_calibration_brings_outputs_nearer(models: dict[str, Path], tmp_path: Path) -> None:
    text = text_of(models["llama"], 90)
    logits = {}
    quantize(models["llama"], tmp_path / "plain", QuantizeSettings(4, 16))
    assert quantize(models["llama"], tmp_path / "few", QuantizeSettings(4, 16), text).is_calibrated
    for name, path in {"source": models["llama"], "plain": tmp_path / "plain", "few": tmp_path / "few"}.items():
        target = load(path)
        shape = text.held_out.shape
        logits[name] = target.forward(text.held_out, chain_parents(*shape), target.new_cache(*shape)).logits
    errors = [(logits[name] - logits["source"]).square().mean() for name in ("few", "plain")]
    assert errors[0] < errors[1]


def test_calibration_that_raises_perplexity_is_discarded(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> None:
    def spoilt(weight: Tensor, moments: Tensor, *how: Any) -> QuantizedWeight:
        return quantize_weight(torch.zeros_like(weight), *how)

    seen, moments = [], run.moments

    def watched(forward: Any, layer: Any, states: Tensor) -> Any:
        seen.append(states.clone())
        return moments(forward, layer, states)

    plain = quantize(models["llama"], tmp_path / "plain")
    monkeypatch.setattr(run, "quantize_weight_gptq", spoilt)
    monkeypatch.setattr(run, "moments", watched)
    constants(model_folder, SHARD=4000)  # some were written before that was known
    done = quantize(models["llama"], tmp_path / "few", text=text_of(models["llama"]))
    assert done.perplexity is not None and not done.is_calibrated
    assert done.perplexity.source < done.perplexity.nearest < done.perplexity.calibrated
    assert done.bytes == plain.bytes
    # The text passes the rounded layers, which add nothing here.
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    theirs = dict(load(tmp_path / "plain").named_weights())
    assert all(torch.equal(weight, theirs[name]) for name, weight in load(tmp_path / "few").named_weights())


def test_calibration_whose_perplexity_is_unknown_is_discarded(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "broken")
    tensors = load_file(tmp_path / "broken/model.safetensors")
    tensors["model.norm.weight"][1] = nan
    save_file(tensors, tmp_path / "broken/model.safetensors", {"format": "pt"})
    done = quantize(tmp_path / "broken", tmp_path / "few", text=text_of(models["llama"]))
    quantize(tmp_path / "broken", tmp_path / "plain")
    assert not done.is_calibrated and same_files(tmp_path / "few", tmp_path / "plain")


def test_files_of_large_models_are_several(
    models: dict[str, Path], tmp_path: Path, constants: Callable[..., None]
) -> None:
    quantize(models["qwen2"], tmp_path / "one")
    constants(model_folder, SHARD=4000)
    quantize(models["qwen2"], tmp_path / "several")
    files = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(tmp_path / "one" / "model.safetensors"))
    theirs = dict(load(tmp_path / "one").named_weights())
    assert all(torch.equal(weight, theirs[name]) for name, weight in load(tmp_path / "several").named_weights())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (QuantizeSettings(group=32), "Groups of 32 do not divide 48 inputs; 16, 8 would"),
        (QuantizeSettings(group=12), "group must be a multiple of 8.*, got 12"),
    ],
)
def test_groups_that_do_not_fit(
    models: dict[str, Path], tmp_path: Path, settings: QuantizeSettings, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(models["qwen2"], tmp_path / "few", settings)
    assert not list(tmp_path.iterdir())
    assert quantize(models["qwen2"], tmp_path / "few").group == 16  # the largest that fits all


def test_models_that_cannot_be_quantized(models: dict[str, Path], tmp_path: Path) -> None:
    quantize(models["llama"], tmp_path / "few")
    with pytest.raises(ValueError, match="quantized already .compressed-tensors.; give the model"):
        quantize(tmp_path / "few", tmp_path / "again")
    with pytest.raises(ValueError, match="few exists already; choose another folder"):
        quantize(models["llama"], tmp_path / "few")
    with pytest.raises(ValueError, match="There is no folder"):
        quantize(tmp_path / "none", tmp_path / "again")
    broken = tmp_path / "broken"
    broken.mkdir()
    config = json.loads((models["llama"] / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="native decoder cannot run it: it has no weights in safetensors"):
        quantize(broken, tmp_path / "again")
    (broken / "config.json").write_text(
        json.dumps(config | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    with pytest.raises(ValueError, match="gpt2 is none of its families"):
        quantize(broken, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "few"]


def test_a_full_disk_leaves_nothing(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    constants: Callable[..., None],
    free_disk: Callable[[int], None],
) -> None:
    constants(model_folder, SHARD=4000)
    save, calls = model_folder.save_file, []

    def fill(tensors: Any, path: Path, **others: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(tensors, path, **others)

    monkeypatch.setattr(model_folder, "save_file", fill)
    with pytest.raises(ValueError, match="few cannot be written .*No space left on device.; nothing of it is left"):
        quantize(models["qwen2"], tmp_path / "few")
    assert len(calls) == 3 and not list(tmp_path.iterdir())
    free_disk(100)
    with pytest.raises(ValueError, match="few needs 0.00 GB and its disk has 0.00 GB free"):
        quantize(models["qwen2"], tmp_path / "few")
    assert not list(tmp_path.iterdir())


def test_text_is_cut_into_rows() -> None:
    settings = CalibrationSettings(tokens=60, length=10, held_out=20)
    text = cut_text(list(range(200)), "it", 1024, settings)
    assert (text.calibration.shape, text.held_out.shape) == ((6, 10), (2, 10))
    assert torch.cat([text.calibration, text.held_out]).flatten().tolist() == list(range(80))
    short = cut_text(list(range(25)), "it", 8, settings)
    assert (short.calibration.shape, short.held_out.shape) == ((2, 8), (1, 8))
    with pytest.raises(ValueError, match="it holds 15 tokens; give at least 20, better 80"):
        cut_text(list(range(15)), "it", 1024, settings)
    with pytest.raises(
        ValueError, match="tokens and held_out are 15 together; 10 are read at a time, so give at least 20"
    ):
        cut_text(list(range(500)), "it", 1024, CalibrationSettings(tokens=10, length=10, held_out=5))
