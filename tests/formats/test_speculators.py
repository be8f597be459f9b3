import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_sizes import SIZES
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.drafters.dflash2.network import DFlash2Config
from blockdraft.drafters.dspark.network import DSparkConfig
from blockdraft.errors import UsageError
from blockdraft.formats import Borrowed, Checkpoint, DrafterTarget, layout_of, read_config, speculators, zlab
from blockdraft.formats.architectures import tensor_shapes
from blockdraft.formats.folder import read_folder
from blockdraft.formats.speculators import LAYOUT, config_dict, parse_config
from blockdraft.nn.draft_config import DraftConfig, LayerAttention

FULL = LayerAttention(causal=False, window=None)
CONFIG = DraftConfig(
    **SIZES,
    block_size=4,
    mask_token_id=63,
    target_layers=(1, 5, 6),
    rope_theta=5e5,
    layers=(FULL, FULL),
)
SPARK = DSparkConfig(**vars(CONFIG), markov_rank=3)
KEPT = torch.tensor([0, 3, 4, 9, 62])


def tensors_of(config: DraftConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*s, generator=generator).bfloat16() for name, s in tensor_shapes(config).items()}


TARGET = DrafterTarget("some/target", ("Qwen3ForCausalLM",))


def read_checkpoint(path: Path, num_layers: int) -> tuple[Any, Any, Borrowed]:
    read = read_folder(path, LAYOUT, DrafterTarget(num_layers=num_layers))
    assert read.borrowed is not None
    return read.config, read.tensors, read.borrowed


def borrowed(kept: Tensor | None = None) -> Borrowed:
    weight = torch.arange(64 * 16).view(64, 16).bfloat16()
    return Borrowed(weight, weight if kept is None else weight[kept], kept)


def write(path: Path, config: DraftConfig = CONFIG, kept: Tensor | None = None) -> dict[str, Any]:
    LAYOUT.write(path, Checkpoint(config, tensors_of(config), borrowed(kept)), TARGET)
    raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    return raw


def changed(**changes: Any) -> dict[str, Any]:
    """Return the config.json of `CONFIG` with changed keys, None to remove; `layers` changes nested ones."""
    raw = config_dict(CONFIG, TARGET, 64)
    layers = {**raw["transformer_layer_config"], **changes.pop("layers", {})}
    raw = {**raw, "transformer_layer_config": {k: v for k, v in layers.items() if v is not None}, **changes}
    return {key: value for key, value in raw.items() if value is not None}


def test_draft_vocabularies_by_frequency(tmp_path: Path) -> None:
    """Some programs write the most frequent token first."""
    write(tmp_path, kept=KEPT)
    file, order = tmp_path / "model.safetensors", torch.tensor([3, 0, 4, 1, 2])
    _, _, expected = read_checkpoint(tmp_path, 8)
    tensors = load_file(file)
    tensors |= {"d2t": KEPT[order] - torch.arange(5), "lm_head.weight": tensors["lm_head.weight"][order]}
    save_file(tensors, file)
    _, _, actual = read_checkpoint(tmp_path, 8)
    assert actual.kept is not None and actual.kept.tolist() == KEPT.tolist()
    assert actual.head is not None and expected.head is not None and torch.equal(actual.head, expected.head)
    save_file(tensors | {"d2t": torch.tensor([0, 2, 2, 6, 57])}, file)
    with pytest.raises(UsageError, match="offsets to the tokens that t2d marks"):
        read_checkpoint(tmp_path, 8)


WRITTEN = [
    CONFIG,
    replace(CONFIG, attention_bias=True, rms_norm_eps=1e-5),
    replace(CONFIG, rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}),
    replace(CONFIG, layers=(LayerAttention(True, 9), FULL)),
    replace(CONFIG, layers=(LayerAttention(False, 9), FULL)),
    SPARK,
    replace(SPARK, enable_confidence_head=False),
    replace(SPARK, confidence_head_with_markov=False, confidence_temperatures=(1.0, 1.5, 0.5, 2.0)),
]


@pytest.mark.parametrize("config", WRITTEN)
def test_round_trip(tmp_path: Path, config: DraftConfig) -> None:
    write(tmp_path / "draft", config)
    actual, tensors, own = read_checkpoint(tmp_path / "draft", 8)
    assert actual == config
    expected = tensors_of(config)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert own.kept is None and own.embedding is not None and own.head is not None
    assert torch.equal(own.embedding, borrowed().embedding) and torch.equal(own.head, own.embedding)


@pytest.mark.parametrize("config", [CONFIG, SPARK])
def test_a_reduced_vocabulary_is_stored_as_offsets(tmp_path: Path, config: DraftConfig) -> None:
    raw = write(tmp_path / "draft", config, KEPT)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert raw["draft_vocab_size"] == 5 and raw["transformer_layer_config"]["vocab_size"] == 64
    assert stored["d2t"].dtype == torch.int64 and stored["d2t"].tolist() == [0, 2, 2, 6, 58]
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero().flatten().tolist() == KEPT.tolist()
    assert torch.equal(stored["lm_head.weight"], stored["embed_tokens.weight"][stored["t2d"]])
    actual, tensors, own = read_checkpoint(tmp_path / "draft", 8)
    assert actual == config and own.kept is not None and own.kept.tolist() == KEPT.tolist()
    assert own.head is not None and own.head.shape == (5, 16)
    if config is SPARK:  # scores of successors that cannot be drafted are not stored
        expected = tensors_of(config)["markov_head.markov_w2.weight"]
        assert torch.equal(stored["markov_head.markov_w2.weight"], expected[KEPT])
        assert torch.equal(tensors["markov_head.markov_w2.weight"][KEPT], expected[KEPT])
        assert not tensors["markov_head.markov_w2.weight"][1].any()


def test_keys(tmp_path: Path) -> None:
    raw = write(tmp_path / "draft", replace(CONFIG, layers=(LayerAttention(False, 9), FULL)))
    assert raw["speculators_model_type"] == raw["speculators_config"]["algorithm"] == "dflash"
    assert raw["architectures"] == ["DFlashSpeculator"]
    assert raw["aux_hidden_state_layer_ids"] == [2, 6, 7]
    assert (raw["draft_vocab_size"], raw["block_size"], raw["mask_token_id"], raw["dtype"]) == (64, 4, 63, "bfloat16")
    assert raw["sliding_window_non_causal"] is True and raw["sample_from_anchor"] is False
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    [method] = raw["speculators_config"]["proposal_methods"]
    assert method == {"proposal_type": "greedy", "speculative_tokens": 3}
    layers = raw["transformer_layer_config"]
    assert layers["layer_types"] == ["sliding_attention", "full_attention"]
    assert (layers["sliding_window"], layers["use_sliding_window"], layers["model_type"]) == (9, True, "qwen3")
    spark = write(tmp_path / "spark", SPARK)
    assert spark["architectures"] == ["DSparkSpeculator"] and spark["sample_from_anchor"] is True
    assert spark["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert (spark["markov_rank"], spark["markov_head_type"]) == (3, "vanilla")


@pytest.mark.parametrize(
    ("layers", "said"),
    [((FULL, FULL), True), ((LayerAttention(False, 9), FULL), True), ((LayerAttention(True, 9), FULL), False)],
)
def test_only_causal_windows_are_said_to_be_causal(
    tmp_path: Path, layers: tuple[LayerAttention, ...], said: bool
) -> None:
    raw = write(tmp_path / "draft", replace(CONFIG, layers=layers))
    assert raw["sliding_window_non_causal"] is said
    assert read_checkpoint(tmp_path / "draft", 8)[0].layers == layers


def test_what_equals_the_defaults_of_transformers_may_be_absent() -> None:
    config, _ = parse_config(changed(layers={"head_dim": None, "rope_parameters": None, "rope_scaling": None}), 8)
    assert config.head_dim == 128 and config.rope_theta == 5e5
    assert parse_config(changed(sliding_window_non_causal=None, target_hidden_size=None, sample_from_anchor=None), 8)[
        0
    ] == replace(CONFIG)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (changed(speculators_model_type="mtp"), r"speculators_model_type must be one of \['dflash'.*, got 'mtp'"),
        (changed(sample_from_anchor=True), "sample_from_anchor must be False.*, got True; another convention"),
        (changed(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids must be .*is absent"),
        (
            changed(aux_hidden_state_layer_ids=[0, 2, 6]),
            r"layer_ids must be from 1 to 7, got \[0, 2, 6\]",
        ),
        (
            changed(aux_hidden_state_layer_ids=[2, 6, 8]),
            "from 1 to 7, got .*; neither the embeddings nor",
        ),
        (changed(transformer_layer_config=None), "transformer_layer_config must be .*is absent"),
        (changed(layers={"model_type": "nothing"}), "transformer_layer_config of the type 'nothing' cannot be read"),
        (changed(mask_token_id=None), "mask_token_id must be .*is absent"),
        (changed(draft_vocab_size=65), "draft_vocab_size must be a whole number from 1 to vocab_size, 64.*, got 65"),
        (changed(target_hidden_size=32), "target_hidden_size must be .*got 32"),
        (changed(quantization_config={"bits": 4}), "quantization_config"),
    ],
)
def test_parse_refuses(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(raw, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, target_layers=(1, 7)), "a target layer must be below the last target layer, 7.*, got 7"),
        (replace(CONFIG, layers=(LayerAttention(True, None), FULL)), "bidirectional where they are full"),
        (replace(CONFIG, layers=(LayerAttention(True, 9), LayerAttention(False, 9))), "alike in causality"),
        (replace(CONFIG, layers=(LayerAttention(True, 9), LayerAttention(True, 8))), "of one window"),
        (replace(CONFIG, output_multiplier=0.5), "output_multiplier must be 1.0, the only one in this.*, got 0.5"),
        (replace(CONFIG, final_logit_softcapping=30.0), "final_logit_softcapping must be .*got 30.0"),
        (
            DFlash2Config(**vars(CONFIG), conv_kernel_size=2, conv_group_size=4, selector_rank=2, selector_top_k=2),
            "the architecture must be one of.*, got 'DFlash2DraftModel'",
        ),
    ],
)
def test_write_refuses_what_the_format_cannot_say(tmp_path: Path, config: DraftConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "draft", config)
    assert not list(tmp_path.iterdir())


def test_a_gguf_file_is_no_name_for_a_target() -> None:
    """Readers of the format load embedding and head of the target by that name."""
    speculators.LAYOUT.check(CONFIG, DrafterTarget("owner/name"))
    with pytest.raises(ValueError, match=r"readers cannot load models/m\.gguf; export with --target-name"):
        speculators.LAYOUT.check(CONFIG, DrafterTarget("models/m.gguf"))


def test_read_refuses_contradictory_vocabularies(tmp_path: Path) -> None:
    write(tmp_path, replace(CONFIG), KEPT)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for broken, message in (
        ({"d2t": KEPT}, r"d2t must be offsets.*, got \[0, 3, 4, 9, 62\]"),  # ids instead of offsets
        ({"t2d": torch.zeros(64, dtype=torch.bool)}, "offsets to the tokens that t2d marks"),
        ({"t2d": None}, "t2d: expected .64,., found None"),
        ({"lm_head.weight": None}, "lm_head.weight: expected .5, 16., found None"),
        ({"lm_head.weight": torch.zeros(64, 16)}, "lm_head.weight: expected .5, 16., found .64, 16."),
    ):
        save_file({name: t for name, t in {**stored, **broken}.items() if t is not None}, file)
        with pytest.raises(ValueError, match=message):
            read_checkpoint(tmp_path, 8)


def test_read_takes_what_newer_releases_leave_to_the_target(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name: t for name, t in load_file(file).items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    save_file({**stored, "verifier_norm.weight": torch.ones(16)}, file)
    config, tensors, own = read_checkpoint(tmp_path, 8)
    assert config == CONFIG and tensors.keys() == tensor_shapes(CONFIG).keys()
    assert own == Borrowed(None, None, None)


def test_both_formats_know_each_others_folders(tmp_path: Path) -> None:
    write(tmp_path / "draft")
    assert layout_of(read_config(tmp_path / "draft")) is LAYOUT
    zlab.write_checkpoint(tmp_path / "draft", CONFIG, tensors_of(CONFIG))
    assert layout_of(read_config(tmp_path / "draft")) is zlab.LAYOUT
    write(tmp_path / "draft")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(ValueError, match="new, empty or a draft model's"):
        write(tmp_path / "other")


def test_read_refuses_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_checkpoint(tmp_path / "nowhere", 8)
