"""A target's tree forward over its cache equals transformers' own forward from scratch, for several families."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from thinned import thinned
from tiny_families import ATTENTION, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft.decode.proposal import chain
from blockdraft.targets import load_target
from blockdraft.targets.hf import REFUSED_FAMILIES, HFTarget

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-window": SMALL
    | {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llama": SMALL,
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "bos_token_id": 2},
    "gpt_neox": {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")},
    "olmo2": SMALL,
}
OTHERS = [family for family in ATTENTION if family not in FAMILIES]


def make(family: str) -> HFTarget:
    if family not in FAMILIES:
        return HFTarget(make_model(family))
    fields = dict(FAMILIES[family])
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type", family), **fields)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # default weights are so small that every model is nearly the identity
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return HFTarget(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", thinned([*FAMILIES, *OTHERS], keep=2))
def test_forward_after_commit_equals_forward_from_scratch(family: str) -> None:
    target = make(family)
    close = {"atol": 2e-4 if family in OTHERS else 2e-5, "rtol": 1e-4}
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 61, (2, 9), generator=generator)
    lengths = [9, 6]
    cache = target.new_cache(2, 40)
    last = torch.tensor([length - 1 for length in lengths])
    first = target.forward(prompts, chain(prompts).parents, cache, target_layers=(0, 1), logits_at=last)
    cache.commit([list(range(length)) for length in lengths])
    history = [prompts[row, :length].tolist() for row, length in enumerate(lengths)]

    def scratch(ids: list[int]) -> Any:
        with torch.no_grad():
            return target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)

    for row in range(2):
        torch.testing.assert_close(first.logits[row, 0], scratch(history[row]).logits[0, -1], **close)
    #     0
    #   1   2
    #  3 4    5
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]]).repeat(2, 1)
    path_to = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 1, 4], 5: [0, 2, 5]}
    for accepted in (4, 5, 0):
        tokens = torch.randint(3, 61, (2, 6), generator=generator)
        output = target.forward(tokens, parents, cache, target_layers=(0, 1))
        assert output.hidden_states is not None and output.hidden_states.shape == (2, 6, 64)
        for row in range(2):
            for node, path in path_to.items():
                exact = scratch(history[row] + tokens[row, path].tolist())
                torch.testing.assert_close(output.logits[row, node], exact.logits[0, -1], **close)
                target_layers = torch.cat([exact.hidden_states[1][0, -1], exact.hidden_states[2][0, -1]])
                torch.testing.assert_close(output.hidden_states[row, node], target_layers, **close)
            history[row] += tokens[row, path_to[accepted]].tolist()
        cache.commit([path_to[accepted]] * 2)
    assert cache.lengths == [len(ids) for ids in history]


@pytest.mark.parametrize("family", ["qwen3-window", "gpt2"])
def test_forward_after_truncation_equals_forward_from_scratch(family: str) -> None:
    target = make(family)
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(2))
    cache = target.new_cache(2, 20)
    target.forward(ids, chain(ids).parents, cache)
    cache.commit([range(12), range(9)])
    cache.truncate([4, 7])
    assert cache.lengths == [4, 7]
    new = torch.tensor([[30, 31, 32], [40, 41, 42]])
    output = target.forward(new, chain(new).parents, cache)
    for row, length in enumerate(cache.lengths):
        with torch.no_grad():
            exact = target.model(torch.cat([ids[row : row + 1, :length], new[row : row + 1]], 1), use_cache=False)
        torch.testing.assert_close(output.logits[row], exact.logits[0, length:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "factor"),
    [
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("hyperclovax", {"logits_scaling": 0.25}),
        ("falcon_h1", {"lm_head_multiplier": 0.25}),
    ],
)
def test_heads_with_a_factor(family: str, factor: dict[str, float]) -> None:
    fields = {key: value for key, value in SMALL.items() if key != "head_dim"} | factor
    fields |= {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8} if family == "falcon_h1" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).eval()
    target = HFTarget(model, tokenizer=None, path=None)
    with torch.no_grad():
        output = model(torch.arange(5)[None], output_hidden_states=True)
        torch.testing.assert_close(target.head(output.hidden_states[-1]), output.logits)


def test_the_head_computes_the_wanted_node_of_each_row_only() -> None:
    target = make("llama")
    tokens = torch.randint(3, 61, (3, 6), generator=torch.Generator().manual_seed(2))
    seen: list[tuple[int, ...]] = []
    watch = target.model.lm_head.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))
    cache, expected = target.new_cache(3, 8), torch.tensor([5, 0, 3])
    whole = target.forward(tokens, chain(tokens).parents, cache)
    some = target.forward(tokens, chain(tokens).parents, cache, (1,), expected)
    target.forward(tokens, chain(tokens).parents, cache)
    watch.remove()
    assert seen == [(3, 6, 32), (3, 1, 32), (3, 6, 32)]
    assert some.logits.shape == (3, 1, 61) and some.hidden_states is not None and some.hidden_states.shape == (3, 6, 32)
    torch.testing.assert_close(some.logits[:, 0], whole.logits[torch.arange(3), expected])
    assert not target.model.lm_head._forward_pre_hooks


def test_recurrent_models_of_other_families_are_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match=r"MambaForCausalLM \(mamba\) .* families bamba, "):
        HFTarget(AutoModelForCausalLM.from_config(config))


WRONG: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": True},
    "gpt_neo": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "jamba": {key: value for key, value in SMALL.items() if key != "head_dim"} | {"mamba_dt_rank": 4, "num_experts": 1},
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 2},
}


@pytest.mark.parametrize("family", WRONG)
def test_families_that_would_answer_wrongly_are_refused_by_name(family: str) -> None:
    config = AutoConfig.for_model(family, **({"vocab_size": 61} | WRONG[family]))
    with pytest.raises(ValueError, match=rf"\({family}\) cannot be a target: its "):
        HFTarget(AutoModelForCausalLM.from_config(config))
    assert family in REFUSED_FAMILIES or family == "falcon"  # whose other models have no ALiBi


def test_load_target_states_its_path_dtype_and_ends(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    assert (target.path, target.dtype, target.num_layers) == (tiny_target_dir, torch.float32, 3)
    assert target.tokenizer is not None and target.eos_token_ids == {target.tokenizer.eos_token_id}
    assert load_target(tiny_target_dir, dtype="bfloat16").dtype == torch.bfloat16


def test_bad_folders_and_dtypes_are_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_target(tmp_path)
    for missing in ("no/such/folder", "/nowhere", "nowhere"):
        with pytest.raises(ValueError, match=f"no folder {missing}"):
            load_target(missing)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        load_target(tiny_target_dir, dtype="int8")
    with pytest.raises(ValueError, match="Device"):
        load_target(tiny_target_dir, device="tpu9")


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    for file in tiny_target_dir.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            del tensors["model.layers.1.mlp.up_proj.weight"]
            save_file(tensors, tmp_path / file.name, metadata={"format": "pt"})
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"lacks 1 tensor .*layers\.1\.mlp\.up_proj"):
        load_target(tmp_path)


def test_a_corrupt_tokenizer_is_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    for file in tiny_target_dir.iterdir():
        (tmp_path / file.name).write_bytes(b"{" if file.name == "tokenizer.json" else file.read_bytes())
    with pytest.raises(ValueError, match=tmp_path.name):
        load_target(tmp_path)


def test_truncated_weights_are_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    for file in tiny_target_dir.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with pytest.raises(ValueError, match="corrupt or cut short"):
        load_target(tmp_path)
