"""Recipes from files and flags."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from blockdraft.training.recipe import Recipe, as_toml, explain, read_recipe
from blockdraft.training.variants import find_variant, variant_names


@dataclass(frozen=True)
class OwnRecipe(Recipe):
    """Attributes:
    rank: Width of something,
        in channels.
    """

    rank: int = 8


def test_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('layers = 3\nlearning_rate = 1\ntaps = [1, 2]\nobjective = {decay = 1, dpace = 0.5}\ninit = "x"\n')
    recipe = read_recipe(Recipe, file, {"layers": "4", "compile": "true", "gamma": "2.5", "init": "none"})
    assert (recipe.layers, recipe.learning_rate, recipe.taps, recipe.compile, recipe.gamma) == (
        4,
        1.0,
        (1, 2),
        True,
        2.5,
    )
    assert dict(recipe.objective) == {"decay": 1.0, "dpace": 0.5} and recipe.init is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("taps", "3", 3),
        ("taps", "1,9,17", (1, 9, 17)),
        ("learning-rate", "6e-4", 6e-4),
        ("objective", "dpace=0.5,forward_kl=0.5", {"dpace": 0.5, "forward_kl": 0.5}),
        ("schedule", "wsd", "wsd"),
        ("steps", "none", None),
        ("trackers", "", ()),
    ],
)
def test_flags(name: str, text: str, value: object) -> None:
    assert getattr(read_recipe(Recipe, None, {name: text}), name.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"learnin_rate": "1"}, "no key 'learnin_rate'; the nearest one is 'learning_rate'"),
        ({"layers": "two"}, "layers is 'two'; it must be a whole number"),
        ({"layers": "0"}, "layers is 0; it must be at least 1"),
        ({"schedule": "step"}, "schedule is 'step'; it must be 'cosine' or 'linear' or 'wsd'"),
        ({"warmup": "2"}, "warmup is 2.0; it is a share"),
        ({"objective": "decay=0"}, "not all 0"),
        ({"objective": "decay=-1,dpace=1"}, "weights of 0 or more"),
        ({"batch": "6", "accumulation": "4"}, "batch is 6; it must be a multiple of accumulation, 4"),
        ({"learning_rate": "nan"}, "learning_rate is nan"),
        ({"compile": "yes"}, "compile is 'yes'; it must be true or false"),
    ],
)
def test_bad_flags(flags: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_recipe(Recipe, None, flags)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layers = 2.5", "layers is 2.5"),
        ("compile = 1", "compile is 1"),
        ("layers = true", "layers is True"),
        ("layer = 2", "nearest one is 'layers'"),
        ("layers = ", "cannot be read as a recipe"),
        ("taps = [1, 'a']", "taps is 'a'"),
    ],
)
def test_bad_files(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=told):
        read_recipe(Recipe, tmp_path / "r.toml")


@pytest.mark.parametrize("explained", [True, False])
def test_what_is_written_is_read_again(explained: bool, tmp_path: Path) -> None:
    recipe = OwnRecipe(taps=(1, 2), init='a "b" \\c', objective={"dpace": 0.5}, gamma=None, rank=3, weight_decay=1e-5)
    (tmp_path / "r.toml").write_text(as_toml(recipe, explained))
    assert read_recipe(OwnRecipe, tmp_path / "r.toml") == recipe


def test_own_fields_have_their_explanation() -> None:
    assert explain(OwnRecipe, "rank") == "Width of something, in channels."
    assert explain(OwnRecipe, "layers") == "Draft layers."


@pytest.mark.parametrize("name", variant_names())
def test_every_field_of_every_variant_is_explained(name: str) -> None:
    kind = find_variant(name).recipe_class
    assert all(explain(kind, field.name) for field in fields(kind))
