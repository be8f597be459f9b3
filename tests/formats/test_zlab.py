import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_sizes import SIZES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from blockdraft.formats import check_fits
from blockdraft.formats.zlab import (
    config_dict,
    parse_config,
    read_checkpoint,
    tensor_shapes,
    write_checkpoint,
)
from blockdraft.nn.draft_config import DraftConfig, LayerAttention, default_target_layers

FULL, SLIDING = "full_attention", "sliding_attention"
BIDIRECTIONAL = LayerAttention(causal=False, window=None)
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
CONFIG = DraftConfig(
    **SIZES,
    block_size=4,
    mask_token_id=63,
    target_layers=(1, 5, 7),
    rope_theta=5e5,
    layers=(BIDIRECTIONAL, BIDIRECTIONAL),
)
RAW: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **SIZES,
    "block_size": 4,
    "rope_theta": 5e5,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 5, 7]},
}


def changed(**changes: Any) -> dict[str, Any]:
    """Return `RAW` with changed keys, None to remove; `nested` changes those of dflash_config."""
    nested = {**RAW["dflash_config"], **changes.pop("nested", {})}
    raw = {**RAW, "dflash_config": {key: value for key, value in nested.items() if value is not None}, **changes}
    return {key: value for key, value in raw.items() if value is not None}


def make_tensors(config: DraftConfig = CONFIG, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*s, generator=generator).to(dtype) for name, s in tensor_shapes(config).items()}


def put(folder: Path, raw: Any, *shards: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"dflash_draft_model-{i}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("num_target_layers", "count", "target_layers"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (34, 5, (1, 8, 16, 24, 31)),  # half to even
        (32, 5, (1, 8, 15, 22, 29)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (36, 1, (18,)),
        (1, 1, (0,)),
        (4, 3, (1, 1, 1)),
    ],
)
def test_default_target_layers(num_target_layers: int, count: int, target_layers: tuple[int, ...]) -> None:
    assert default_target_layers(num_target_layers, count) == target_layers


@pytest.mark.parametrize(
    "raw",
    [
        RAW,
        changed(block_size=None, nested={"block_size": 4}),
        changed(nested={"block_size": 4, "num_target_layers": 8, "use_aux_hidden_state": True}),
        changed(num_target_layers=None, nested={"num_target_layers": 8}),
        changed(mask_token_id=63, target_layer_ids=[1, 5, 7], dflash_config=None),
        changed(rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        changed(rope_theta=None, rope_scaling={"rope_theta": 5e5}),
        changed(rope_parameters={"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 1.0}),
        changed(rope_parameters={"rope_theta": 5e5}, rope_scaling={"rope_theta": 5e5, "type": "default"}),
        changed(rope_theta=None, rope_parameters={SLIDING: {"rope_theta": 5e5}, FULL: {"rope_theta": 1e6}}),
        changed(rope_theta=None, rope_parameters={SLIDING: None, FULL: {"rope_theta": 5e5}}),
        changed(model_type="gpt_oss", auto_map={"AutoModel": "dflash.DFlashDraftModel"}, max_window_layers=2),
        changed(layer_types=[FULL, FULL], sliding_window=9, use_sliding_window=False),
        changed(
            nested={"projector_type": "dflash", "shift_label": False, "mask_token": "<|MASK|>", "swa_window_size": 9}
        ),
        changed(final_logit_softcapping=0, output_multiplier=1.0, partial_rotary_factor=1.0, draft_vocab_size=64),
    ],
)
def test_parse_variants(raw: dict[str, Any]) -> None:
    assert parse_config(raw) == CONFIG


def test_parse_derives_what_may_be_derived() -> None:
    config = parse_config(changed(head_dim=None, num_key_value_heads=None, nested={"target_layer_ids": None}))
    assert (config.head_dim, config.num_key_value_heads, config.target_layers) == (4, 4, (1, 5))


@pytest.mark.parametrize(
    ("place", "scaling"),
    [
        ("rope_scaling", YARN),
        ("rope_scaling", {**YARN, "rope_type": None, "type": "yarn"}),
        ("rope_parameters", {**YARN, "rope_theta": 5e5}),
    ],
)
def test_parse_keeps_rope_scaling(place: str, scaling: dict[str, Any]) -> None:
    assert parse_config(changed(**{place: scaling})) == replace(CONFIG, rope_scaling=YARN)


@pytest.mark.parametrize("nest", [True, False])
def test_parse_scales(nest: bool) -> None:
    scales: dict[str, Any] = {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    assert parse_config(changed(nested=scales) if nest else changed(**scales)) == replace(CONFIG, **scales)


@pytest.mark.parametrize(
    ("raw", "layers"),
    [
        (changed(layer_types=[SLIDING, FULL], sliding_window=9), [(True, 9), (False, None)]),
        (changed(layer_types=[SLIDING, SLIDING], sliding_window=9, is_causal=False), [(False, 9), (False, 9)]),
        (changed(layer_types=[SLIDING, FULL], sliding_window=9, nested={"causal": False}), [(False, 9), (False, None)]),
        (changed(is_causal=True, nested={"causal": False}), [(True, None), (True, None)]),
        (changed(is_causal=False, nested={"causal": True}), [(False, None), (False, None)]),
        (changed(nested={"use_swa": True, "swa_window_size": 7}), [(False, 7), (False, 7)]),
        (changed(layer_types=[FULL, FULL], nested={"use_swa": True, "swa_window_size": 7}), [(False, 7), (False, 7)]),
        (changed(sliding_window=9, nested={"use_swa": True, "swa_window_size": 7}), [(False, 7), (False, 7)]),
        (changed(nested={"use_swa": True, "swa_window_size": 7, "causal": True}), [(True, 7), (True, 7)]),
        (changed(layer_types=[SLIDING, SLIDING], nested={"swa_window_size": 7}), [(True, 7), (True, 7)]),
        (changed(use_sliding_window=True, sliding_window=9, max_window_layers=1), [(False, None), (True, 9)]),
        (changed(use_sliding_window=True, sliding_window=9), [(False, None), (False, None)]),  # from layer 28 on
    ],
)
def test_parse_attention(raw: dict[str, Any], layers: list[tuple[bool, int | None]]) -> None:
    assert [(layer.causal, layer.window) for layer in parse_config(raw).layers] == layers


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([1], "JSON object"),
        (changed(architectures=None), "architectures must be .*is absent"),
        (changed(architectures=["Eagle3"]), r"must be a list of one of \[.*'DFlashDraftModel'.*, got \['Eagle3'\]"),
        (changed(architectures=["DFlashDraftModel", "DFlash2DraftModel"]), "architectures must be"),
        (changed(architectures=[["DFlashDraftModel"]]), "architectures must be"),
        (changed(dflash_config=7), "dflash_config must be .*got 7"),
        (changed(rope_theta=None), "rope_theta must be .*is absent"),
        (
            changed(rope_parameters={"rope_theta": 1e4}),
            "rope_theta is 500000.0 but rope_parameters.rope_theta is 10000.0",
        ),
        (
            changed(rope_scaling=YARN, rope_parameters={**YARN, "factor": 2}),
            "rope_parameters is .* but rope_scaling is",
        ),
        (changed(rope_scaling="yarn"), "rope_scaling must be .*got 'yarn'"),
        (changed(rope_parameters={"rope_theta": 5e5, "mrope_section": [1, 1, 2]}), "mrope_section"),
        (
            changed(rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.25}),
            "rotary_factor must be .*got 0.25",
        ),
        (changed(block_size=None), "block_size must be .*is absent"),
        (changed(block_size=1), "block_size must be a whole number of at least 2.*, got 1"),
        (changed(block_size="4"), "block_size must be .*got '4'"),
        (changed(num_hidden_layers=True), "num_hidden_layers must be .*got True"),
        (changed(nested={"block_size": 8}), "block_size is 4 but dflash_config.block_size is 8"),
        (changed(target_layer_ids=[0, 5, 7]), r"target_layer_ids is \[0, 5, 7\] but dflash_config.target_layer_ids is"),
        (changed(nested={"target_layer_ids": 5}), "target_layer_ids must be .*got 5"),
        (changed(nested={"target_layer_ids": []}), r"target_layers must be .*got \(\)"),
        (changed(nested={"target_layer_ids": [1, 8]}), r"target_layers must be .* num_target_layers, 8, got \(1, 8\)"),
        (changed(nested={"target_layer_ids": [-1]}), "a target layer must be .*got -1"),
        (changed(num_target_layers=None), "num_target_layers must be .*is absent"),
        (changed(num_target_layers=None, nested={"target_layer_ids": None}), "num_target_layers must be .*is absent"),
        (changed(nested={"mask_token_id": None}), "mask_token_id must be .*is absent"),
        (
            changed(nested={"mask_token_id": None, "mask_token": "<m>"}),
            "mask_token is '<m>' and no token of the target",
        ),
        (changed(nested={"mask_token_id": 64}), "mask_token_id must be below vocab_size, 64.*, got 64"),
        (changed(mask_token_id=5), "mask_token_id is 5 but dflash_config.mask_token_id is 63"),
        (changed(vocab_size=None), "vocab_size must be .*is absent"),
        (changed(num_hidden_layers=0), "num_hidden_layers must be .*got 0"),
        (changed(num_key_value_heads=3), "a multiple of num_key_value_heads, 3"),
        (changed(head_dim=7), "head_dim must be .*got 7"),
        (changed(rms_norm_eps=0), "rms_norm_eps must be .*got 0"),
        (changed(rope_theta="1e6"), "rope_theta must be .*got '1e6'"),
        (changed(attention_bias="no"), "attention_bias must be a bool.*, got 'no'"),
        (changed(nested={"final_logit_softcapping": -1}), "final_logit_softcapping must be .*got -1"),
        (changed(draft_vocab_size=32), "draft_vocab_size must be .*got 32"),
        (changed(target_hidden_size=32), "target_hidden_size must be .*got 32"),
        (changed(quantization_config={"bits": 4}), "quantization_config"),
        (changed(layer_types=[FULL]), "layer_types"),
        (changed(layer_types=[FULL, "linear_attention"]), "linear_attention"),
        (changed(layer_types=[FULL, SLIDING]), "sliding_window must be .*is absent"),
        (changed(layer_types=[FULL, SLIDING], sliding_window=0), "sliding window must be .*got 0"),
        (
            changed(layer_types=[FULL, SLIDING], sliding_window=9, use_sliding_window=False),
            "use_sliding_window must be .*got False",
        ),
        (
            changed(layer_types=[FULL, SLIDING], sliding_window=9, nested={"swa_window_size": 7}),
            "sliding_window is 9 but swa_window_size is 7",
        ),
        (changed(layer_types=[FULL, SLIDING], sliding_window=9, nested={"use_swa": True}), "where use_swa is true"),
        (changed(nested={"use_swa": True}), "sliding_window must be .*is absent"),
        (changed(is_causal="no"), "causal must be .*got 'no'"),
        (changed(nested={"something_new": 3}), "something_new must be .*got 3"),
        *(
            (changed(nested={key: True}), f"{key} must be absent, got True")
            for key in ("shift_label", "sample_from_anchor", "emb_dim")
        ),
        *(
            (changed(**{key: True}), f"{key} must be absent, got True")
            for key in ("shift_label", "attention_sink_bias", "gru_hidden_dim")
        ),
        (changed(nested={"use_aux_hidden_state": False}), "use_aux_hidden_state must be .*got False"),
        (changed(nested={"projector_type": "mlp"}), "projector_type must be .*got 'mlp'"),
        (changed(nested={"attention_value_scale": 0.5}), "attention_value_scale must be .*got 0.5"),
        (changed(nested={"pure_draft_prefix_len": 2}), "pure_draft_prefix_len must be .*got 2"),
    ],
)
def test_parse_refuses(raw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(raw)


WRITTEN = [
    CONFIG,
    replace(CONFIG, rope_scaling=YARN, attention_bias=True, rms_norm_eps=1e-5),
    replace(CONFIG, input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=30.0),
    replace(CONFIG, layers=(LayerAttention(True, 9), BIDIRECTIONAL)),
    replace(CONFIG, layers=(LayerAttention(False, 9), BIDIRECTIONAL)),
    replace(CONFIG, layers=(LayerAttention(True, 9), LayerAttention(True, None))),
]


@pytest.mark.parametrize("config", WRITTEN)
def test_round_trip(tmp_path: Path, config: DraftConfig) -> None:
    tensors = make_tensors(config)
    write_checkpoint(tmp_path / "new" / "draft", config, tensors)
    read_config, read_tensors = read_checkpoint(str(tmp_path / "new" / "draft"))
    assert read_config == config
    assert read_tensors.keys() == tensors.keys()
    assert all(torch.equal(read_tensors[name], tensors[name]) for name in tensors)
    assert {tensor.dtype for tensor in read_tensors.values()} == {torch.bfloat16}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["draft"]


@pytest.mark.parametrize("config", WRITTEN)
def test_transformers_reads_what_we_write(tmp_path: Path, config: DraftConfig) -> None:
    write_checkpoint(tmp_path / "draft", config, make_tensors(config))
    theirs: Any = Qwen3Config.from_pretrained(tmp_path / "draft")
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["rope_type"] == (config.rope_scaling or {}).get("rope_type", "default")
    assert theirs.layer_types == [FULL if layer.window is None else SLIDING for layer in config.layers]
    assert theirs.sliding_window == next((layer.window for layer in config.layers if layer.window), None)
    assert theirs.dflash_config["target_layer_ids"] == list(config.target_layers)
    assert (theirs.block_size, theirs.num_target_layers, theirs.dtype) == (4, 8, torch.bfloat16)
    assert theirs.architectures == ["DFlashDraftModel"]
    with safe_open(tmp_path / "draft" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.peers
@pytest.mark.parametrize("config", WRITTEN)
def test_zlab_loads_what_we_write(tmp_path: Path, config: DraftConfig) -> None:
    model = pytest.importorskip("dflash.model")
    write_checkpoint(tmp_path / "draft", config, make_tensors(config))
    theirs, loading = model.DFlashDraftModel.from_pretrained(tmp_path / "draft", output_loading_info=True)
    assert not any(loading.values())
    assert {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()} == tensor_shapes(config)
    assert (theirs.block_size, theirs.mask_token_id) == (config.block_size, config.mask_token_id)
    assert theirs.target_layer_ids == list(config.target_layers)
    attention = [LayerAttention(layer.self_attn.is_causal, layer.self_attn.sliding_window) for layer in theirs.layers]
    assert tuple(attention) == config.layers
    logits = torch.linspace(-9, 9, 8)
    assert torch.equal(theirs.compute_logits(logits, lambda x: x), softcapped(config, logits))


def softcapped(config: DraftConfig, logits: Tensor) -> Tensor:
    logits, cap = logits * config.output_multiplier, config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


def test_older_readers_find_their_keys() -> None:
    raw = config_dict(CONFIG)
    assert (raw["rope_theta"], raw["rope_scaling"], raw["block_size"], raw["model_type"]) == (5e5, None, 4, "qwen3")
    assert raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    assert config_dict(replace(CONFIG, rope_scaling=YARN))["rope_parameters"] == {**YARN, "rope_theta": 5e5}
    assert "is_causal" not in raw and raw["dflash_config"].keys() == {"block_size", "mask_token_id", "target_layer_ids"}


def test_config_dict_names_causality_where_the_types_do_not_imply_it() -> None:
    raw = config_dict(replace(CONFIG, layers=(LayerAttention(False, 9),) * 2))
    assert raw["is_causal"] is raw["dflash_config"]["causal"] is False


@pytest.mark.parametrize(
    "layers",
    [
        (LayerAttention(True, 9), LayerAttention(True, 8)),
        (LayerAttention(True, 9), LayerAttention(False, 9)),
        (LayerAttention(False, 9), LayerAttention(True, None)),
    ],
)
def test_config_dict_refuses_what_it_cannot_say(layers: tuple[LayerAttention, ...]) -> None:
    with pytest.raises(ValueError, match="layers must be of one window"):
        config_dict(replace(CONFIG, layers=layers))


def test_read_shards_prefixes_and_foreign_tensors(tmp_path: Path) -> None:
    tensors = make_tensors()
    named = {f"model.{name}".replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    first = {name: named.pop(name) for name in list(named)[:9]}
    foreign = {
        "embed_tokens.weight": torch.zeros(64, 16),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    config, actual = read_checkpoint(put(tmp_path / "draft", RAW, first, named, foreign))
    assert config == CONFIG and actual.keys() == tensors.keys()
    assert all(torch.equal(actual[name], tensors[name]) for name in tensors)


def test_read_refuses_a_missing_or_broken_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere/config.json cannot be read .*; give another one"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"config.json: \*.safetensors must be beside it"):
        read_checkpoint(put(tmp_path, RAW))
    with pytest.raises(ValueError, match="config.json: block_size must be .*is absent"):
        read_checkpoint(put(tmp_path, changed(block_size=None), make_tensors()))


@pytest.mark.parametrize("length", [0, 5, 200, -1])
def test_read_refuses_truncated_weights(tmp_path: Path, length: int) -> None:
    file = put(tmp_path / "draft", RAW, make_tensors()) / "dflash_draft_model-0.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match="model-0.safetensors cannot be read"):
        read_checkpoint(tmp_path / "draft")


def test_read_refuses_tensors_that_do_not_fit(tmp_path: Path) -> None:
    tensors = make_tensors()
    message = (
        "2 tensors do not .*: norm.weight: expected .16,., found .17,.; lm_head.weight: expected None, found .64, 16."
    )
    with pytest.raises(ValueError, match=message):
        put(tmp_path / "a", RAW, {**tensors, "norm.weight": torch.zeros(17), "lm_head.weight": torch.zeros(64, 16)})
        read_checkpoint(tmp_path / "a")
    del tensors["fc.weight"]
    with pytest.raises(ValueError, match="fc.weight: expected .16, 48., found None"):
        read_checkpoint(put(tmp_path / "b", RAW, tensors))
    with pytest.raises(ValueError, match="25 tensors") as caught:
        read_checkpoint(put(tmp_path / "c", RAW, {"embed_tokens.weight": torch.zeros(64, 16)}))
    assert str(caught.value).count("expected") == 5
    with pytest.raises(ValueError, match="model-1.safetensors: norm.weight must be .*got 'a repeated tensor'"):
        read_checkpoint(put(tmp_path / "d", RAW, tensors, {"model.norm.weight": torch.zeros(16)}))


def test_write_takes_views(tmp_path: Path) -> None:
    tensors = make_tensors()
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    fused = torch.cat([tensors[name] for name in names])
    views = dict(zip(names, torch.split(fused, [32, 16, 16]), strict=True))
    views["fc.weight"] = tensors["fc.weight"].T.clone().T
    parameter = {"norm.weight": torch.nn.Parameter(tensors["norm.weight"])}
    write_checkpoint(tmp_path / "draft", CONFIG, {**tensors, **views, **parameter})
    assert all(torch.equal(actual, tensors[name]) for name, actual in read_checkpoint(tmp_path / "draft")[1].items())


def test_write_replaces_a_draft_model_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    path.mkdir()
    write_checkpoint(path, CONFIG, make_tensors())  # an empty folder
    write_checkpoint(path, replace(CONFIG, block_size=8), make_tensors(dtype=torch.float32))
    assert read_checkpoint(path)[0].block_size == 8
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
    other = put(tmp_path / "other", {"architectures": ["Qwen3ForCausalLM"]})
    (tmp_path / "file").write_text("")
    for taken in (other, tmp_path / "file", tmp_path):
        with pytest.raises(ValueError, match="new, empty or a draft model's"):
            write_checkpoint(taken, CONFIG, make_tensors())
    assert {file.name for file in tmp_path.iterdir()} == {"draft", "other", "file"}


def test_write_refuses_what_does_not_fit(tmp_path: Path) -> None:
    tensors = make_tensors()
    with pytest.raises(ValueError, match=r"the tensors' dtype must be .*got \['bfloat16', 'float32'\]"):
        write_checkpoint(tmp_path / "draft", CONFIG, {**tensors, "norm.weight": torch.zeros(16)})
    with pytest.raises(ValueError, match="norm.weight: expected"):
        write_checkpoint(tmp_path / "draft", CONFIG, {**tensors, "norm.weight": torch.zeros(17)})
    assert not list(tmp_path.iterdir())


def test_written_files_are_as_readable_as_any(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "draft", CONFIG, make_tensors())
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "file").touch()
    assert (tmp_path / "draft").stat().st_mode == (tmp_path / "any").stat().st_mode
    modes = {file.stat().st_mode for file in (tmp_path / "draft").iterdir()}
    assert modes == {(tmp_path / "any" / "file").stat().st_mode}
    assert load_file(tmp_path / "draft" / "model.safetensors").keys() == tensor_shapes(CONFIG).keys()


def test_check_fits() -> None:
    target = {"hidden_size": 16, "num_layers": 8, "vocab_size": 64}
    check_fits(CONFIG, **target)
    check_fits(CONFIG, **target, max_context=128)
    with pytest.raises(ValueError, match="max_context must be at most the drafter's positions, 128.*, got 129"):
        check_fits(CONFIG, **target, max_context=129)
    for name, message in (
        ("hidden_size", "hidden_size"),
        ("num_layers", "num_target_layers"),
        ("vocab_size", "vocab_size"),
    ):
        ours = target[name]
        with pytest.raises(ValueError, match=f"drafter's {message} must be the target's, {ours + 1}.*, got {ours}"):
            check_fits(CONFIG, **{**target, name: ours + 1})


def test_config_counts_its_layers() -> None:
    with pytest.raises(ValueError, match="the number of layers must be num_hidden_layers, 2.*, got 1"):
        replace(CONFIG, layers=(BIDIRECTIONAL,))


def test_a_mask_token_given_as_text_is_looked_up() -> None:
    raw = changed(nested={"mask_token_id": None, "mask_token": "<m>"})
    assert parse_config(raw, {"<m>": 63}) == parse_config(RAW)


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("most", [0, 200])  # bytes of a file: before and within the weights
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, most: int, present: bool) -> None:
    resource = pytest.importorskip("resource")
    if present:
        write_checkpoint(tmp_path / "draft", CONFIG, make_tensors())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"draft cannot be written \(.*File too large"):
            write_checkpoint(tmp_path / "draft", replace(CONFIG, block_size=8), make_tensors())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before


def test_what_tpu_inference_looks_for_stands_at_the_top() -> None:
    """vLLM's plug-in for TPUs reads these keys at the top level only."""
    sliding = replace(CONFIG, layers=(LayerAttention(causal=True, window=9), BIDIRECTIONAL))
    raw = config_dict(sliding)
    assert raw["mask_token_id"] == raw["dflash_config"]["mask_token_id"] == 63
    assert raw["target_layer_ids"] == raw["dflash_config"]["target_layer_ids"] == [1, 5, 7]
    assert (raw["head_dim"], raw["sliding_window"]) == (CONFIG.head_dim, 9)
    assert parse_config(raw) == sliding
