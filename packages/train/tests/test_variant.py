"""Configuration, initial weights and warm starts, as every variant has them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from copies import copy_with

from blockdraft.drafters import entries, load_drafter
from blockdraft.errors import UsageError
from blockdraft.formats import DrafterTarget, layouts, read_drafter
from blockdraft.models import bundled_drafter, known
from blockdraft.targets import load_target
from blockdraft_tools.export import ExportFormat, export
from blockdraft_tools.gguf.drafters import write_drafter
from blockdraft_train.complaints import Complaints
from blockdraft_train.settings_files import read_settings
from blockdraft_train.variant import Variant, find_variant, variant_names
from blockdraft_train.variants.dflash import DFlashFamily, DFlashRecipe, DFlashVariant

RECIPE = DFlashRecipe(layers=2, target_layers=(0, 1), block_size=8)


def test_configuration_is_the_targets_where_the_recipe_is_silent(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    config = DFlashVariant(RECIPE).config(target)
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        64,
        4,
        2,
        8,
    )
    other = dataclasses.replace(RECIPE, intermediate_size=48, heads=2, kv_heads=1, head_dim=16, window=9, causal=True)
    config = DFlashVariant(other).config(target)
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        48,
        2,
        1,
        16,
    )
    assert {(layer.causal, layer.window) for layer in config.layers} == {(True, 9)}


def test_initial_weights_follow_from_the_seed(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    config = DFlashVariant(RECIPE).config(target)
    before = torch.random.get_rng_state()
    first, second = (DFlashVariant(RECIPE).network(config).state_dict() for _ in range(2))
    other = DFlashVariant(dataclasses.replace(RECIPE, seed=1)).network(config).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("factor", [1, 20])
@pytest.mark.parametrize(
    "name", sorted({*variant_names()} - {"medusa"})
)  # whose heads begin with the target's draft tokens
def test_a_head_of_large_rows_makes_no_firm_draft_tokens_of_a_new_network(
    name: str, factor: float, tiny_target_dir: Path
) -> None:
    target, kind = load_target(tiny_target_dir), find_variant(name)
    recipe = (
        kind.recipe_class(target_layers=(0, 1)) if hasattr(kind.recipe_class, "target_layers") else kind.recipe_class()
    )
    variant, head = kind(recipe), target.head
    target = copy_with(target, head=lambda hidden: factor * head(hidden))
    network = variant.network(variant.config(target))
    before = network.norm.weight.clone()
    variant.fit_head(network, target)
    logits = target.head(network.norm(torch.randn(64, target.hidden_size)).detach())
    assert 0.5 < float(logits.std()) < 2.1
    assert torch.equal(before, network.norm.weight) == (factor == 1)


def test_layers_that_a_checkpoint_lacks_change_nothing_to_begin_with(
    tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    outputs, block = [], torch.randn(1, 8, target.hidden_size)
    for layers in (2, 4):
        variant = DFlashVariant(dataclasses.replace(RECIPE, layers=layers, init=str(tiny_drafter_dir)))
        network = variant.network(variant.config(target))
        outputs.append(network(block, torch.arange(8)[None], lambda layer, queries, keys, values: queries))
        assert sum(parameter.requires_grad for parameter in network.layers[-1].parameters()) > 4
    assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="num_hidden_layers of .* must be that of the recipe and target, 1.*, got 2"):
        variant = DFlashVariant(dataclasses.replace(RECIPE, layers=1, init=str(tiny_drafter_dir)))
        variant.network(variant.config(target))


def test_warm_start_takes_the_weights_and_allows_another_block_size(
    tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    target = load_target(tiny_target_dir)
    recipe = dataclasses.replace(RECIPE, init=str(tiny_drafter_dir), block_size=5)
    variant = DFlashVariant(recipe)
    cold = DFlashVariant(RECIPE)
    config = variant.config(target)
    warm = variant.network(config).state_dict()
    assert not torch.equal(warm["fc.weight"], cold.network(cold.config(target)).state_dict()["fc.weight"])
    with pytest.raises(
        ValueError, match=r"target_layers of .* must be that of the recipe and target, \(0, 2\).*, got \(0, 1\)"
    ):
        DFlashVariant(dataclasses.replace(recipe, target_layers=(0, 2))).network(
            dataclasses.replace(config, target_layers=(0, 2))
        )


def test_warm_start_from_a_gguf_file(tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target_dir)
    checkpoint = read_drafter(tiny_drafter_dir, None, target.num_layers)
    file = tmp_path / "drafter.gguf"
    write_drafter(file, checkpoint, {"tokenizer.ggml.tokens": [f"t{i}" for i in range(target.vocab_size)]}, "f32")
    networks = []
    for init in (tiny_drafter_dir, file):
        recipe = DFlashRecipe(layers=2, target_layers=(0, 1), block_size=8, init=str(init))
        choices = DFlashVariant(recipe).defaults(target, None, complaints := Complaints())
        complaints.check()
        variant = DFlashVariant(dataclasses.replace(recipe, mask_token_id=choices["mask_token_id"].value))
        networks.append(variant.network(variant.config(target)).state_dict())
    assert all(torch.equal(networks[0][name], tensor) for name, tensor in networks[1].items())
    with pytest.raises(UsageError, match="the drafter of .* must be one like DFlash, got 'Eagle3Config'"):
        init = str(bundled_drafter(known("smollm2")))
        other = DFlashRecipe(layers=2, target_layers=(0, 1), mask_token_id=3, init=init)
        DFlashVariant(other).network(DFlashVariant(other).config(target))


@pytest.mark.parametrize("name", [name for name in variant_names() if issubclass(find_variant(name), DFlashFamily)])
def test_every_variant_of_the_family_starts_from_dflash_v1(
    name: str, tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    target = load_target(tiny_target_dir)
    kind = find_variant(name)
    variant = kind(kind.recipe_class(layers=2, target_layers=(0, 1), block_size=8, init=str(tiny_drafter_dir)))
    network = variant.network(variant.config(target))
    v1 = DFlashVariant(dataclasses.replace(RECIPE, init=str(tiny_drafter_dir)))
    tensors = v1.network(v1.config(target)).state_dict()
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_terms_and_gamma() -> None:
    variant = DFlashVariant(DFlashRecipe(objective={"decay": 0.3, "dpace": 0.7}, block_size=16))
    assert dict(variant.factors()) == {"decay": 0.3, "dpace": 0.7}
    assert variant.decayed("decay") and not variant.decayed("dpace")
    assert variant.gamma == 7 and not variant.needs_teacher
    assert DFlashVariant(DFlashRecipe(gamma=0)).gamma is None
    assert DFlashVariant(DFlashRecipe(objective={"forward_kl": 1})).needs_teacher
    assert variant.taught_slots == 15


def test_unknown_variant() -> None:
    with pytest.raises(ValueError, match="'hydra' is unknown; there are dflash"):
        find_variant("hydra")
    assert issubclass(find_variant("dflash"), Variant)


@pytest.mark.parametrize("name", variant_names())
def test_every_variant_trains_a_drafter_that_is_registered_whole(
    name: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Its network is the one registered, and every layout registered holds it and is loaded as that drafter."""
    target, entry = load_target(tiny_target_dir), entries()[name]
    kind = find_variant(name).recipe_class
    flags = {name: value for name, value in (("target_layers", "0,1"), ("layers", "1")) if hasattr(kind, name)}
    variant = find_variant(name)(read_settings(kind, flags=flags))
    config = variant.config(target)
    network = variant.network(config)
    assert type(network) is entry.network and len(entry.layouts) > 0
    for layout in entry.layouts:
        written = ExportFormat(layout, DrafterTarget(str(tiny_target_dir), ("Qwen3ForCausalLM",)))
        export(tmp_path / layout, written, config, variant.saved(network.state_dict()), target)
        assert type(load_drafter(tmp_path / layout, target=target)) is entry.drafter


def test_what_is_registered_is_there() -> None:
    assert {*variant_names()} <= {*entries()}
    for entry in entries().values():
        assert {*entry.layouts} <= {*layouts()}
        assert (entry.network is None) == (entry.drafter is None) == (not entry.layouts)
