"""MTP heads in GGUF files: the draft tokens of the folder that a file was made of, and no other output."""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[2] / "targets"))
from gguf_models import DELTA_NET, DELTA_NET_KEYS, EXPERT_KEYS, EXPERTS, MODELS, SMALL
from gguf_writer import ARCHITECTURES, in_files, tiny, write_gguf, writer_arch
from test_gguf_mutilated import damaged

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.nn.decoder_config import GATES
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

LAYERS = 4
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS}
NET: dict[str, Any] = DELTA_NET | {"linear_num_value_heads": 4, "head_dim": 16}
NET |= {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"}}
NET_KEYS = DELTA_NET_KEYS | {"ssm.time_step_rank": 4, "ssm.inner_size": 32}
SHARED = {"shared_expert_intermediate_size": 64}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
LATENT_KEYS = {"attention.key_length": 40, "attention.value_length": 32, "attention.kv_lora_rank": 32}
LATENT_KEYS |= {"attention.q_lora_rank": 32, "attention.key_length_mla": 40, "attention.value_length_mla": 16}
WITH_LATENT = ("glm4_moe_lite", "deepseek_v3")
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_5_text": (NET, NET_KEYS),
    "qwen3_5_moe_text": (NET | EXPERTS | SHARED, NET_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 64}),
    **{family: (MODELS[family][0] | LATENT, MODELS[family][1] | LATENT_KEYS) for family in WITH_LATENT},
}
AROUND = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head_norm": "norm"}
PROMPTS = [[7, 50, 33, 12, 9, 21], [5], [(7 * i * i) % 50 + 4 for i in range(17)]]


def config_of(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **SMALL | FAMILIES[family][0] | SIZES | changes)


@cache
def base_of(family: str, vocab_size: int = SMALL["vocab_size"]) -> PreTrainedModel:
    model = tiny(config_of(family, vocab_size=vocab_size))
    with torch.no_grad():
        model.lm_head.weight[:5] *= 6  # outputs repeat few tokens, so that draft tokens are often right
    return model


@cache
def head_of(family: str) -> dict[str, Tensor]:
    """Tensors of a head by their names in Qwen's folders, without `mtp.`."""
    kinds = {} if family in WITH_LATENT else {"layer_types": ["linear_attention"] * LAYERS + ["full_attention"]}
    whole = tiny(config_of(family, num_hidden_layers=LAYERS + 1, **kinds), seed=1)
    prefix, numbers = f"model.layers.{LAYERS}.", np.random.default_rng(2)
    head = {
        name.replace(prefix, "layers.0.", 1): weight
        for name, weight in whole.state_dict().items()
        if name.startswith(prefix)
    }
    for own in AROUND.values():
        drawn = numbers.standard_normal((64, 128) if own == "fc" else (64,), dtype=np.float32)
        centre = 1 if family in WITH_LATENT and own != "fc" else 0
        head[f"{own}.weight"] = torch.from_numpy(0.2 * drawn) + centre
    return head


def in_file(family: str, head: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors of a head as llama.cpp's converter names and shapes them."""
    names = gguf.get_tensor_name_map(writer_arch(ARCHITECTURES[family]), LAYERS + 1)
    prefix = f"model.layers.{LAYERS}."
    layer = {name.replace("layers.0.", prefix): weight for name, weight in head.items() if name.startswith("layers")}
    model: Any = SimpleNamespace(config=config_of(family), state_dict=lambda: layer)
    tensors = {str(names.get_name(name, (".weight", ".bias"))): weight for name, weight in in_files(model)}
    for name, own in AROUND.items():
        plus_one = family not in WITH_LATENT and own != "fc"
        tensors[f"blk.{LAYERS}.nextn.{name}.weight"] = head[f"{own}.weight"] + plus_one
    return {name: weight.float().numpy() for name, weight in tensors.items()}


def write_file(
    path: Path,
    family: str,
    kinds: Any = "F32",
    head: dict[str, np.ndarray] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **more: Any,
) -> Path:
    extra = in_file(family, head_of(family)) if head is None else head
    keys = FAMILIES[family][1] | {"block_count": LAYERS + 1, "nextn_predict_layers": 1} | more
    base = base_of(family) if tokenizer is None else base_of(family, len(tokenizer))
    write_gguf(path, base, kinds, tokenizer, metadata=keys, extra=extra)
    return path


def in_folder(family: str) -> dict[str, Tensor]:
    """Tensors of a head as they are published."""
    head = head_of(family).items()
    named = dict(as_deepseek(head)) if family in WITH_LATENT else {f"mtp.{name}": weight for name, weight in head}
    return {name: weight.contiguous() for name, weight in named.items()}


def as_deepseek(head: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a head by DeepSeek's names, with a tensor for each expert."""
    prefix, theirs = f"model.layers.{LAYERS}.", {own: name.replace("d_n", "d.n") for name, own in AROUND.items()}
    for name, weight in head:
        own = name.removesuffix(".weight")
        place, experts, kind = name.replace("layers.0.", prefix).partition(".experts.")
        if own in theirs:
            yield f"{prefix}{theirs[own]}.weight", weight
        elif not experts:
            yield place, weight
        for number, matrix in enumerate(weight if experts else ()):
            parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{place}.experts.{number}.{part}.weight", rows


def write_folder(folder: Path, family: str, second: dict[str, Tensor] | None = None) -> Path:
    base_of(family).save_pretrained(folder)
    head = in_folder(family) | (second or {})
    save_file(head, folder / "head.safetensors", {"format": "pt"})
    files = dict.fromkeys(head, "head.safetensors")
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as whole:
        files |= dict.fromkeys(whole.keys(), "model.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def outputs(target: Target, drafter: str, drafting: Drafting) -> list[Any]:
    params = [SamplingParams(13, temperature, seed=3, ignore_eos=True) for temperature in (0.0, 0.0, 0.8)]
    return Engine(target, load_drafter(drafter, target=target), 3, drafting).generate(PROMPTS, params)


@pytest.mark.parametrize("way", ["off", "on"])
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_tokens_are_those_of_the_folder(family: str, way: Any, tmp_path: Path) -> None:
    folder = load_target(write_folder(tmp_path / "folder", family), dtype="float32", device="cpu", backend="hf")
    exact = {"kv_dtype": "float32"} if way == "on" else {}  # else bfloat16
    file = load_target(write_file(tmp_path / "model.gguf", family), device="cpu", compile=way, **exact)
    for drafting in (Drafting(5), Drafting(tree_budget=9)):
        wanted, actual = (outputs(target, "mtp", drafting) for target in (folder, file))
        assert [own.token_ids for own in actual] == [own.token_ids for own in wanted]
        assert [own.stats.committed for own in actual] == [own.stats.committed for own in wanted]
        assert max(max(own.stats.committed) for own in actual) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_in_a_folder_is_compiled_for_a_compiled_target(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", family)
    theirs = load_target(folder, dtype="float32", device="cpu", backend="hf")
    ours = load_target(folder, dtype="float32", device="cpu", backend="native", compile="on")
    for drafting in (Drafting(5), Drafting(tree_budget=9)):
        wanted, actual = (outputs(target, "mtp", drafting) for target in (theirs, ours))
        assert [own.token_ids for own in actual] == [own.token_ids for own in wanted]
        assert [own.stats.committed for own in actual] == [own.stats.committed for own in wanted]
    ways: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"quantize": "int4"}]
    for way in ways:
        target = load_target(folder, **{"dtype": "float32", "device": "cpu", "compile": "on"} | way)
        drafter: Any = load_drafter("mtp", target=target)
        assert isinstance(drafter.runner, CompiledDraftRunner) and drafter.bits == (4 if "quantize" in way else None)
        bits = {name: part.bits for name, part in drafter.network.layer.named_children() if hasattr(part, "bits")}
        assert {bits.pop(gate, None) for gate in GATES} == {None} and {*bits.values()} == {drafter.bits}
        plain, drafted = outputs(target, "none", Drafting(None)), outputs(target, "mtp", Drafting(4))
        assert [own.token_ids for own in drafted] == [own.token_ids for own in plain]
    assert [part.kind for part in load_drafter(target=ours).parts] == ["lookup", "mtp"]  # the default
    assert load_drafter(target=theirs).kind == "lookup"
    _, *others = in_folder(family).items()
    save_file(dict(others), folder / "head.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="tensors of its MTP head do not fit"):
        load_drafter("mtp", target=ours)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_0", {f"blk.{LAYERS}.": "Q8_0"}])  # of all matrices, or the head's alone
def test_quantized_heads_change_no_output(kinds: Any, family: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.gguf", family, kinds)
    target = load_target(path, device="cpu", compile="on")
    assert [part.kind for part in load_drafter(target=target).parts] == ["lookup", "mtp"]  # the default
    drafter: Any = load_drafter("mtp", target=target)
    assert drafter.compile_reason is None and isinstance(drafter.runner, CompiledDraftRunner)
    assert drafter.kind == "mtp" and 0 < drafter.weight_bytes() < 2 * path.stat().st_size
    plain = [own.token_ids for own in outputs(target, "none", Drafting(None))]
    for drafting in (Drafting(4), Drafting(tree_budget=9), Drafting("auto")):
        drafted = outputs(target, "mtp", drafting)
        assert [own.token_ids for own in drafted] == plain
        assert drafting.block_size == "auto" or all(sum(own.stats.drafted) > 0 for own in drafted)


@pytest.mark.parametrize("way", ["off", "on"])
@pytest.mark.parametrize("family", WITH_LATENT)
def test_a_cached_prefix_changes_no_draft_token(family: str, way: Any, tmp_path: Path) -> None:
    target = load_target(write_file(tmp_path / "model.gguf", family), device="cpu", compile=way)
    for drafting in (Drafting(5), Drafting(tree_budget=9)):
        engine = Engine(target, load_drafter("mtp", target=target), prefix_tokens=200, drafting=drafting)
        params = SamplingParams(9, ignore_eos=True)
        known = engine.generate(PROMPTS, params)
        turns = [prompt + one.token_ids[:5] + [31, 17] for prompt, one in zip(PROMPTS, known, strict=True)]
        for turn, continued in zip(turns, engine.generate(turns, params), strict=True):
            fresh = Engine(target, load_drafter("mtp", target=target), drafting=drafting)
            [wanted] = fresh.generate([turn], params)
            assert continued.token_ids == wanted.token_ids and continued.stats.committed == wanted.stats.committed


@pytest.mark.parametrize("family", WITH_LATENT)
def test_several_layers_are_refused_and_not_the_default(family: str, tmp_path: Path) -> None:
    head, keys = in_file(family, head_of(family)), {"nextn_predict_layers": 2, "block_count": LAYERS + 2}
    head |= {name.replace(f".{LAYERS}.", f".{LAYERS + 1}."): data for name, data in head.items()}
    path = write_file(tmp_path / "model.gguf", family, head=head, **keys)
    target = load_target(path, device="cpu", compile="on")
    assert load_drafter(target=target).kind == "lookup"
    with pytest.raises(UsageError, match="several MTP layers"):
        load_drafter("mtp", target=target)
    second = {f"model.layers.{LAYERS + 1}.enorm.weight": torch.ones(64)}
    folder = write_folder(tmp_path / "folder", family, second)
    target = load_target(folder, dtype="float32", device="cpu", compile="on")
    assert load_drafter(target=target).kind == "lookup"
    with pytest.raises(UsageError, match="several MTP layers"):
        load_drafter("mtp", target=target)


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ({}, {"block_count": LAYERS, "nextn_predict_layers": None}, "has no MTP head.*that of DeepSeek-V3 always"),
        ({}, {"nextn_predict_layers": 2, "block_count": LAYERS + 2}, "several MTP layers"),
        ({f"blk.{LAYERS}.nextn.eh_proj.weight": None}, {}, "lacks blk.4.nextn.eh_proj.weight"),
        ({f"blk.{LAYERS}.nextn.hnorm.weight": np.ones(3, np.float32)}, {}, r"nextn.hnorm.weight of the shape \[64\]"),
        ({f"blk.{LAYERS}.attn_k.weight": None}, {}, "lacks blk.4.attn_k.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    change: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    family = "qwen3_5_text"
    head = {} if "block_count" in keys and keys["block_count"] == LAYERS else in_file(family, head_of(family)) | change
    head = {name: data for name, data in head.items() if data is not None}
    target = load_target(write_file(tmp_path / "model.gguf", family, head=head, **keys), device="cpu", compile="off")
    with pytest.raises(UsageError, match=message):
        load_drafter("mtp", target=target)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "glm4_moe_lite"])
def test_damage_is_reported(family: str, tmp_path: Path) -> None:
    content = write_file(tmp_path / "whole.gguf", family, "Q8_0").read_bytes()
    chance, path = random.Random(2), tmp_path / "damaged.gguf"
    for _ in range(60):
        path.write_bytes(damaged(content, chance))
        try:
            target = load_target(path, device="cpu", compile="off")
            Engine(target, load_drafter("mtp", target=target), drafting=Drafting(3)).generate(
                PROMPTS[:1], SamplingParams(3, ignore_eos=True)
            )
        except UsageError as error:
            assert "damaged.gguf" in str(error) and len(str(error)) < 1000
