"""Commands with a GGUF file as their target."""

import json
import sys
from pathlib import Path

import pytest
from gguf_writer import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft import cli
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target
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
        "--taps",
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


def test_how_it_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:3000])
    for path, said in ((tmp_path / "cut.gguf", "is corrupt or cut short"), (tmp_path / "absent.gguf", "There is no")):
        assert run(monkeypatch, "generate", "Hello", "--target", path, "--drafter", "none") == 2
        assert said in capsys.readouterr().err
