"""`blockdraft export` on tiny models: what it writes, and how it refuses."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.formats import Borrowed, Checkpoint, DrafterTarget, read_drafter, speculators, zlab
from blockdraft.formats.trained import Trained
from blockdraft.serving.backends import weights_of
from blockdraft.targets import Target, embedding_and_head, load_target
from blockdraft.types import SamplingParams

Run = Callable[..., tuple[int, str]]
PROMPT = [7, 60, 33, 12, 9]


@pytest.fixture
def export(blockdraft: Callable[..., Any], tiny_target_dir: Path) -> Run:
    """Runs `blockdraft export` for the tiny target and returns the exit code and errors."""

    def run(*args: object) -> tuple[int, str]:
        done = blockdraft("export", "--target", tiny_target_dir, *args)
        return done.code, done.err

    return run


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def drafted(folder: Path, target: Target) -> tuple[list[int], list[int]]:
    """The answer, and how it came about step by step."""
    [completion] = Engine(target, load_drafter(folder, target=target)).generate([PROMPT], SamplingParams(24))
    return completion.token_ids, completion.stats.committed


@pytest.mark.parametrize("name", ["tiny_drafter_dir", "tiny_dspark_dir"])
def test_zlab_to_speculators_and_back(
    export: Run,
    tmp_path: Path,
    target: Target,
    tiny_target_dir: Path,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    source = request.getfixturevalue(name)
    code, err = export(source, "--format", "speculators", "--out", tmp_path / "there")
    assert code == 0 and "MB in the speculators format" in err
    raw = json.loads((tmp_path / "there" / "config.json").read_text())
    verifier = raw["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(tiny_target_dir.resolve()), "architectures": ["Qwen3ForCausalLM"]}
    own = read_drafter(tmp_path / "there", None, target.num_layers).borrowed
    weights = load_file(tiny_target_dir / "model.safetensors")
    assert (
        own is not None
        and own.embedding is not None
        and torch.equal(own.embedding, weights["model.embed_tokens.weight"])
    )
    assert own.head is not None and torch.equal(own.head, weights["lm_head.weight"])
    assert export(tmp_path / "there", "--out", tmp_path / "back")[0] == 0
    (config, tensors), (again, others) = zlab.read_checkpoint(source), zlab.read_checkpoint(tmp_path / "back")
    assert config == again and all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert drafted(source, target) == drafted(tmp_path / "there", target) == drafted(tmp_path / "back", target)


def test_eagle3_to_speculators_and_back(export: Run, tmp_path: Path, target: Target, tiny_eagle3_dir: Path) -> None:
    assert export(tiny_eagle3_dir, "--format", "eagle3_speculators", "--out", tmp_path / "there")[0] == 0
    assert export(tmp_path / "there", "--format", "eagle3", "--out", tmp_path / "back")[0] == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tiny_eagle3_dir, tmp_path / "back"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    answers = [drafted(folder, target)[0] for folder in (tiny_eagle3_dir, tmp_path / "there", tmp_path / "back")]
    assert answers[0] == answers[1] == answers[2]
    code, err = export(tiny_eagle3_dir, "--format", "zlab", "--out", tmp_path / "zlab")
    assert code == 2 and "Formats that hold it: eagle3, eagle3_speculators" in err
    assert not (tmp_path / "zlab").exists()


def test_eagle3_as_gguf(
    export: Run,
    tmp_path: Path,
    eagle3_of_three_target_layers: Path,
    tiny_target_dir: Path,
) -> None:
    out = tmp_path / "out"
    code, err = export(eagle3_of_three_target_layers, "--format", "gguf", "--type", "f32", "--out", out)
    assert code == 0 and f"-md {out}/drafter-f32.gguf --spec-type draft-eagle3 --spec-draft-n-max 5" in err
    folder, file = load_target(tiny_target_dir), load_target(out / "target-f32.gguf")
    assert drafted(eagle3_of_three_target_layers, folder) == drafted(out / "drafter-f32.gguf", file)
    assert export(out / "drafter-f32.gguf", "--out", tmp_path / "back")[0] == 0  # in the layout of its kind
    ours, theirs = (
        load_file(path / "model.safetensors") for path in (eagle3_of_three_target_layers, tmp_path / "back")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_usual_format(
    export: Run,
    tmp_path: Path,
    tiny_drafter_dir: Path,
    tiny_eagle3_dir: Path,
    tiny_medusa_dir: Path,
    tiny_mtp_dir: Path,
) -> None:
    for drafter, name in (
        (tiny_drafter_dir, "zlab"),
        (tiny_eagle3_dir, "eagle3"),
        (tiny_medusa_dir, "medusa"),
        (tiny_mtp_dir, "mtp"),
    ):
        code, err = export(drafter, "--out", tmp_path / name)
        assert code == 0 and f"MB in the {name} format" in err
        assert (tmp_path / name / "config.json").is_file()


def test_a_reduced_vocabulary_stays_reduced(
    export: Run, tmp_path: Path, target: Target, tiny_drafter_dir: Path
) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    embedding, head = embedding_and_head(target)
    kept = torch.arange(0, target.vocab_size, 2)
    own = Borrowed(embedding, 2 * head[kept], kept)  # as if it had been trained
    speculators.LAYOUT.write(tmp_path / "half", Checkpoint(config, tensors, own))
    drafter = load_drafter(tmp_path / "half", target=target)
    state = drafter.new_state(4, 40)
    hidden_states = torch.randn(4, 9, 2 * target.hidden_size, generator=torch.Generator().manual_seed(1))
    drafter.observe(state, torch.zeros(4, 9, dtype=torch.long), hidden_states, [9] * 4)
    proposal = drafter.propose(state, torch.tensor([7, 8, 9, 10]), ChainPlan(8, [SamplingParams()] * 4))
    assert not (proposal.tokens[:, 1:] % 2).any()  # only tokens of the draft vocabulary
    assert drafted(tmp_path / "half", target)[0] == drafted(tiny_drafter_dir, target)[0]
    assert export(tmp_path / "half", "--format", "speculators", "--out", tmp_path / "again")[0] == 0
    again = read_drafter(tmp_path / "again", None, target.num_layers).borrowed
    assert again is not None and again.kept is not None and torch.equal(again.kept, kept)
    assert own.head is not None and again.head is not None and torch.equal(again.head, own.head)
    code, err = export(tmp_path / "half", "--format", "zlab", "--out", tmp_path / "whole")
    assert code == 2 and "which z-lab's layout cannot express; export to speculators" in err
    assert not (tmp_path / "whole").exists()


def test_refusals(export: Run, tmp_path: Path, tiny_drafter_dir: Path) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "last", replace(config, target_layers=(0, 2)), tensors)
    zlab.write_checkpoint(tmp_path / "deep", replace(config, num_target_layers=4), tensors)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("dear")
    for args, message in (
        ((tmp_path / "nowhere", "--out", tmp_path / "out"), "nowhere/config.json cannot be read"),
        ((tiny_drafter_dir, "--format", "onnx", "--out", tmp_path / "out"), "format must be one of zlab.*, got 'onnx'"),
        (
            (tmp_path / "last", "--format", "speculators", "--out", tmp_path / "out"),
            "a target layer must be below.*, got 2",
        ),
        ((tmp_path / "deep", "--out", tmp_path / "out"), "num_target_layers must be the target's, 3.*, got 4"),
        ((tiny_drafter_dir, "--format", "speculators", "--out", tmp_path / "taken"), "new, empty or a draft model's"),
        ((tiny_drafter_dir, "--out", tiny_drafter_dir), "is the drafter's own folder; choose another"),
    ):
        code, err = export(*args)
        assert code == 2 and re.search(message, err)
    assert {path.name for path in tmp_path.iterdir()} == {"last", "deep", "taken"}


def test_a_checkpoint_of_another_target_is_reported(
    export: Run, tmp_path: Path, target: Target, tiny_drafter_dir: Path
) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    embedding, head = embedding_and_head(target)
    for name, own in (
        ("embed_tokens", Borrowed(embedding.flip(0), head, None)),
        ("lm_head", Borrowed(embedding, -head, None)),
    ):
        speculators.LAYOUT.write(tmp_path / name, Checkpoint(config, tensors, own), DrafterTarget("another"))
        with pytest.raises(ValueError, match=f"{name}.weight of .* differs from the target's; use the target"):
            load_drafter(tmp_path / name, target=target)


def test_another_name_for_the_target(export: Run, tmp_path: Path, tiny_drafter_dir: Path) -> None:
    out = tmp_path / "out"
    assert export(tiny_drafter_dir, "--format", "speculators", "--out", out, "--target-name", "Qwen/Qwen3-8B")[0] == 0
    assert json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"] == (
        "Qwen/Qwen3-8B"
    )


def test_gguf(export: Run, tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """Both files say what they were made from: the target answers as before, and so does the drafter draft."""
    out = tmp_path / "out"
    for weights in ("f32", "q8_0"):
        code, err = export(tiny_drafter_dir, "--format", "gguf", "--type", weights, "--out", out)
        files = f"-m {out}/target-{weights}.gguf -md {out}/drafter-{weights}.gguf"
        assert code == 0 and f"{files} --spec-type draft-dflash" in err
    assert {file.name for file in out.iterdir()} == {
        f"{part}-{weights}.gguf" for part in ("target", "drafter") for weights in ("f32", "q8_0")
    }
    folder, file = load_target(tiny_target_dir), load_target(out / "target-f32.gguf")
    assert file.tokenizer is not None and folder.tokenizer is not None
    assert file.tokenizer.get_vocab() == folder.tokenizer.get_vocab()
    assert file.tokenizer.chat_template == folder.tokenizer.chat_template
    assert file.eos_token_ids == folder.eos_token_ids | {0}  # <|endoftext|> ends answers of any GGUF file
    assert file.max_context == folder.max_context
    assert drafted(tiny_drafter_dir, folder) == drafted(out / "drafter-f32.gguf", file)
    counts = [
        weights_of(Engine(target, load_drafter(drafter, target=target)))
        for target, drafter in ((folder, tiny_drafter_dir), (file, out / "drafter-f32.gguf"))
    ]
    assert counts[0] == counts[1]


def test_a_gguf_drafter_of_another_target(export: Run, tmp_path: Path, tiny_drafter_dir: Path) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "other", config, tensors, trained=Trained("0123456789abcdef"))
    code, err = export(tmp_path / "other", "--format", "gguf", "--out", tmp_path / "out")
    assert code == 0
    message = err
    assert "was trained for another target (fingerprint 0123456789abcdef)" in message
    assert (tmp_path / "out" / "drafter-bf16.gguf").is_file()


def test_refusals_of_gguf(export: Run, tmp_path: Path, tiny_drafter_dir: Path, tiny_mtp_dir: Path) -> None:
    """Nothing is left of what was begun."""
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "last", replace(config, target_layers=(0, 2)), tensors)
    zlab.write_checkpoint(tmp_path / "deep", replace(config, num_target_layers=4), tensors)
    (tmp_path / "file").touch()
    out = tmp_path / "out"
    for args, message in (
        (
            (tmp_path / "last", "--format", "gguf", "--out", out),
            "a target layer must be below the target's last layer.*, got 2",
        ),
        ((tiny_mtp_dir, "--format", "gguf", "--out", out), "The kind of drafter is 'MTP'; llama.cpp drafts with files"),
        (("mtp", "--format", "gguf", "--out", out), "The drafter mtp has no files of its own"),
        ((tmp_path / "deep", "--format", "gguf", "--out", out), "num_target_layers must be the target's, 3.*, got 4"),
        (
            (tiny_drafter_dir, "--format", "gguf", "--type", "q5_k", "--out", out),
            "--type must be 'f32', 'f16'",
        ),
        ((tiny_drafter_dir, "--format", "gguf", "--out", tmp_path / "file"), "file is a file; choose a folder"),
        ((tiny_drafter_dir, "--type", "f32", "--out", out), "--type f32 goes with --format gguf; leave it out"),
        (
            (tiny_drafter_dir, "--format", "gguf", "--target-name", "x", "--out", out),
            "--target-name is x, which does not go with --format gguf",
        ),
        ((tiny_drafter_dir, "--format", "gguf", "--target", "m.gguf", "--out", out), "There is no file m.gguf"),
    ):
        code, err = export(*args)
        assert code == 2 and re.search(message, err)
    assert {path.name for path in tmp_path.iterdir()} == {"last", "deep", "file"}
