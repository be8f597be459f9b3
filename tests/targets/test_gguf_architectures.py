"""Architectures with parts that Llama lacks, in quantized files and quantized at load.

Compiled forward passes are compared with torch's, and drafted outputs with plain ones.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import MODELS, model_of, scores
from gguf_writer import write_gguf
from thinned import LONG
from torch import Tensor

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 96, "head_dim": 64}
MANY = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
MANY_KEYS = {"expert_count": 9, "expert_used_count": 3, "expert_feed_forward_length": 256}
SHARED, SHARED_KEYS = {"shared_expert_intermediate_size": 256}, {"expert_shared_feed_forward_length": 256}
TWICE = {"hidden_size": 512, "head_dim": 128}  # two super-blocks a row
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token": "Q6_K", "": "Q4_K"}  # much as Q4_K_M
# Of Gemma 4, whose heads have two sizes.
SIZES = {"head_dim": 64, "global_head_dim": 128}
SIZES_KEYS = {f"attention.{part}_length": 128 for part in ("key", "value")}
SIZES_KEYS |= {f"attention.{part}_length_swa": 64 for part in ("key", "value")} | {"rope.dimension_count": 128}
# Of Qwen3.5, with three value heads for each key head.
NET = {"linear_key_head_dim": 32, "linear_value_head_dim": 128, "linear_num_value_heads": 6}
NET_KEYS = {"ssm.state_size": 32, "ssm.time_step_rank": 6, "ssm.inner_size": 768, "rope.dimension_count": 32}
# Of Mamba-2: two groups, and projections of whole vectors.
MAMBA_KEYS = {"ssm.state_size": 32, "ssm.time_step_rank": 16, "ssm.inner_size": 512}
GRANITE_HYBRID = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "shared_intermediate_size": 256}
GRANITE_KEYS = MAMBA_KEYS | {"attention.key_length": 64, "attention.value_length": 64}
NEMOTRON = {"mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 32}
# Of latent attention, whose queries of a head are shorter than a super-block.
LATENT: dict[str, Any] = {"head_dim": 32, "kv_lora_rank": 256, "q_lora_rank": 256, "qk_rope_head_dim": 32}
LATENT |= {"qk_nope_head_dim": 96, "v_head_dim": 64, "moe_intermediate_size": 256}
LATENT_KEYS = {"attention.key_length": 288, "attention.value_length": 256, "attention.kv_lora_rank": 256}
LATENT_KEYS |= {"attention.q_lora_rank": 256, "attention.key_length_mla": 128, "attention.value_length_mla": 64}
LATENT_KEYS |= {"rope.dimension_count": 32, "expert_feed_forward_length": 256}
ONE_QUERY = {"q_lora_rank": None}, {"attention.q_lora_rank": None}
GATES_APART = {"ssm_alpha": "F32", "ssm_beta": "F32"} | MIXED
FILES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2-groups",
        {"attn_k_b": "Q5_0", "attn_v_b": "IQ4_NL"} | MIXED,
        LATENT | ONE_QUERY[0],
        LATENT_KEYS | ONE_QUERY[1],
    ),
    "deepseek_v3": ("deepseek_v3", {"attn_k_b": "Q8_0"} | MIXED, LATENT, LATENT_KEYS),
    "deepseek_v3-F16": ("deepseek_v3", "F16", LATENT, LATENT_KEYS),
    "glm4_moe_lite": ("glm4_moe_lite", {"attn_k_b": "Q4_0", "attn_v_b": "Q4_K"} | MIXED, LATENT, LATENT_KEYS),
    "glm4_moe_lite-Q8_0": ("glm4_moe_lite", "Q8_0", LATENT, LATENT_KEYS),
    "gemma4": (
        "gemma4_text",
        MIXED,
        SIZES | {"hidden_size_per_layer_input": 256},
        SIZES_KEYS | {"embedding_length_per_layer_input": 256},
    ),
    "gemma4-experts": (
        "gemma4_text-experts",
        MIXED,
        SIZES | {"num_experts": 9, "top_k_experts": 3, "moe_intermediate_size": 256},
        SIZES_KEYS | MANY_KEYS,
    ),
    "granite": ("granite", MIXED, TWICE, {}),
    "granitemoehybrid": (
        "granitemoehybrid",
        MIXED,
        GRANITE_HYBRID | {"num_local_experts": 9, "num_experts_per_tok": 3},
        GRANITE_KEYS | MANY_KEYS | SHARED_KEYS,
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid-dense",
        "Q8_0",
        GRANITE_HYBRID,
        GRANITE_KEYS | SHARED_KEYS | {"feed_forward_length": 256},
    ),
    "nemotron_h": (
        "nemotron_h",
        MIXED,
        NEMOTRON
        | {"n_routed_experts": 9, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256},
        MAMBA_KEYS | MANY_KEYS | SHARED_KEYS | {"feed_forward_length": [0, 256, 0, 256, 0]},
    ),
    "nemotron_h-dense": (
        "nemotron_h-dense",
        MIXED,
        NEMOTRON,
        MAMBA_KEYS | {"feed_forward_length": [0, 256, 0, 256, 0]},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"exps": "MXFP4", "": "Q8_0"},
        {"num_local_experts": 9, "num_experts_per_tok": 3, "hidden_size": 192, "intermediate_size": 96},
        MANY_KEYS | {"expert_feed_forward_length": 96},
    ),
    "phi3": ("phi3", "Q8_0", {}, {}),
    "smollm3": ("smollm3", MIXED, {}, {}),
    "lfm2": ("lfm2", MIXED, {}, {}),
    "lfm2_moe": ("lfm2_moe", MIXED, MANY, MANY_KEYS),
    "qwen2_moe": ("qwen2_moe", MIXED, MANY | SHARED, MANY_KEYS | SHARED_KEYS),
    "qwen2_moe-F16": ("qwen2_moe", "F16", MANY | SHARED, MANY_KEYS | SHARED_KEYS),
    "qwen3_5": ("qwen3_5_text", GATES_APART, NET, NET_KEYS),
    "qwen3_5-Q8_0": ("qwen3_5_text", "Q8_0", NET, NET_KEYS),
    "qwen3_5_moe": ("qwen3_5_moe_text", MIXED, NET | MANY | SHARED, NET_KEYS | MANY_KEYS | SHARED_KEYS),
    "qwen3_next": ("qwen3_next", MIXED, NET | MANY | SHARED, NET_KEYS | MANY_KEYS | SHARED_KEYS),
    "olmo3": ("olmo3", MIXED, {}, {}),
    "qwen3_moe": ("qwen3_moe", MIXED, MANY | TWICE, MANY_KEYS),
    "qwen3_moe-Q8_0": ("qwen3_moe", "Q8_0", MANY, MANY_KEYS),
}
# Of Hugging Face, quantized while they are loaded.
FOLDERS = [
    f"{name}-{bits}"
    for bits, names in {
        "int4": ("deepseek_v3", "lfm2_moe", "nemotron_h", "qwen2_moe", "qwen3_5_moe"),
        "int8": ("deepseek_v2", "glm4_moe_lite", "gpt_oss", "granitemoehybrid", "lfm2", "qwen3_moe", "qwen3_next"),
    }.items()
    for name in names
]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=LONG if "-Q8" in name else ()) for name in (*FILES, *FOLDERS)]
)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("file")
    if request.param in FOLDERS:
        name, _, differences, _ = FILES[request.param[:-5]]
        model_of(name, **WIDE | differences).save_pretrained(parent / request.param)
        return parent / request.param
    name, kinds, differences, metadata = FILES[request.param]
    path = parent / f"{request.param}.gguf"
    write_gguf(path, model_of(name, **WIDE | differences), kinds, metadata=MODELS[name][1] | metadata)
    return path


def load(file: Path, **how: Any) -> Target:
    how |= {"dtype": "float32", "quantize": file.name[-4:]} if file.is_dir() else {}
    return load_target(file, device="cpu", **how)


@pytest.fixture(scope="module")
def target(file: Path) -> Target:
    return load(file, compile="on")


def test_compiled_is_near_torch(file: Path) -> None:
    target: Any = load(file, compile="on", kv_dtype="float32")
    plain, differences = load(file, compile="off"), []
    for seed in range(4):
        tokens = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(seed))
        expected = scores(plain, tokens)[0]
        differences += ((scores(target, tokens)[0] - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()
    # An input halfway between two codes rounds either way, which may choose another expert, and later tokens read it.
    assert np.quantile(differences, 0.25) < 1e-4, differences
    assert np.median(differences) < (0.05 if target.decoder.config.experts else 1e-4), differences


def test_a_token_has_the_same_bits_alone_and_among_others(target: Target) -> None:
    random = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 96, (20, 9), generator=random)
    chain = torch.arange(-1, 8).expand(20, -1)

    def logits(tokens: Tensor, parents: Tensor) -> Tensor:
        slots = tokens.size(1)
        cache = target.new_cache(len(tokens), slots).of([row * slots for row in range(len(tokens))])
        return target.forward(tokens, parents, cache).logits

    batched = logits(rows, chain)
    for row in (0, 7):
        assert torch.equal(logits(rows[row : row + 1], chain[:1])[0], batched[row])
    cache = target.new_cache(1, 9)
    for node in range(9):
        alone = target.forward(rows[:1, node : node + 1], torch.tensor([[-1]]), cache).logits[0, 0]
        cache.commit([[0]])
        assert torch.equal(alone, batched[0, node]), node
    tree = torch.tensor([[-1, 0, 0, 1, 2, 3, 4, 4, 5]])  # 0, 2, 4, 7 is a chain of its own
    branch = logits(rows[:1, [0, 2, 4, 7]], chain[:1, :4])[0]
    assert torch.equal(logits(rows[:1], tree)[0][[0, 2, 4, 7]], branch)


def test_drafted_outputs_are_the_plain_ones(target: Target) -> None:
    assert_lossless(target)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4", "gemma4-experts", "gpt_oss"])
def test_drafted_outputs_with_keys_and_values_in_8_bits(family: str, tmp_path: Path) -> None:
    name, kinds, differences, metadata = FILES[family]
    path = tmp_path / "m.gguf"
    write_gguf(path, model_of(name, **WIDE | differences), kinds, metadata=MODELS[name][1] | metadata)
    assert_lossless(load_target(path, device="cpu", compile="on", kv_dtype="int8"))


def assert_lossless(target: Target) -> None:
    prompts = [[(5 * i + 3 * row) % 7 + 4 for i in range(12 + row)] for row in range(3)]
    params = [SamplingParams(20, temperature, seed=9, ignore_eos=True) for temperature in (0.0, 0.0, 0.7)]
    plain = Engine(target, load_drafter("none", target=target)).generate(prompts, params)
    for drafting in (Drafting(None), Drafting(tree_budget=8)):
        engine = Engine(target, load_drafter("lookup", target=target), max_batch_size=3, drafting=drafting)
        assert [own.token_ids for own in engine.generate(prompts, params)] == [own.token_ids for own in plain]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("deepseek_v3", None), ("gemma4-experts", "int8"), ("qwen2_moe", None), ("qwen3_moe", "int8")],
)
def test_prefixes_and_quantized_caches_of_mixtures(
    name: str, kv_dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, kinds, differences, metadata = FILES[name]
    write_gguf(
        tmp_path / "m.gguf", model_of(family, **WIDE | differences), kinds, metadata=MODELS[family][1] | metadata
    )
    target = load_target(tmp_path / "m.gguf", device="cpu", compile="on", kv_dtype=kv_dtype)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    prompt, params = [(5 * i * i) % 89 + 4 for i in range(40)], SamplingParams(12, ignore_eos=True)
    [plain] = Engine(target, load_drafter("none", target=target)).generate([prompt], params)
    for kept, stored, remembered in ((200, 0, [0, 32]), (0, 16, [32, 32])):  # in memory; then on disk
        for _ in range(2):
            drafter = load_drafter("lookup", target=target)
            with Engine(target, drafter, prefix_tokens=kept, stored_prefix_tokens=stored) as engine:
                done = [engine.submit(prompt, params, instruction_tokens=32).result(60) for _ in range(2)]
            assert [own.token_ids for own in done] == [plain.token_ids] * 2
        assert [min(own.stats.remembered, 32) for own in done] == remembered


def test_experts_of_gemma4_with_two_matrices(tmp_path: Path) -> None:
    """Files of some converters hold gate and up projections apart. The model is the same."""
    _, _, differences, metadata = FILES["gemma4-experts"]
    model, tokens, outputs = model_of("gemma4_text-experts", **WIDE | differences), torch.arange(1, 9)[None], []
    for name in ("fused", "split"):
        values = MODELS["gemma4_text-experts"][1] | metadata
        write_gguf(tmp_path / f"{name}.gguf", model, "Q8_0", metadata=values, splits_experts=name == "split")
        outputs.append(scores(load_target(tmp_path / f"{name}.gguf", device="cpu", compile="on"), tokens))
    assert torch.equal(*outputs)
