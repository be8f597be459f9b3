"""Drafters in GGUF files: metadata for llama.cpp, written and read back."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.errors import UsageError
from blockdraft.formats import Borrowed, Checkpoint, read_drafter, zlab
from blockdraft.formats.gguf import open_gguf
from blockdraft.formats.gguf.drafter import drafter_config
from blockdraft.formats.stored import stored
from blockdraft.formats.trained import Trained
from blockdraft.nn.draft_config import LayerAttention
from blockdraft_tools.gguf.drafters import drafter_metadata, write_drafter
from blockdraft_tools.gguf.files import write_gguf

Make = Callable[..., Checkpoint]
KINDS = ["tiny_drafter_dir", "tiny_dflash2_dir", "tiny_dspark_dir"]
NEAR, FAR = LayerAttention(True, 16), LayerAttention(True, None)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"layers": (NEAR, FAR)},
    "both ways": {"layers": (LayerAttention(False, 16),) * 2},
    "scales": {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 20.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
    },
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
}


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    """Return a function that reads the drafter of a fixture, with changes of its configuration."""

    def read(name: str, **differences: Any) -> Checkpoint:
        config, tensors = zlab.read_checkpoint(request.getfixturevalue(name))
        return Checkpoint(replace(config, **differences), tensors, trained=Trained("0123456789abcdef", 4))

    return read


def words(size: int) -> dict[str, Any]:
    return {"tokenizer.ggml.tokens": [f"t{i}" for i in range(size)]}


def write(path: Path, drafter: Checkpoint, weights: Any = "f32") -> Path:
    write_drafter(path, drafter, words(drafter.config.vocab_size), weights)
    return path


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", KINDS)
def test_there_and_back(name: str, variant: str, make: Make, tmp_path: Path) -> None:
    drafter = make(name, **VARIANTS[variant])
    actual = read_drafter(write(tmp_path / "d.gguf", drafter), None, 3)
    assert actual.config == drafter.config and actual.trained == drafter.trained and actual.borrowed is None
    assert actual.tensors.keys() == drafter.tensors.keys()
    assert all(torch.equal(actual.tensors[name], drafter.tensors[name]) for name in actual.tensors)


@pytest.mark.parametrize("name", [KINDS[0], KINDS[2]])
def test_part_of_the_vocabulary(name: str, make: Make, tmp_path: Path) -> None:
    """`d2t` holds token ids of the target; rows of left-out tokens are not stored."""
    drafter, kept = make(name), torch.arange(1, 200, 3)
    size, hidden = drafter.config.vocab_size, drafter.config.hidden_size
    rows = {
        key: (torch.arange(size)[:, None] % 3 == 1) & (torch.arange(size)[:, None] < 200) for key in drafter.tensors
    }
    tensors = {key: t * rows[key] if key.endswith("markov_w2.weight") else t for key, t in drafter.tensors.items()}
    head = torch.randn(len(kept), hidden, generator=torch.Generator().manual_seed(1))
    path = write(tmp_path / "d.gguf", replace(drafter, tensors=tensors, borrowed=Borrowed(None, head, kept)))
    assert torch.equal(open_gguf(path).tensors["d2t"].read(), kept)  # type: ignore[arg-type]
    actual = read_drafter(path, None, 3)
    assert actual.borrowed is not None and actual.borrowed.kept is not None and actual.borrowed.head is not None
    assert torch.equal(actual.borrowed.kept, kept) and torch.equal(actual.borrowed.head, head)
    assert all(torch.equal(actual.tensors[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", [KINDS[0], KINDS[2]])
def test_a_vocabulary_in_any_order(name: str, make: Make, tmp_path: Path) -> None:
    drafter, kept = make(name), torch.arange(1, 200, 3)
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(1))
    head = torch.randn(len(kept), drafter.config.hidden_size, generator=torch.Generator().manual_seed(1))
    made = [
        read_drafter(write(tmp_path / f"{number}.gguf", replace(drafter, borrowed=borrowed)), None, 3)
        for number, borrowed in enumerate((Borrowed(None, head, kept), Borrowed(None, head[order], kept[order])))
    ]
    (first, second), (tensors, others) = ([one.borrowed for one in made], [one.tensors for one in made])
    assert first is not None and second is not None and first.head is not None and first.kept is not None
    assert torch.equal(first.head, second.head) and torch.equal(first.kept, second.kept)  # type: ignore[arg-type]
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)
    twice = replace(drafter, borrowed=Borrowed(None, head, kept.where(kept != 4, 1)))
    with pytest.raises(UsageError, match=r"offsets to different tokens, got .*; it leads to \[1\] more than once"):
        read_drafter(write(tmp_path / "twice.gguf", twice), None, 3)


def test_metadata_for_llama_cpp(make: Make, tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "d.gguf", make(KINDS[0], layers=(NEAR, FAR))))
    metadata = {
        key: value for key, value in file.metadata.items() if key.startswith(("dflash.", "general.architecture"))
    }
    assert metadata == {
        "general.architecture": "dflash",
        "dflash.block_count": 2,
        "dflash.context_length": 256,
        "dflash.embedding_length": 32,
        "dflash.feed_forward_length": 64,
        "dflash.attention.head_count": 4,
        "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 8,
        "dflash.attention.value_length": 8,
        "dflash.attention.layer_norm_rms_epsilon": 1e-6,
        "dflash.attention.causal": True,
        "dflash.attention.sliding_window": 16,
        "dflash.attention.sliding_window_pattern": [True, False],
        "dflash.rope.freq_base": 10000.0,
        "dflash.block_size": 8,
        "dflash.target_layers": [1, 2],  # the layers that the target layers enter
        "dflash.target_hidden_size": 32,
    }
    assert file.metadata["tokenizer.ggml.mask_token_id"] == 3
    layer = "attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm attn_norm ffn_norm ffn_gate ffn_up ffn_down"
    own = {f"blk.{number}.{name}.weight" for number in (0, 1) for name in layer.split()}
    assert set(file.tensors) == own | {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}


def test_tensors_of_dflash2_and_dspark(make: Make, tmp_path: Path) -> None:
    first = set(open_gguf(write(tmp_path / "v1.gguf", make(KINDS[0]))).tensors)
    second = open_gguf(write(tmp_path / "d.gguf", make(KINDS[1])))
    own = {
        f"blk.{number}.{name}_conv_{part}"
        for number in (0, 1)
        for name in ("attn", "ffn")
        for part in ("base", "proj.weight")
    }
    selector = {f"selector_{name}.weight" for name in ("hidden", "predecessor", "successor")}
    assert set(second.tensors) - first == own | selector
    assert second.tensors["blk.0.attn_conv_base"].shape == (2, 3, 32)
    names = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
    assert second.metadata.items() >= {f"dflash.{name}": value for name, value in names.items()}.items()
    third = open_gguf(write(tmp_path / "s.gguf", make(KINDS[2])))
    heads = {"markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"}
    assert set(third.tensors) - first == heads
    assert third.metadata["dflash.sample_from_anchor"] is third.metadata["dflash.has_confidence_head"] is True


@pytest.mark.parametrize(
    ("name", "differences", "said"),
    [
        (KINDS[0], {"attention_bias": True}, "attention_bias must be false in llama.cpp.*, got True"),
        (
            KINDS[0],
            {"layers": (NEAR, LayerAttention(False, None))},
            r"causality must be the same.*, got \[True, False\]",
        ),
        (KINDS[0], {"layers": (NEAR, LayerAttention(True, 8))}, r"windows must be of one size.*, got \[16, 8\]"),
        (KINDS[0], {"target_layers": (0, 2)}, "a target layer must be below the target's last layer, 2.*, got 2"),
        (KINDS[0], {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "scaled by dynamic with factor"),
        (KINDS[2], {"confidence_head_with_markov": False}, "confidence_head_with_markov must be true.*, got False"),
        (
            KINDS[2],
            {"confidence_temperatures": (1.0,) * 8},
            "confidence_temperatures must be absent in llama.cpp, got",
        ),
    ],
)
def test_what_llama_cpp_cannot_run(name: str, differences: Mapping[str, Any], said: str, make: Make) -> None:
    with pytest.raises(UsageError, match=said):
        drafter_metadata(make(name, **differences).config)


def test_a_selector_needs_a_wide_network(make: Make) -> None:
    config = replace(make(KINDS[1]).config, selector_top_k=6)
    with pytest.raises(UsageError, match="hidden_size must be at least 42 in llama.cpp where selector_top_k.*, got 32"):
        drafter_metadata(config)


def test_files_of_other_programs(make: Make, tmp_path: Path) -> None:
    """Such files have neither the target's number of layers nor its name, and may have unknown keys."""
    drafter = make(KINDS[0])
    path = write(tmp_path / "d.gguf", drafter)
    file = open_gguf(path)
    theirs = {key: value for key, value in file.metadata.items() if not key.startswith("blockdraft.")}
    tensors = {name: stored(tensor.read()) for name, tensor in file.tensors.items()}  # type: ignore[arg-type]

    def again(changes: Mapping[str, Any], **more: torch.Tensor) -> Path:
        values = {key: value for key, value in {**theirs, **changes}.items() if value is not None}
        values.pop("general.architecture")
        write_gguf(tmp_path / "e.gguf", "dflash", values, {**tensors, **{k: stored(t) for k, t in more.items()}}, "f32")
        return tmp_path / "e.gguf"

    assert drafter_config(open_gguf(again({})), 3) == drafter.config
    assert read_drafter(again({}), None, 3).trained.target is None
    for changes, more, said in (
        ({}, {"blk.0.attn_sinks.weight": torch.ones(4)}, "a tensor must be one that is known here, got .*attn_sinks"),
        ({}, {"rope_freqs.weight": torch.ones(4)}, "rope_freqs.weight must be absent.*, got 'a tensor'"),
        ({"dflash.block_size": None}, {}, "e.gguf: block_size must be in the file.*, but is absent"),
        ({"dflash.target_layers": None}, {}, "dflash.target_layers must be a list of layers.*, but is absent"),
        ({"dflash.rope.dimension_count": 4}, {}, "dflash.rope.dimension_count must be 8.*, got 4"),
        ({"dflash.rope.scaling.type": "longrope"}, {}, "rope.scaling.type must be one of linear.*, got 'longrope'"),
        ({"dflash.block_count": 3}, {}, "the number of layers is 3|tensors do not fit"),
    ):
        with pytest.raises(ValueError, match=said):
            read_drafter(again(changes, **more), None, 3)
    write_gguf(tmp_path / "t.gguf", "llama", {}, tensors, "f32")
    with pytest.raises(
        UsageError, match="t.gguf is no drafter: its architecture is llama, and neither dflash or eagle3"
    ):
        read_drafter(tmp_path / "t.gguf", None, 3)
