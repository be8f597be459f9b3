import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.drafters.eagle3 import layout as eagle3
from blockdraft.drafters.eagle3.layout import tensor_shapes
from blockdraft.drafters.eagle3.network import Eagle3Config
from blockdraft.errors import UsageError
from blockdraft.formats import Borrowed, Checkpoint, DrafterTarget, layout_of, layouts, read_drafter
from blockdraft.formats.starting import Start

KEPT = torch.tensor([0, 3, 4, 9, 62])
CONFIG = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    draft_vocab_size=5,
    target_layers=(1, 5, 6),
    num_target_layers=10,
    rope_theta=5e5,
    max_position_embeddings=128,
)
WHOLE = replace(CONFIG, draft_vocab_size=64)
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}
BOTH = [
    CONFIG,
    WHOLE,
    replace(CONFIG, block_size=12, rms_norm_eps=1e-5, attention_bias=True, rope_scaling=SCALED),
    replace(CONFIG, norm_before_residual=True, norm_output=True, fc_norm=True),
    replace(CONFIG, tied_head=True),
    replace(CONFIG, norm_before_fc=True),
]


def tensors_of(config: Eagle3Config) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    actual = {name: torch.randn(*shape, generator=random).bfloat16() for name, shape in tensor_shapes(config).items()}
    size = config.draft_vocab_size
    actual["d2t"] = KEPT - torch.arange(5) if size == 5 else torch.zeros(size, dtype=torch.int64)
    return actual


def write(path: Path, config: Eagle3Config = CONFIG, layout: Any = eagle3.LAYOUT) -> dict[str, Any]:
    embedding = torch.arange(64 * 16).view(64, 16).bfloat16()
    own = Checkpoint(config, tensors_of(config), Borrowed(embedding, None, None))
    layout.write(path, own, DrafterTarget("some/target", ("Qwen3ForCausalLM",)))
    raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    return raw


def change(path: Path, **changes: Any) -> None:
    """Set keys of config.json, or remove those whose value is None."""
    raw = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def rename(path: Path, old: str, new: str | None) -> None:
    """Rename or remove tensors."""
    tensors = load_file(path / "model.safetensors")
    actual = {name.replace(old, new or ""): one for name, one in tensors.items() if new is not None or old not in name}
    save_file(actual, path / "model.safetensors")


@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("name", ["eagle3", "eagle3_speculators"])
def test_round_trip(name: str, config: Eagle3Config, tmp_path: Path) -> None:
    write(tmp_path / "draft", config, layouts()[name])
    actual, expected = read_drafter(tmp_path / "draft", None, 10), tensors_of(config)
    assert actual.config == config
    assert actual.tensors.keys() == expected.keys()
    assert all(torch.equal(actual.tensors[one], expected[one]) for one in expected)
    assert actual.borrowed is not None and (actual.borrowed.embedding is not None) == (name != "eagle3")


def test_norms_of_queries_and_keys_are_qwen3s(tmp_path: Path) -> None:
    config = replace(CONFIG, qk_norm=True)
    raw = write(tmp_path / "draft", config, eagle3.SPECULATORS)
    assert raw["transformer_layer_config"]["model_type"] == "qwen3"
    assert read_drafter(tmp_path / "draft", None, 10).config == config
    with pytest.raises(UsageError, match="qk_norm must be false .*, got True; export to eagle3_speculators"):
        eagle3.LAYOUT.check(config)


def test_keys_and_names(tmp_path: Path) -> None:
    raw, stored = write(tmp_path / "draft"), load_file(tmp_path / "draft" / "model.safetensors")
    assert (raw["architectures"], raw["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert (raw["draft_vocab_size"], raw["vocab_size"], raw["dtype"]) == (5, 64, "bfloat16")
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 6]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 6, 7]  # as vLLM numbers them
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (32, 32) and stored["fc.weight"].shape == (16, 48)
    assert stored["t2d"].nonzero().flatten().tolist() == KEPT.tolist()
    assert stored["d2t"].dtype == torch.int64 and stored["d2t"].tolist() == [0, 2, 2, 6, 58]

    raw = write(tmp_path / "other", CONFIG, eagle3.SPECULATORS)
    stored = load_file(tmp_path / "other" / "model.safetensors")
    assert raw["speculators_model_type"] == raw["speculators_config"]["algorithm"] == "eagle3"
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 6, 7]  # of the layers that the target layers enter
    assert raw["transformer_layer_config"]["vocab_size"] == 64 and raw["draft_vocab_size"] == 5
    assert "layers.0.hidden_norm.weight" in stored and stored["embed_tokens.weight"].dtype == torch.bfloat16

    write(tmp_path / "whole", WHOLE)
    assert not {"t2d", "d2t"} & {*load_file(tmp_path / "whole" / "model.safetensors")}


def test_target_layers_in_one_place_alone(tmp_path: Path) -> None:
    """vLLM numbers target layers by the layers that they enter, and takes those of eagle_config so too."""

    def start(folder: Path) -> Start:
        return eagle3.LAYOUT.starts(CONFIG, str(folder), "target", lambda to: f"export {to}")["vLLM"]

    write(tmp_path / "draft")
    assert start(tmp_path / "draft").line and start(Path("some/repository")).line
    change(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=None)
    assert start(tmp_path / "draft") == Start(
        None, "it reads target layers that are in eagle_config alone one layer off", "export eagle3"
    )
    write(tmp_path / "other")
    change(tmp_path / "other", eagle_config=None)
    for name in ("draft", "other"):
        assert read_drafter(tmp_path / name, None, 7).config.target_layers == (1, 5, 6)


@pytest.mark.parametrize("name", ["eagle3", "eagle3_speculators"])
@pytest.mark.parametrize(("layers", "target_layers"), [(36, (1, 17, 32)), (61, (1, 29, 57))])
def test_a_file_without_target_layers_reads_what_enters_the_usual_layers(
    name: str, layers: int, target_layers: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path / "draft", CONFIG, layouts()[name])
    change(tmp_path / "draft", eagle_config=None, eagle_aux_hidden_state_layer_ids=None)
    assert read_drafter(tmp_path / "draft", None, layers).config.target_layers == target_layers
    with pytest.raises(UsageError, match="num_target_layers must be 7 or more, or the target layers be named.*, got 6"):
        read_drafter(tmp_path / "draft", None, 6)


def test_early_files_are_plain_and_pickled(tmp_path: Path) -> None:
    """SafeAILab's early files name a Llama, lack sizes that follow from others, and have no safetensors."""
    config = replace(CONFIG, num_key_value_heads=4, head_dim=4, rope_theta=10_000.0, target_layers=(1, 4, 6))
    write(tmp_path, config)
    silent = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "eagle_config", "block_size")
    change(tmp_path, architectures=["LlamaForCausalLM"], **dict.fromkeys([*silent, "target_hidden_size"]))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert layout_of(raw) is eagle3.LAYOUT and layout_of({**raw, "draft_vocab_size": 5}) is eagle3.LAYOUT
    assert layout_of({key: value for key, value in raw.items() if key != "draft_vocab_size"}) is None
    tensors = load_file(tmp_path / "model.safetensors") | {"embed_tokens.weight": torch.zeros(64, 16)}
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    actual = read_drafter(tmp_path, None, 10)
    assert actual.config == config and actual.borrowed is not None and actual.borrowed.embedding is not None
    assert torch.equal(actual.tensors["fc.weight"], tensors["fc.weight"])


class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("was-here"),)


def test_pickles_of_more_than_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").unlink()
    file = tmp_path / "draft" / "pytorch_model.bin"
    torch.save({"fc.weight": Harmful()}, file)
    with pytest.raises(UsageError, match=r"pytorch_model\.bin: broken, or more than tensors"):
        read_drafter(tmp_path / "draft", None, 10)
    assert not Path("was-here").exists()
    for content in (b"no such thing", pickle.dumps({"fc.weight": 1}, protocol=2)):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"pytorch_model\.bin"):
            read_drafter(tmp_path / "draft", None, 10)
    torch.save({"fc.weight": [1, 2]}, file)
    with pytest.raises(UsageError, match="its content must be tensors by name.*, got 'dict'"):
        read_drafter(tmp_path / "draft", None, 10)


def test_other_names_of_the_layer_and_maps_alone(tmp_path: Path) -> None:
    write(tmp_path / "draft")
    rename(tmp_path / "draft", "midlayer.", "model.layers.0.")
    rename(tmp_path / "draft", "t2d", None)
    actual = read_drafter(tmp_path / "draft", None, 10)
    assert actual.tensors["d2t"].tolist() == [0, 2, 2, 6, 58]
    write(tmp_path / "fewer", CONFIG, eagle3.SPECULATORS)
    raw = json.loads((tmp_path / "fewer" / "config.json").read_text())
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 3
    change(tmp_path / "fewer", **raw)  # what paid there is no limit here
    assert read_drafter(tmp_path / "fewer", None, 10).config.block_size == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be absent, got 2; .* not supported"),
        ({"target_hidden_size": 32}, "target_hidden_size must be hidden_size, 16.*, got 32"),
        ({"hidden_size": None}, "hidden_size must be a whole number.*, but is absent"),
        ({"intermediate_size": None}, "intermediate_size must be .*is absent"),
        ({"draft_vocab_size": 65}, "draft_vocab_size must be at most vocab_size, 64.*, got 65"),
        ({"draft_vocab_size": 4}, "2 tensors do not fit"),
        ({"fc_norm": True}, r"fc_norm\.0\.weight must be among the tensors.*, but is absent"),
        (
            {"layer_types": ["sliding_attention"]},
            r"layer_types must be full_attention alone.*, got \['sliding_attention'\]",
        ),
        ({"hidden_act": "gelu"}, "hidden_act must be .*got 'gelu'"),
        ({"parallel_drafting": True}, "parallel_drafting must be .*got True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be .*got False"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 10]}},
            r"target_layers must be .* below .*10, got \(1, 5, 10\)",
        ),
        ({"eagle_config": [1]}, r"eagle_config must be a JSON object.*, got \[1\]"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "draft")
    change(tmp_path / "draft", **changes)
    with pytest.raises(UsageError, match=message):
        read_drafter(tmp_path / "draft", None, 10)


def test_maps_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    for d2t, t2d, message in (
        ([0, 2, 2, 6, 57], tensors["t2d"], "offsets to the tokens that t2d marks"),
        ([0, 2, 2, 6, 60], None, r"d2t must be offsets to tokens below 64, got \[0, 2, 2, 6, 60\]; it leads to \[64\]"),
        ([0, -1, 2, 6, 58], None, r"different tokens, got .*; it leads to \[0\] more than once"),
        ([0.5, 2, 2, 6, 57], None, r"d2t must be whole numbers, got \[0.5, 2.0"),
        ([0, 2, 2, 6, float("nan")], tensors["t2d"], "d2t must be whole numbers"),
        ([], None, r"d2t: expected \(5,\), found \(0,\)"),
        ([[0], [2], [2], [6], [57]], None, r"d2t: expected \(5,\), found \(5, 1\)"),
        (0, None, r"d2t: expected \(5,\), found \(\)"),
        (0, tensors["t2d"], "d2t"),
        (None, None, "d2t must be given, since draft_vocab_size.*, but is absent"),
    ):
        maps = {"d2t": None if d2t is None else torch.tensor(d2t), "t2d": t2d}
        actual = {**tensors, **maps}
        save_file({n: t for n, t in actual.items() if t is not None}, tmp_path / "draft" / "model.safetensors")
        with pytest.raises(UsageError, match=message):
            read_drafter(tmp_path / "draft", None, 10)


@pytest.mark.parametrize("layout", [eagle3.LAYOUT, eagle3.SPECULATORS])
@pytest.mark.parametrize("marked", [True, False])
def test_draft_vocabularies_by_frequency(tmp_path: Path, layout: Any, marked: bool) -> None:
    """NVIDIA's ModelOpt writes the most frequent token first."""
    write(tmp_path / "draft", CONFIG, layout)
    file, order = tmp_path / "draft" / "model.safetensors", torch.tensor([3, 0, 4, 1, 2])
    tensors = load_file(file)
    expected = read_drafter(tmp_path / "draft", None, 10)
    ids = (tensors["d2t"] + torch.arange(5))[order]
    tensors |= {"d2t": ids - torch.arange(5), "lm_head.weight": tensors["lm_head.weight"][order]}
    save_file({name: tensor for name, tensor in tensors.items() if marked or name != "t2d"}, file)
    actual = read_drafter(tmp_path / "draft", None, 10)
    assert all(torch.equal(actual.tensors[name], expected.tensors[name]) for name in expected.tensors)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a target layer must be below the last target layer, 9.*, got 9"):
        eagle3.SPECULATORS.check(replace(CONFIG, target_layers=(1, 5, 9)))
    with pytest.raises(UsageError, match=r"readers cannot load .*\.gguf"):
        eagle3.SPECULATORS.check(CONFIG, DrafterTarget("model.gguf"))
    for layout in (eagle3.LAYOUT, eagle3.SPECULATORS):
        with pytest.raises(UsageError, match="the configuration must be Eagle3Config.*, got 'dict'"):
            layout.check({})
    with pytest.raises(UsageError, match="that z-lab's layout and the speculators format cannot hold"):
        layouts()["zlab"].check(CONFIG)
    assert not list(tmp_path.iterdir())
