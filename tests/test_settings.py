"""Settings from files, flags and Python, on recipes of training."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import (
    Count,
    Flag,
    Layers,
    SettingsError,
    from_text,
    settings,
)
from blockdraft_train.data.settings import RecordSettings
from blockdraft_train.settings_files import as_text, as_toml, describe, read_settings
from blockdraft_train.variants.dflash import DFlashRecipe


@settings
class OwnRecipe(DFlashRecipe):
    rank: int = Field(8, description="Width of something, in channels.")
    layers: Count | None = 2


@settings
class Needy:
    rank: int


@settings
class Flagged:
    layers: Annotated[Count | Layers | None, Flag("--of-layers")] = None


def test_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    lines = (
        "layers = 3",
        "learning_rate = 1",
        "target_layers = [1, 2]",
        "objective = {decay = 1, dpace = 0.5}",
        'init = "x"',
    )
    file.write_text("\n".join(lines))
    recipe = read_settings(DFlashRecipe, file, {"layers": "4", "compile": "true", "gamma": "2.5", "init": "none"})
    assert (recipe.layers, recipe.learning_rate, recipe.target_layers, recipe.compile, recipe.gamma) == (
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
        ("target_layers", "3", 3),
        ("target_layers", "1,9,17", (1, 9, 17)),
        ("learning-rate", "6e-4", 6e-4),
        ("objective", "dpace=0.5,forward_kl=0.5", {"dpace": 0.5, "forward_kl": 0.5}),
        ("schedule", "wsd", "wsd"),
        ("steps", "none", None),
        ("trackers", "", ()),
        ("qat-bits", "4", 4),
    ],
)
def test_flags(name: str, text: str, value: object) -> None:
    assert getattr(read_settings(DFlashRecipe, None, {name: text}), name.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learnin_rate": "1"}, "^--learnin-rate is unknown; did you mean learning_rate"),
        ({"zzz": "1"}, "--zzz is unknown; leave it out"),
        ({"layers": "two"}, "--layers must be a whole number, got 'two'"),
        ({"layers": "0"}, "--layers must be at least 1, got '0'"),
        ({"schedule": "step"}, "--schedule must be 'cosine', 'linear' or 'wsd', got 'step'"),
        ({"warmup": "2"}, "--warmup must be at most 1, got '2'"),
        ({"objective": "decay=-1,dpace=1"}, "--objective must be at least 0, got 'decay=-1,dpace=1'"),
        ({"learning_rate": "nan"}, "--learning-rate must be at least 0, got 'nan'"),
        ({"qat_bits": "5"}, "--qat-bits must be 4 or 8, got '5'"),
        ({"compile": "perhaps"}, "--compile must be true or false, got 'perhaps'"),
    ],
)
def test_bad_flags(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(DFlashRecipe, None, flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = 2.5", r"r\.toml: layers must be a whole number, got 2\.5"),
        ("compile = 1", "compile must be true or false, got 1"),
        ("objective = {decay = 'x'}", r"objective\[decay\] must be a number, got 'x'\."),
        ("target_layers = true", "target_layers must be a whole number or a list, got True"),
        ("learning_rate = inf", "learning_rate must be a finite number, got inf"),
        ("layers = true", "layers must be a whole number, got True"),
        ("layer = 2", r"r\.toml: layer is unknown; did you mean layers"),
        ("target_layers = []", r"target_layers must be a whole number or a list that is not empty"),
        ("layers = ", "cannot be read"),
        ("target_layers = [1, 'a']", r"r\.toml: target_layers\[1\] must be a whole number, got 'a'\."),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(DFlashRecipe, tmp_path / "r.toml")


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("final = 2.0\nepochs = 0\n")
    flags = {"gamma": "x", "epochs": "y", "block-size": "1", "nonsense": "3"}
    with pytest.raises(SettingsError) as caught:
        read_settings(DFlashRecipe, tmp_path / "r.toml", flags)
    assert set(caught.value.problems) == {"final", "gamma", "epochs", "block_size", "nonsense"}
    assert "r.toml: final must be at most 1, got 2.0" in str(caught.value) and "--epochs must be" in str(caught.value)


def test_flag_overrides_an_invalid_value_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("layers = 0\nbatch = 6")
    assert read_settings(DFlashRecipe, tmp_path / "r.toml", {"layers": "2"}).layers == 2
    with pytest.raises(ValueError, match="^batch must be a multiple of accumulation, 4.*, got 6"):
        read_settings(DFlashRecipe, tmp_path / "r.toml", {"layers": "2", "accumulation": "4"})


def test_values_from_python_are_checked() -> None:
    assert DFlashRecipe(target_layers=[0, 1]).target_layers == (0, 1)  # type: ignore[arg-type]
    assert RecordSettings("test", None, 3).limit == 3
    with pytest.raises(UsageError, match="limit must be at least 1, got 0"):
        RecordSettings("test", None, 0)
    with pytest.raises(UsageError, match="9 is one argument too many"):
        RecordSettings("test", None, 3, None, None, None, 9)  # type: ignore[call-arg]
    for message, wrong in (
        ("layers must be at least 1, got 0", {"layers": 0}),
        ("layer is unknown; did you mean layers", {"layer": 1}),
        ("final must be at most 1, got 2. layers must be a whole number, got 'x'", {"layers": "x", "final": 2}),
    ):
        with pytest.raises(UsageError, match=message):
            DFlashRecipe(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rank is missing"):
        Needy()  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="layers must be"):
        replace(DFlashRecipe(), layers=0)


@pytest.mark.parametrize("described", [True, False])
def test_written_settings_are_read_again(described: bool, tmp_path: Path) -> None:
    recipe = OwnRecipe(
        target_layers=(1, 2), init='a "b" \\c', objective={"dpace": 0.5}, gamma=None, rank=3, weight_decay=1e-5
    )
    (tmp_path / "r.toml").write_text(as_toml(recipe, described))
    assert read_settings(OwnRecipe, tmp_path / "r.toml") == recipe


def test_fields_have_a_description_which_a_new_default_keeps() -> None:
    assert describe(OwnRecipe, "rank") == "Width of something, in channels."
    assert describe(OwnRecipe, "layers") == describe(DFlashRecipe, "layers") != ""


def test_a_number_alone_is_a_count_and_with_a_comma_a_list() -> None:
    assert from_text(Flagged, "layers", "5") == 5 and from_text(Flagged, "layers", "5,") == (5,)
    with pytest.raises(UsageError, match="layers must be at least 1 or a list, got '0'"):
        from_text(Flagged, "layers", "0")
    assert [as_text(value) for value in (5, (5,), (5, 6), {"decay": 0.5})] == ["5", "5,", "5,6", "decay=0.5"]


@settings
class Texts:
    text: str = ""
    table: Mapping[str, str] = Field(default_factory=dict)


@pytest.mark.parametrize(
    "text", ["a\nb", "\x00\x1b\x7f\t", 'quote " and \\\\ backslash', "\u2028\x85", "\U0001f600", "\\u0041"]
)
def test_any_text_is_read_again_from_toml(tmp_path: Path, text: str) -> None:
    made = Texts(text, {text: text, "a b": "c"})
    (tmp_path / "a.toml").write_text(as_toml(made), encoding="utf-8", newline="")
    assert read_settings(Texts, tmp_path / "a.toml") == made
