"""The command `train`: its options and the recipe's."""

from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from blockdraft.cli import app, display
from blockdraft.formats import find_layout, layout_of, read_config
from blockdraft_train.settings_files import read_settings
from blockdraft_train.variants.dflash import DFlashRecipe

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A line where each stage begins and ends."""
    with display.progress("done") as tell:
        for stage in ("hidden_states", "loss 2.5"):
            for done in range(1, 21):
                tell(stage, done, 20)
        tell("silent", 0, 20)
    assert capsys.readouterr().err.splitlines() == [
        "hidden_states: 1 of 20 done, about 0 s left",
        "hidden_states: 20 of 20 done",
        "loss 2.5: 1 of 20 done, about 0 s left",
        "loss 2.5: 20 of 20 done",
        "silent: 0 of 20 done",
    ]


def test_show_recipe_is_a_recipe(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "dflash", "--layers", "3", "--target-layers", "1,2", "--show-recipe"])
    assert result.exit_code == 0
    line = "# Number of draft layers; by default 5, or that of the drafter in `init`."
    assert f"{line}\nlayers = 3\n" in result.output
    (tmp_path / "r.toml").write_text(result.output)
    assert read_settings(DFlashRecipe, tmp_path / "r.toml") == DFlashRecipe(layers=3, target_layers=(1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dflash", "--layer", "3"], "--layer is unknown; did you mean layers"),
        (["dflash", "--layers"], "--layers has no value"),
        (["dlfash"], "'dlfash' is unknown; there are dflash"),
        (["dflash", "--out", "x"], "--data is missing"),
        (["dflash", "--out", "x", "--data", "nowhere"], "give a folder made by `blockdraft data`"),
        (["dflash", "--out", "x", "--data", "y", "--format", "gguf"], "format must be one of"),
        (["dflash", "nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *arguments])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_all_errors_are_reported_before_the_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--target /no/such --data a --prompts b --hidden-states c --init d --objective decay=1,e=1,f=1"
    message = str(CliRunner().invoke(app, ["train", "dflash", "--out", "x", *options.split()]).exception)
    assert message.startswith("6 things do not fit") and message.count("\n") == 6
    places = "a/data.json", "b cannot", "c/hidden_states.json", "d is no drafter"
    for entry in (*places, "'e' is unknown", "'f' is unknown"):
        assert entry in message


@pytest.mark.parametrize("name", ["target.gguf", "README.md"])
def test_files_to_begin_with_are_refused_before_the_target_is_loaded(
    name: str, tmp_path: Path, tiny_data_dir: Path
) -> None:
    (tmp_path / name).write_text("# Models")
    if name.endswith("gguf"):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    words = ["train", "dflash", "--out", str(tmp_path / "x"), "--data", str(tiny_data_dir), "--target", "/no/such"]
    message = str(CliRunner().invoke(app, [*words, "--init", str(tmp_path / name)]).exception)
    assert message.startswith(f"{tmp_path / name} is ")
    assert (
        "is no drafter: its architecture is llama" if name.endswith("gguf") else "is a file; give a folder"
    ) in message


def test_a_drafter_to_begin_with_may_have_a_name(tmp_path: Path, tiny_data_dir: Path, tiny_target_dir: Path) -> None:
    """Those that the name means are read before the data, which are of another tokenizer than the bundled one's."""
    words = ["train", "dflash", "--out", str(tmp_path / "x"), "--data", str(tiny_data_dir)]
    for target, message in ((str(tiny_target_dir), "No drafter is bundled for"), ("bundled", f"{tiny_data_dir} ")):
        result = CliRunner().invoke(app, [*words, "--target", target, "--init", "bundled"])
        assert str(result.exception).startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize("written", ["speculators", "zlab"])
def test_a_run_ends_with_a_table_and_the_command(
    written: str, tmp_path: Path, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    sizes = "--layers 1 --target-layers 1 --block-size 4 --length 40 --batch 2 --anchors 3 --steps 2 --held-out 4"
    flags = f"{sizes} --eval-prompts 1 --eval-tokens 4".split()
    flags += ["--device", "cpu", "--trackers", "", "--data", str(tiny_data_dir), "--out", str(tmp_path / "drafter")]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    flags += ["--target", str(tiny_target_dir), "--prompts", str(tmp_path / "prompts.jsonl")]
    result = CliRunner().invoke(app, ["train", "dflash", *flags, "--format", written])
    assert result.exit_code == 0, result.exception
    assert "accepted length" in result.output
    assert f"blockdraft generate --target {tiny_target_dir} --drafter {tmp_path / 'drafter'} PROMPT" in result.output
    assert layout_of(read_config(tmp_path / "drafter")) is find_layout(written)

    # Asked again in the other format, the finished run writes that.
    other = "zlab" if written == "speculators" else "speculators"
    result = CliRunner().invoke(app, ["train", "dflash", *flags, "--format", other])
    assert result.exit_code == 0, result.exception
    assert layout_of(read_config(tmp_path / "drafter")) is find_layout(other)
