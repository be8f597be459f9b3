"""The native decoder gives the numbers of transformers for each family, through the same protocol."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from thinned import LONG, SLOW
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft.decode.proposal import chain
from blockdraft.errors import UsageError
from blockdraft.nn.quantization import best_group
from blockdraft.nn.quantize_weight import QUICK, quantize_weight
from blockdraft.targets import FAMILIES, HEAD, TABLE, Target, decoder_config, embedding_and_head, load_target
from blockdraft.targets.base import NotCovered
from blockdraft_tools.checkpoint import open_checkpoint

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # so that heads * head_dim is not the hidden size
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GRANITE_HYBRID = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.25, "attention_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 8,
    "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 24, "layer_norm_epsilon": 1e-3,
    "time_step_min": 1e-9,  # transformers' limit of step sizes in prompts
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "routed_scaling_factor": 1.5,
}  # fmt: skip
UNCOMPILED = ("llama-gelu",)  # families without a compiled forward pass


def rotary(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **parameters}}


CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "norm_eps": 1e-3,
    "block_multiple_of": 8,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
}


GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "global_head_dim": 24,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}


# Fields that differ from SMALL, by name: a family, and behind the first hyphen a variant of it.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-odd": {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
    },
    "llama-gelu": {"hidden_act": "gelu", "num_key_value_heads": 4},
    "llama-linear": rotary(rope_type="linear", factor=4.0),
    "llama-dynamic": rotary(rope_type="dynamic", factor=4.0),
    "llama-yarn": rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "llama-llama3": rotary(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "llama-longrope": rotary(
        rope_type="longrope", factor=2.0, original_max_position_embeddings=64, long_factor=[2.0] * 6,
        short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    ),
    "granite": {
        "head_dim": 8, "tie_word_embeddings": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.25,
        "attention_multiplier": 0.5, "logits_scaling": 4.0,
    },
    "granitemoehybrid": GRANITE_HYBRID | {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "shared_intermediate_size": 40,
    },
    "granitemoehybrid-dense": GRANITE_HYBRID | {
        "num_local_experts": 0, "position_embedding_type": "rope", "shared_intermediate_size": 40,
    },
    "nemotron_h": NEMOTRON | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    },
    "nemotron_h-odd": NEMOTRON | {
        "layers_block_type": ["mlp", "full_attention", "moe", "linear_attention"], "conv_kernel": 2,
        "mamba_num_heads": 2, "norm_topk_prob": False,
    },
    "gemma4_text": GEMMA4 | {
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 61,
    },
    "gemma4_text-keys": GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    },
    "gemma4_text-experts": GEMMA4 | {
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    },
    "lfm2": CONVOLUTIONS,
    "lfm2-odd": CONVOLUTIONS | {
        "layer_types": ["full_attention", "conv"] * 2, "conv_L_cache": 5, "tie_word_embeddings": False,
    },
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 2, "routed_scaling_factor": 1.5},
    "ministral3": {"head_dim": 8, "sliding_window": None, **rotary(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    )},
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 4},
    "olmo2": {"attention_bias": True},
    "olmo3": WINDOWS | {"rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }},
    "phi3": {"head_dim": 8, "sliding_window": 4},
    "phi3-partial": {
        "head_dim": 8, "original_max_position_embeddings": 64,
        **rotary(
            rope_type="longrope", factor=2.0, partial_rotary_factor=0.75, original_max_position_embeddings=64,
            short_factor=[1.0, 1.5, 2.0], long_factor=[1.0, 4.0, 8.0],
        ),
    },
    "gpt_oss": {**WINDOWS, "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.5, **rotary()},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "qwen3": {"attention_bias": True},
    "qwen3-window": WINDOWS | {"use_sliding_window": True, "tie_word_embeddings": True},
    "qwen2_moe": EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 40, "mlp_only_layers": [2]},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_moe-window": EXPERTS | {"use_sliding_window": True, "sliding_window": 4, "decoder_sparse_step": 2},
    "smollm3": {"head_dim": 8, "attention_bias": True},
    "smollm3-window": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4},
    "qwen3_5_text": DELTA_NET | {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_5_moe_text": DELTA_NET | EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 40},
    "qwen3_next": DELTA_NET | EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 40},
    "qwen3_5_text-odd": DELTA_NET | {
        "attention_bias": True, "layer_types": ["full_attention", "linear_attention"] * 2,
        "linear_conv_kernel_dim": 2, "linear_num_key_heads": 4,
        **rotary(partial_rotary_factor=0.5, rope_type="default"),
    },
    "deepseek_v2": LATENT | {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    },
    "deepseek_v2-lite": LATENT | {"q_lora_rank": None, "tie_word_embeddings": True},
    "deepseek_v3": LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1} | rotary(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3
    ),
    "deepseek_v3-odd": LATENT | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False,
        "first_k_dense_replace": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 8,
    },
    "glm4_moe_lite": LATENT,
    "gemma": {"attention_bias": True},
    "gemma2": WINDOWS | {
        "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma2-uncapped": WINDOWS | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
    },
    "gemma3_text": WINDOWS | {
        "query_pre_attn_scalar": 7, "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}  # fmt: skip
MODELS = {name: SMALL | fields for name, fields in DIFFERENCES.items()}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
WAYS = [(name, way) for name in MODELS for way in (True, False) if not (way and name.startswith(UNCOMPILED))]
THOROUGH = ("llama", "gemma2", "qwen3-window", "lfm2")  # tested in all ways in `make test`


def marked(*parameters: object, fast: bool, usual: bool) -> object:
    """Return parameters that are marked slow unless `fast`, and long unless `usual`."""
    return pytest.param(*parameters, marks=() if fast else SLOW if usual else LONG)


# Usually compiled models score three sequences, and uncompiled ones a single sequence.
EVERY_WAY_AND_ROWS = pytest.mark.parametrize(
    ("name", "compiled", "rows"),
    [
        marked(
            name,
            way,
            rows,
            fast=(rows == 3 and place % 2 == 0 and (way or name.startswith(UNCOMPILED)))
            or (name, way) == ("llama", False),
            usual=way == (rows == 3) or name.startswith(UNCOMPILED) or name in THOROUGH,
        )
        for place, (name, way) in enumerate(WAYS)
        for rows in (1, 3)
    ],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each model by name. All its weights have an effect."""
    made = {}
    for name, fields in MODELS.items():
        config = AutoConfig.for_model(name.partition("-")[0], **fields)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, mean=0.2 * (parameter.ndim == 1), std=0.25)
            for name_of_buffer, buffer in model.named_buffers():
                if name_of_buffer.endswith(("expert_bias", "layer_scalar", "e_score_correction_bias")):
                    torch.nn.init.normal_(buffer)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


def native(folder: Path, dtype: str = "float32", compiled: bool = True) -> Target:
    compiled = compiled and not folder.name.startswith(UNCOMPILED)
    target = load_target(folder, dtype=dtype, device="cpu", backend="native", compile="on" if compiled else "off")
    assert target.backend == "native"
    return target


def scores(target: Target, rows: int) -> Iterator[Tensor]:
    """Logits and features of prompts, single tokens, chains and trees, of rows of unequal lengths.

    At first they lie side by side; then they come and go, and lie anywhere.
    """
    generator = torch.Generator().manual_seed(1)
    target_layers = (2, 0, target.num_layers)

    def random(count: int) -> Tensor:
        return torch.randint(3, 61, (rows, count), generator=generator)

    def score(tokens: Tensor, parents: Tensor, **options: Any) -> Iterator[Tensor]:
        output = target.forward(tokens, parents, cache, target_layers, **options)
        assert output.hidden_states is not None
        yield from (output.logits, output.hidden_states)

    slots = 48
    cache = target.new_cache(rows + 2, slots).of([row * slots for row in range(rows)])
    lengths = [9, 6, 9][:rows]
    yield from score(random(4), torch.tensor([[-1, 0, 0, 1]] * rows))
    prompts = random(9)
    yield from score(prompts, chain(prompts).parents, logits_at=torch.tensor(lengths) - 1)
    cache.commit([range(length) for length in lengths])
    #     0
    #   1   2
    #  3 4    5
    tree = torch.tensor([[-1, 0, 0, 1, 1, 2]] * rows)
    other_tree = torch.tensor([[-1, 0, 1, 1, -1, -1], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]][:rows])
    for parents, paths in ((tree, [[0, 2, 5], [0], [0, 1, 3]]), (other_tree, [[0, 1, 3], [0, 1, 2, 3, 4], [0, 5]])):
        yield from score(random(6), parents)
        cache.commit(paths[:rows])
        for count in (1, 5):
            tokens = random(count)
            yield from score(tokens, chain(tokens).parents)
            cache.commit([[0]] * rows)
    if not target.can_truncate or "conv_L_cache" in target.architecture:  # as it runs in transformers
        return
    cache.truncate([length - row for row, length in enumerate(cache.lengths)])
    for gone in (rows, rows + 1):
        cache.close(gone * slots)
    before = cache.starts
    copy = rows * slots + 5
    cache.open(copy, 70)
    cache.copy(before[0], copy, 7)
    cache.close(before[0])
    cache.open(2, 20)  # where another row was, whose numbers are still there
    cache.copy(copy, 2, 3)
    for places in ([copy, *before[1:]], [2, *before[:0:-1]]):
        cache = cache.of(places)
        for tokens, parents in ((chain(t := random(3)).tokens, chain(t).parents), (random(6), tree)):
            yield from score(tokens, parents)
            cache.commit([[0, 1]] * rows)


Scores: TypeAlias = Callable[[str, str, int], list[Tensor]]


@pytest.fixture(scope="module")
def transformers_scores(folders: dict[str, Path]) -> Scores:
    """Return a function of name, dtype and rows that scores with transformers, once."""
    return cache(
        lambda name, dtype, rows: list(
            scores(load_target(folders[name], dtype=dtype, device="cpu", backend="hf"), rows)
        )
    )


def test_each_family_has_a_model_here() -> None:
    # That of Qwen3-VL is part of a larger model, in test_native_states.py.
    assert {name.partition("-")[0] for name in MODELS} | {"qwen3_vl_text"} == set(FAMILIES)


@EVERY_WAY_AND_ROWS
def test_logits_and_features_are_those_of_transformers(
    folders: dict[str, Path], transformers_scores: Scores, name: str, rows: int, compiled: bool
) -> None:
    ours = scores(native(folders[name], compiled=compiled), rows)
    for mine, expected in zip(ours, transformers_scores(name, "float32", rows), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        marked(
            name,
            way,
            fast=(name, way) in (("llama", True), ("gemma2", True)),
            usual=place % 4 == 0 or name in THOROUGH,  # one way of every second model
        )
        for place, (name, way) in enumerate(WAYS)
    ],
)
def test_bfloat16_is_no_further_from_the_exact_numbers_than_transformers(
    folders: dict[str, Path], transformers_scores: Scores, name: str, compiled: bool
) -> None:
    target = native(folders[name], "bfloat16", compiled)
    ours, theirs = list(scores(target, 3)), transformers_scores(name, "bfloat16", 3)
    inside = "compiled" in target.running  # compiled arithmetic is float32 up to the logits
    assert {numbers.dtype for numbers in ours} == {torch.float32 if inside else torch.bfloat16}
    assert torch.bfloat16 in {numbers.dtype for numbers in theirs}
    exact = transformers_scores(name, "float32", 3)
    errors = [
        sum(float((a.float() - b).abs().mean()) for a, b in zip(rounded, exact, strict=True))
        for rounded in (ours, theirs)
    ]
    assert 0 < errors[0] < 1.2 * errors[1]


@pytest.mark.slow
@EVERY_MODEL
def test_facts_and_weights_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    ours, theirs = native(folders[name]), load_target(folders[name], device="cpu", backend="hf")
    facts = ["path", "dtype", "device", "hidden_size", "num_layers", "vocab_size", "shape"]
    for fact in (
        facts if name == "ministral3" else [*facts, "max_context"]
    ):  # the context of Ministral ends earlier here
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    assert ours.eos_token_ids == theirs.eos_token_ids == {1}
    assert ours.architecture == theirs.architecture
    if name.startswith(
        ("qwen3_next", "granitemoehybrid", "nemotron_h", "deepseek", "glm4_moe_lite")
    ):  # whose tensors have other names or parts here
        return
    mine, expected = dict(ours.named_weights()), dict(theirs.named_weights())
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[weight], expected[weight]) for weight in expected)
    for table, other in zip(embedding_and_head(ours), embedding_and_head(theirs), strict=True):
        assert torch.equal(table, other)
    assert ours.has_trees and theirs.has_trees
    assert ours.can_truncate == (theirs.can_truncate or name.startswith("lfm2"))
    if theirs.can_truncate:  # transformers' convolutions keep an input more
        assert ours.cache_bytes(3, 10) == theirs.cache_bytes(3, 10)


def test_fused_weights_are_kept_once(folders: dict[str, Path]) -> None:
    target = native(folders["llama"])
    weights = dict(target.named_weights())
    attention = [weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert len({part.untyped_storage().data_ptr() for part in attention}) == 1
    assert target.decoder.head is not target.decoder.embedding  # type: ignore[attr-defined]
    tied = native(folders["qwen2"])
    assert tied.decoder.head is tied.decoder.embedding  # type: ignore[attr-defined]


def copied(source: Path, folder: Path, **changes: Any) -> Path:
    """Copy a checkpoint, change its config.json, and return the new folder."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_checkpoints_in_shards_are_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["llama"], tmp_path / "shards")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, sharded = (dict(native(place).named_weights()) for place in (folders["llama"], folder))
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_act": "relu"}, "its activation relu"),
        ("gemma", {"use_bidirectional_attention": True}, "its attention is bidirectional"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "its activation gelu is not silu"),
        ("llama-longrope", {"max_position_embeddings": 128}, r"\(longrope\) change with the length"),
        ("llama", {"model_type": "olmo", "architectures": ["OlmoForCausalLM"]}, "olmo is none of its families"),
        ("granitemoehybrid", {"time_step_limit": [0.0, 1.0]}, r"its time_step_limit is \(0.0, 1.0\)"),
    ],
)
def test_what_the_decoder_does_not_know_is_left_to_transformers(
    folders: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, Any], reason: str
) -> None:
    folder = copied(folders[name], tmp_path / "other", **changes)
    with pytest.raises(ValueError, match=f"native backend cannot run .*{reason}.* Use another backend, or auto"):
        load_target(folder, backend="native")
    target = load_target(folder)
    assert target.backend == "hf"
    assert target.backend_reason is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(target.backend_reason)
    assert load_target(folder, backend="hf").backend_reason is None


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("deepseek_v3", {"attention_bias": True}, "its attention or MLPs have biases"),
        ("deepseek_v3", {"n_group": 5}, "are no 5 groups"),
        ("deepseek_v3", LATENT | {"n_group": 4, "topk_group": 1}, "of which 1 hold 3 experts"),
        ("nemotron_h", {"moe_latent_size": 16}, "its experts read a latent projection"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "its MLPs have the activation silu"),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 32}, "none of its layers has attention"),
    ],
)
def test_what_the_decoder_does_not_know_is_named(family: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotCovered, match=reason):
        decoder_config(AutoConfig.for_model(family, **fields))


def test_layers_of_several_shapes_are_not_quantized(folders: dict[str, Path]) -> None:
    folder, part = folders["gemma4_text"], "layers of several shapes"
    with pytest.raises(ValueError, match=f"it has {part}, whose weights it neither quantizes .* use a GGUF file"):
        load_target(folder, device="cpu", quantize="int8")
    with pytest.raises(ValueError, match=f"cannot be quantized: it has {part}.*GGUF"), open_checkpoint(folder):
        pass


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("compiled", ["on", "off"])
def test_all_matrices_but_gates_are_quantized_at_load(folders: dict[str, Path], name: str, compiled: Any) -> None:
    exact, target = (
        load_target(folders[name], device="cpu", dtype="float32", compile=compiled, quantize=how)
        for how in (None, "int4")
    )
    weights, whole = dict(exact.named_weights()), ("mlp.gate.", "shared_expert_gate.", "in_proj_b.", "in_proj_a.")
    for label, weight in target.named_weights():
        expected, bits = weights[label], 8 if label in (TABLE, HEAD) else 4
        if weight.ndim == 2 and not any(part in label for part in whole):
            expected = quantize_weight(expected, bits, best_group(weight.size(1)), shares=QUICK).dequantize()
        assert torch.equal(weight, expected), label


def test_the_matrix_that_holds_nan_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["nemotron_h"], tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("layers.0.mixer.out_proj.weight"))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"layers\.0\..*out_proj.*: A weight holds NaN or infinity"):
        load_target(folder, device="cpu", quantize="int4")


def test_latent_attention_has_no_keys_in_8_bits(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="kv_dtype is 'int8', and .* has latent attention"):
        load_target(folders["deepseek_v3"], device="cpu", kv_dtype="int8")


def test_recurrent_layers_are_quantized_and_not_exported(folders: dict[str, Path]) -> None:
    folder = folders["qwen3_5_text-odd"]
    target: Any = load_target(folder, device="cpu", quantize="int4")
    layer = target.decoder.layers[1]
    assert layer.qkv.bits == 4 and layer.delta_gates.bits is None
    refused = pytest.raises(ValueError, match="cannot be exported: it has recurrent layers")
    with refused, open_checkpoint(folder, doing="exported"):
        pass


def test_a_head_that_is_tied_in_name_only_is_left_to_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["llama"], tmp_path / "untied", tie_word_embeddings=True)
    with pytest.raises(ValueError, match="ties the head"):
        load_target(folder, backend="native")


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("backend", ["native", "hf"])
def test_a_tied_checkpoint_may_hold_the_table_under_either_name(
    folders: dict[str, Path], tmp_path: Path, kept: str, backend: str
) -> None:
    folder = copied(folders["qwen2"], tmp_path / "one")
    tensors = load_file(folder / "model.safetensors")
    tensors = {kept if name in (kept, "model.embed_tokens.weight") else name: each for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    whole, one = (load_target(each, device="cpu", backend=backend) for each in (folders["qwen2"], folder))
    mine, expected = dict(one.named_weights()), dict(whole.named_weights())
    assert mine.keys() == expected.keys() and all(torch.equal(mine[name], expected[name]) for name in expected)
    assert one.source_fingerprint == whole.source_fingerprint


def test_an_untied_checkpoint_needs_both(folders: dict[str, Path], tmp_path: Path) -> None:
    for number, lacking in enumerate(("lm_head.weight", "model.embed_tokens.weight")):
        folder = copied(folders["llama"], tmp_path / str(number))
        tensors = load_file(folder / "model.safetensors")
        del tensors[lacking]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"lacks .*{lacking}"):
            load_target(folder, backend="native")


def test_weights_that_lack_or_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["llama"], tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has the shape \[31\] instead of \[32\]"):
        load_target(folder, backend="native")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        load_target(folder, backend="native")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights in safetensors"):
        load_target(folder, backend="native")


def test_the_native_decoder_is_chosen_where_it_knows_the_model(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    assert (target.backend, target.backend_reason) == ("native", None)
    assert load_target(tiny_target_dir, backend="hf").backend == "hf"
    with pytest.raises(ValueError, match="backend is 'fast'"):
        load_target(tiny_target_dir, backend="fast")  # type: ignore[arg-type]


WAYS = pytest.mark.parametrize("way", ["compiled", "uncompiled", "hf"])


def in_way(way: str, folder: Path) -> Target:
    return (
        load_target(folder, device="cpu", backend="hf") if way == "hf" else native(folder, compiled=way == "compiled")
    )


@WAYS
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window"])
def test_rows_anywhere_are_those_side_by_side(
    folders: dict[str, Path], name: str, way: str, scatter: Callable[..., Any]
) -> None:
    """Between others whose numbers must not be seen. Uncompiled, rows at unequal distances are copied side by side."""
    target = in_way(way, folders[name])
    places, generator = ((40, 16), (3, 24), (61, 20)), torch.Generator().manual_seed(2)
    together, apart = target.new_cache(3, 24), scatter(target.new_cache(1, 90), *places)
    inside = torch.zeros(90, dtype=torch.bool)
    for row, capacity in places:
        inside[row : row + capacity] = True
    tolerance = 0.0 if way == "compiled" else 1e-4
    #     0
    #   1   2
    #  3 4
    parents = torch.tensor([[-1, 0, 0, 1, 1]] * 3)
    lengths, target_layers = [3, 7, 5], (1, target.num_layers)
    for step in range(3):
        tokens = torch.randint(3, 61, (3, 5 if step else 7), generator=generator)
        nodes = (tokens, parents) if step else (tokens, chain(tokens).parents)
        expected, actual = (target.forward(*nodes, cache, target_layers) for cache in (together, apart))
        for ours, theirs in ((actual.logits, expected.logits), (actual.hidden_states, expected.hidden_states)):
            assert ours is not None and theirs is not None and ours.isfinite().all()
            for row, length in enumerate([len(tokens[0])] * 3 if step else lengths):
                torch.testing.assert_close(ours[row, :length], theirs[row, :length], atol=tolerance, rtol=tolerance)
        for own in (together, apart):
            own.commit([[0, 2], [0, 1, 4], [0]] if step else [range(length) for length in lengths])
        stores = list(apart.stores)
        for store in stores:
            assert step == 0 or store[..., ~inside, :].isnan().all()
            store[..., ~inside, :] = torch.nan


@WAYS
@pytest.mark.parametrize("places", [((0, 10), (10, 10)), ((10, 10), (0, 10))])
def test_nodes_past_the_slots_of_a_row_are_our_bug(
    folders: dict[str, Path], way: str, places: tuple[tuple[int, int], ...], scatter: Callable[..., Any]
) -> None:
    """Even if KV slots of another sequence follow."""
    target = in_way(way, folders["llama"])
    cache = scatter(target.new_cache(1, 40), *places)
    first = torch.full((2, 8), 5)
    target.forward(first, chain(first).parents, cache)
    cache.commit([range(8), range(3)])
    for count, fits in ((3, False), (2, True)):
        tokens = torch.full((2, count), 6)
        if fits:
            target.forward(tokens, chain(tokens).parents, cache)
            continue
        with pytest.raises(AssertionError, match="11 slots needed, 10 allocated"):
            target.forward(tokens, chain(tokens).parents, cache)
