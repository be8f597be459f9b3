"""Commands with a GGUF file as their target."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft import cli
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.formats.gguf import open_gguf
from blockdraft.targets import load_target
from blockdraft.tools.fit import run as fit_run
from blockdraft.types import SamplingParams

MORE = ["--compile", "off", "--device", "cpu"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    write_gguf(path, AutoModelForCausalLM.from_pretrained(tiny_target_dir), "Q4_0", tokenizer, "gpt-2")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["blockdraft", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_drafts_change_no_answer(file: Path, tiny_drafter_dir: Path) -> None:
    target = load_target(file, device="cpu", compile="off")
    answers = []
    for drafter in ("none", tiny_drafter_dir):
        with Engine(target, load_drafter(drafter, target=target), 2) as engine:
            done = engine.generate(["Hello there", "One, two"], SamplingParams(temperature=0, max_new_tokens=24))
        answers.append([one.token_ids for one in done])
    assert answers[0] == answers[1] and len(answers[0][0]) > 1


def test_generate(
    file: Path,
    tiny_drafter_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_cache: Path,
) -> None:
    args = ["--target", file, "--drafter", tiny_drafter_dir, "--max-new-tokens", 8, "--json", "--compare", *MORE]
    assert run(monkeypatch, "generate", "Hello", *args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] and found["running"] == "native, int4 weights"
    assert run(monkeypatch, "generate", "Hello", "--target", file, "--max-new-tokens", 8, "--json", *MORE) == 0
    done = capsys.readouterr()
    assert json.loads(done.out)["token_ids"] == found["token_ids"] and "lookup drafts" in done.err


@pytest.mark.slow
def test_data_and_training(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fresh_accelerator: None,
) -> None:
    rows = [json.dumps({"prompt": f"Say {number}."}) for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    data, out = tmp_path / "data", tmp_path / "drafter"
    more = ["--regenerate", "--max-new-tokens", 16, "--out", data, "--device", "cpu"]
    assert run(monkeypatch, "data", tmp_path / "prompts.jsonl", "--target", file, *more) == 0
    sizes = [
        "--steps",
        1,
        "--layers",
        1,
        "--target-layers",
        "0,1",
        "--batch",
        2,
        "--anchors",
        2,
        "--length",
        32,
        "--held-out",
        2,
    ]
    assert (
        run(monkeypatch, "train", "dflash", "--data", data, "--target", file, *sizes, "--out", out, "--device", "cpu")
        == 0
    )
    assert json.loads((out / "config.json").read_text())["num_target_layers"] == 3
    capsys.readouterr()
    written = ["--format", "speculators", "--out", tmp_path / "else"]
    assert run(monkeypatch, "export", out, "--target", file, *written) == 2
    assert "readers cannot load" in capsys.readouterr().err and not (tmp_path / "else").exists()
    assert run(monkeypatch, "export", out, "--target", file, *written, "--target-name", "owner/name") == 0
    named = json.loads((tmp_path / "else" / "config.json").read_text())["speculators_config"]["verifier"]
    assert named == {"name_or_path": "owner/name", "architectures": ["Qwen3ForCausalLM"]}
    part = ["--draft-vocab", 40, "--out", tmp_path / "part", "--device", "cpu"]  # in a format that names the target
    assert run(monkeypatch, "train", "dflash", "--data", data, "--target", file, *sizes, *part) == 0
    drafter: Any = load_drafter(tmp_path / "part", target=load_target(file, device="cpu"))
    assert len(drafter.reduced_head.kept) == 40


@pytest.mark.slow
def test_looking_at_it(
    file: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_cache: Path,
) -> None:
    assert run(monkeypatch, "inspect", file) == 0
    fingerprint = load_target(file, device="cpu", compile="off").source_fingerprint
    assert fingerprint is not None and fingerprint in capsys.readouterr().out
    assert run(monkeypatch, "doctor", "--target", file, "--drafter", tiny_drafter_dir) == 1
    assert "not trained" in " ".join(capsys.readouterr().out.split())
    assert run(monkeypatch, "push", tiny_drafter_dir, "--target", file, "--out", tmp_path / "repository") == 0
    assert "# A drafter for m.gguf" in (tmp_path / "repository" / "README.md").read_text()


def test_export_leaves_its_file(
    file: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The drafter for llama.cpp has the tokenizer of the target's own file."""
    before, out = file.read_bytes(), tmp_path / "out"
    args = ["--target", file, "--format", "gguf", "--type", "f32", "--out", out]
    assert run(monkeypatch, "export", tiny_drafter_dir, *args) == 0
    assert f"-m {file} -md {out}/drafter-f32.gguf" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["drafter-f32.gguf"] and file.read_bytes() == before
    drafter, target = (open_gguf(path).metadata for path in (out / "drafter-f32.gguf", file))
    own = {key for key in target if key.startswith("tokenizer.")}
    assert own and {key: drafter[key] for key in own} == {key: target[key] for key in own}
    loaded = load_target(file, device="cpu", compile="off")
    with Engine(loaded, load_drafter(out / "drafter-f32.gguf", target=loaded), 2) as engine:
        assert engine.generate(["Hello"], SamplingParams(temperature=0, max_new_tokens=8))[0].token_ids


def test_made_into_a_folder(
    file: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`quantize` rounds files of floats alone, and `diffusion convert` takes any file."""
    whole = tmp_path / "whole.gguf"
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    write_gguf(whole, model, "F16", AutoTokenizer.from_pretrained(tiny_target_dir), "gpt-2")
    assert run(monkeypatch, "quantize", whole, "--out", tmp_path / "few") == 0
    few, own = (load_target(path, device="cpu", compile="off") for path in (tmp_path / "few", whole))
    assert few.running == "native, int4 weights" and few.tokenizer is not None and own.tokenizer is not None
    assert few.tokenizer("Hello there").input_ids == own.tokenizer("Hello there").input_ids
    assert few.source_fingerprint == own.source_fingerprint
    capsys.readouterr()
    assert run(monkeypatch, "quantize", file, "--out", tmp_path / "twice") == 2
    assert "m.gguf is quantized already (Q4_0)" in capsys.readouterr().err and not (tmp_path / "twice").exists()
    assert run(monkeypatch, "diffusion", "convert", file, "--out", tmp_path / "diffusion", "--block-size", 4) == 0
    assert run(monkeypatch, "diffusion", "generate", "--model", tmp_path / "diffusion", "Hello") == 0


def test_fit_takes_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can be refused before anything slow is not."""
    asked: list[object] = []
    monkeypatch.setattr(fit_run, "load_target", lambda path, *_, **__: asked.append(path) or pytest.exit("loading"))
    args = ["--target", file, "--out", tmp_path / "drafter"]
    with pytest.raises(pytest.exit.Exception, match="loading"):
        run(monkeypatch, "fit", *args)
    assert asked == [str(file)]
    assert run(monkeypatch, "generate", "Hello", "--target", file) == 2
    assert f"blockdraft fit --target {file} --out DIR" in capsys.readouterr().err


def test_how_it_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:3000])
    for path, said in ((tmp_path / "cut.gguf", "is corrupt or cut short"), (tmp_path / "absent.gguf", "There is no")):
        assert run(monkeypatch, "generate", "Hello", "--target", path, "--drafter", "none") == 2
        assert said in capsys.readouterr().err
