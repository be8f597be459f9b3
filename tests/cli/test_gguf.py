"""Commands with a GGUF file as their target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.formats.gguf import open_gguf
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

Run = Callable[..., Any]
MORE = ["--compile", "off", "--device", "cpu"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    write_gguf(path, AutoModelForCausalLM.from_pretrained(tiny_target_dir), "Q4_0", tokenizer, "gpt-2")
    return path


def test_drafts_change_no_answer(file: Path, tiny_drafter_dir: Path) -> None:
    target = load_target(file, device="cpu", compile="off")
    answers = []
    for drafter in ("none", tiny_drafter_dir):
        with Engine(target, load_drafter(drafter, target=target), 2) as engine:
            done = engine.generate(["Hello there", "One, two"], SamplingParams(temperature=0, max_new_tokens=24))
        answers.append([entry.token_ids for entry in done])
    assert answers[0] == answers[1] and len(answers[0][0]) > 1


def test_generate(
    file: Path,
    tiny_drafter_dir: Path,
    blockdraft: Run,
    own_cache: Path,
) -> None:
    args = ["--target", file, "--drafter", tiny_drafter_dir, "--max-new-tokens", 8, "--json", "--compare", *MORE]
    assert (done := blockdraft("generate", "Hello", *args)).code == 0
    report = json.loads(done.out)
    assert report["identical"] and report["running"] == "native, int4 weights"
    assert (done := blockdraft("generate", "Hello", "--target", file, "--max-new-tokens", 8, "--json", *MORE)).code == 0
    assert json.loads(done.out)["token_ids"] == report["token_ids"] and "Using lookup" in done.err


@pytest.mark.slow
def test_data_and_training(
    file: Path,
    tmp_path: Path,
    blockdraft: Run,
    fresh_accelerator: None,
) -> None:
    rows = [json.dumps({"prompt": f"Say {number}."}) for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    data, out = tmp_path / "data", tmp_path / "drafter"
    more = ["--regenerate", "--max-new-tokens", 16, "--out", data, "--device", "cpu"]
    assert blockdraft("data", tmp_path / "prompts.jsonl", "--target", file, *more).code == 0
    sizes = "--steps 1 --layers 1 --target-layers 0,1 --batch 2 --anchors 2 --length 32 --held-out 2"
    more = [*sizes.split(), "--out", out, "--device", "cpu"]
    assert blockdraft("train", "dflash", "--data", data, "--target", file, *more).code == 0
    assert json.loads((out / "config.json").read_text())["num_target_layers"] == 3
    written = ["--format", "speculators", "--out", tmp_path / "else"]
    assert (done := blockdraft("export", out, "--target", file, *written)).code == 2
    assert "readers cannot load" in done.err and not (tmp_path / "else").exists()
    assert blockdraft("export", out, "--target", file, *written, "--target-name", "owner/name").code == 0
    named = json.loads((tmp_path / "else" / "config.json").read_text())["speculators_config"]["verifier"]
    assert named == {"name_or_path": "owner/name", "architectures": ["Qwen3ForCausalLM"]}
    part = ["--draft-vocab", 40, "--out", tmp_path / "part", "--device", "cpu"]  # in a format that names the target
    assert blockdraft("train", "dflash", "--data", data, "--target", file, *sizes.split(), *part).code == 0
    drafter: Any = load_drafter(tmp_path / "part", target=load_target(file, device="cpu"))
    assert len(drafter.reduced_head.kept) == 40


@pytest.mark.slow
def test_inspect_and_doctor(
    file: Path,
    tiny_drafter_dir: Path,
    blockdraft: Run,
    own_cache: Path,
) -> None:
    assert (done := blockdraft("inspect", file)).code == 0
    fingerprint = load_target(file, device="cpu", compile="off").source_fingerprint
    assert fingerprint is not None and fingerprint in done.out
    assert (done := blockdraft("doctor", "--target", file, "--drafter", tiny_drafter_dir)).code == 1
    assert "not trained" in " ".join(done.out.split())


def test_export_leaves_its_file(
    file: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    blockdraft: Run,
) -> None:
    """The drafter for llama.cpp has the tokenizer of the target's own file."""
    before, out = file.read_bytes(), tmp_path / "out"
    args = ["--target", file, "--format", "gguf", "--type", "f32", "--out", out]
    assert (done := blockdraft("export", tiny_drafter_dir, *args)).code == 0
    assert f"-m {file} -md {out}/drafter-f32.gguf" in done.err
    assert [path.name for path in out.iterdir()] == ["drafter-f32.gguf"] and file.read_bytes() == before
    drafter, target = (open_gguf(path).metadata for path in (out / "drafter-f32.gguf", file))
    own = {key for key in target if key.startswith("tokenizer.")}
    assert own and {key: drafter[key] for key in own} == {key: target[key] for key in own}
    assert blockdraft("export", tiny_drafter_dir, *args[:-1], tmp_path / "small", "--no-tokenizer").code == 0
    assert (tmp_path / "small/drafter-f32.gguf").stat().st_size < (out / "drafter-f32.gguf").stat().st_size
    loaded = load_target(file, device="cpu", compile="off")
    for folder in (out, tmp_path / "small"):
        with Engine(loaded, load_drafter(folder / "drafter-f32.gguf", target=loaded), 2) as engine:
            assert engine.generate(["Hello"], SamplingParams(temperature=0, max_new_tokens=8))[0].token_ids
    done = blockdraft("export", tiny_drafter_dir, *args[:2], "--no-tokenizer", "--out", tmp_path / "folder")
    assert done.code == 2 and "--no-tokenizer goes with --format gguf" in done.err


def test_quantize_and_convert_a_file(
    file: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
    blockdraft: Run,
) -> None:
    """`quantize` rounds files of floats alone, and `diffusion convert` takes any file."""
    whole = tmp_path / "whole.gguf"
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    write_gguf(whole, model, "F16", AutoTokenizer.from_pretrained(tiny_target_dir), "gpt-2")
    assert blockdraft("quantize", whole, "--out", tmp_path / "few").code == 0
    few, own = (load_target(path, device="cpu", compile="off") for path in (tmp_path / "few", whole))
    assert few.running == "native, int4 weights" and few.tokenizer is not None and own.tokenizer is not None
    assert few.tokenizer("Hello there").input_ids == own.tokenizer("Hello there").input_ids
    assert few.source_fingerprint == own.source_fingerprint
    assert (done := blockdraft("quantize", file, "--out", tmp_path / "twice")).code == 2
    assert "m.gguf is quantized already (Q4_0)" in done.err and not (tmp_path / "twice").exists()
    assert blockdraft("diffusion", "convert", file, "--out", tmp_path / "diffusion", "--block-size", 4).code == 0
    assert blockdraft("diffusion", "generate", "--model", tmp_path / "diffusion", "Hello").code == 0


def test_bad_files_are_refused(file: Path, tmp_path: Path, blockdraft: Run) -> None:
    assert f"blockdraft fit --target {file} --out DIR" in blockdraft("generate", "Hello", "--target", file).err
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:3000])
    for path, message in (
        (tmp_path / "cut.gguf", "is corrupt or cut short"),
        (tmp_path / "absent.gguf", "There is no"),
    ):
        done = blockdraft("generate", "Hello", "--target", path, "--drafter", "none")
        assert done.code == 2 and message in done.err
