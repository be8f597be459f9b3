"""The command `train`: its options and the recipe's."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockdraft.cli import app
from blockdraft.cli.display import progress
from blockdraft.cli.train import split_flags
from blockdraft.formats.speculators import recognises
from blockdraft.settings import read_settings
from blockdraft.training.variants.dflash import DFlashRecipe

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


def test_recipe_fields_are_told_from_options() -> None:
    arguments = ["dflash", "r.toml", "--out", "x", "--layers", "3", "--learning-rate=1e-3", "--show-recipe"]
    own, fields = split_flags(arguments, {"--out", "--show-recipe"})
    assert own == ["dflash", "r.toml", "--out", "x", "--show-recipe"]
    assert fields == {"layers": "3", "learning-rate": "1e-3"}
    with pytest.raises(ValueError, match="--layers has no value"):
        split_flags(["dflash", "--layers"], {"--out"})


def test_progress_of_one_stage_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("done") as tell:
        for stage in ("features", "steps"):
            for done in range(1, 21):
                tell(stage, done, 20)
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("features: ") for line in lines) == 10
    assert sum(line.startswith("steps: ") for line in lines) == 10


def test_show_recipe_is_a_recipe(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "dflash", "--layers", "3", "--taps", "1,2", "--show-recipe"])
    assert result.exit_code == 0
    assert "# Draft layers; None is 5, or as many as the drafter has that `init` names.\nlayers = 3\n" in result.output
    (tmp_path / "r.toml").write_text(result.output)
    assert read_settings(DFlashRecipe, tmp_path / "r.toml") == DFlashRecipe(layers=3, taps=(1, 2))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dflash", "--layer", "3"], "'layer' is unknown; did you mean layers"),
        (["dlfash"], "'dlfash' is unknown; there are dflash"),
        (["dflash", "--out", "x"], "--data is missing"),
        (["dflash", "--out", "x", "--data", "nowhere"], "give a folder made by `blockdraft data`"),
        (["dflash", "--out", "x", "--data", "y", "--format", "gguf"], "format is 'gguf'"),
        (["dflash", "nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_bad_input(arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *arguments])
    assert isinstance(result.exception, ValueError) and told in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("written", ["speculators", pytest.param("zlab", marks=pytest.mark.slow)])
def test_a_run_ends_with_a_table_and_the_command(
    written: str, tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    fields = {
        "layers": 1,
        "taps": 1,
        "block-size": 4,
        "length": 40,
        "batch": 2,
        "anchors": 3,
        "steps": 2,
        "held-out": 4,
    }
    fields |= {"eval-prompts": 1, "eval-tokens": 4}
    flags = [f"--{name}={value}" for name, value in fields.items()]
    flags += ["--device", "cpu", "--trackers", "", "--data", str(tiny_data_dir), "--out", str(tmp_path / "drafter")]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    flags += ["--target", str(tiny_target_dir), "--prompts", str(tmp_path / "prompts.jsonl")]
    result = CliRunner().invoke(app, ["train", "dflash", *flags, "--format", written])
    assert result.exit_code == 0, result.exception
    assert "accepted length" in result.output
    assert f"blockdraft generate --target {tiny_target_dir} --drafter {tmp_path / 'drafter'} PROMPT" in result.output
    assert recognises(tmp_path / "drafter") == (written == "speculators")

    # Asked again in the other format, the finished run writes that.
    other = "zlab" if written == "speculators" else "speculators"
    result = CliRunner().invoke(app, ["train", "dflash", *flags, "--format", other])
    assert result.exit_code == 0, result.exception
    assert recognises(tmp_path / "drafter") == (other == "speculators")
