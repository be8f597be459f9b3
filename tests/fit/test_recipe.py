from dataclasses import replace

import pytest

from blockdraft.fit.facts import Speeds, TargetFacts
from blockdraft.fit.recipe import VARIANTS, expected_speedup, reference, taps
from blockdraft.settings import read_settings
from blockdraft.training.variant import find_variant

TARGET = TargetFacts(28, 1024, 150_000, 32_768, True, 2**30, "native")


@pytest.mark.parametrize("layers", range(1, 81))
def test_taps_are_layers_of_the_target(layers: int) -> None:
    found = taps(layers)
    assert 1 <= len(found) <= 5 and sorted(set(found)) == list(found)
    assert found[0] >= 0 and found[-1] < layers


def test_taps_of_usual_targets() -> None:
    of_few, of_qwen3_8b = taps(2), taps(36)
    assert of_few == (0, 1)
    assert of_qwen3_8b == (1, 9, 17, 25, 33)  # as z-lab's drafter has them


@pytest.mark.parametrize("layers", [1, 2, 6, 28, 80])
@pytest.mark.parametrize("hidden_size", [160, 200, 1024, 5120])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_chosen_is_a_recipe(variant: str, layers: int, hidden_size: int) -> None:
    fields = reference(variant, replace(TARGET, layers=layers, hidden_size=hidden_size))
    recipe = find_variant(variant).recipe_class(**fields)
    assert 1 <= recipe.layers <= 5
    if variant == "dflash2":
        assert hidden_size % recipe.conv_group_size == 0
    assert read_settings(type(recipe)) != recipe


def speeds(cost: float, seconds: float = 1.0) -> Speeds:
    return Speeds((1000, 4000), (seconds / 4, seconds), {2: cost, 4: cost, 8: cost}, 1_000_000)


def test_a_drafter_is_worth_what_it_accepts_over_what_it_costs() -> None:
    """DFlash2 accepts a quarter more; where its cycles cost that or it learns much slower, it is not worth it."""
    alike = {"dflash": speeds(1.2), "dflash2": speeds(1.2)}
    dear = {"dflash": speeds(1.2), "dflash2": speeds(1.6)}
    slow = {"dflash": speeds(1.2), "dflash2": speeds(1.2, seconds=10.0)}
    assert expected_speedup("dflash2", alike) > expected_speedup("dflash", alike)
    assert expected_speedup("dflash2", dear) < expected_speedup("dflash", dear)
    assert expected_speedup("dflash2", slow) < expected_speedup("dflash", slow)
    assert expected_speedup("dflash", alike) == pytest.approx(2.25 / 1.2, rel=0.05)


def test_the_best_block_size_counts() -> None:
    costs = {2: 1.0, 4: 2.0, 8: 9.0}
    one = Speeds((1000, 4000), (0.5, 1.0), costs, 1)
    assert expected_speedup("dflash", {"dflash": one}) == pytest.approx(1 + 1 - 1 / 2.3)
