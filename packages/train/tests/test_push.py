"""Folders for the hub, and a stand-in for the hub's client."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft import cli
from blockdraft.errors import UsageError
from blockdraft.formats import zlab
from blockdraft.targets import BUNDLED
from blockdraft_train.push import DrafterRecords, prepare, read_drafter_records, upload

BENCH = {
    "methods": {
        "none": {"prompts": 8, "tokens_per_second": 100.4, "speedup": 1.0, "tau": 1.0, "identical": 1.0},
        "chain": {"prompts": 8, "tokens_per_second": None, "speedup": 1.91, "tau": 2.345, "identical": 1.0},
    },
    "arguments": {"temperature": 0.0, "max_new_tokens": 128, "running": "native, compiled"},
    "hardware": {"gpu": None, "cpu": "A Processor"},
}
DATA = {
    "counts": {"documents": 1200, "tokens": 90000, "supervised": 60000},
    "written_by": {"writer": "target"},
    "arguments": {"sources": ["/home/me/chats.jsonl"]},
}
NO_RECORDS = DrafterRecords(None, (), None)


class FakeHub:
    """Stands in for `huggingface_hub.HfApi`."""

    calls: list[tuple[str, dict[str, Any], list[str]]] = []
    refuses = False

    def create_repo(self, repo: str, **given: Any) -> str:
        if self.refuses:
            raise OSError("401 Unauthorized")
        self.calls.append(("create", {"repo": repo, **given}, []))
        return f"https://hub/{repo}"

    def upload_folder(self, **given: Any) -> None:
        files = sorted(str(path.relative_to(given["folder_path"])) for path in Path(given["folder_path"]).rglob("*.*"))
        self.calls.append(("upload", given, files))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    monkeypatch.setattr(FakeHub, "calls", [])
    monkeypatch.setattr(FakeHub, "refuses", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    return FakeHub


def test_a_folder_and_its_card(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    records = DrafterRecords(BENCH, (), DATA)
    prepare(tiny_drafter_dir, str(tiny_target_dir), tmp_path / "out", "me/tiny-dflash", records, "mit")
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {"README.md", "config.json", "custom_generate", "model.safetensors"}
    assert (out / "model.safetensors").read_bytes() == (tiny_drafter_dir / "model.safetensors").read_bytes()
    assert "DRAFTER = 'me/tiny-dflash'" in (out / "custom_generate/generate.py").read_text()
    card = (out / "README.md").read_text()
    head = card.split("---")[1]
    assert (
        "license: mit" in head and "library_name: blockdraft" in head and "base_model" not in head
    )  # of a local target
    assert "| none | 8 | 100 | 1.00 | 1.00 | 100 % |" in card and "| chain | 8 | - | 1.91 | 2.35 | 100 % |" in card
    assert (
        "A Processor" in card and "up to 7 tokens at a time and reads the outputs of the target's layers 0, 1" in card
    )
    assert (
        "1,200 documents" in card and "the target's own responses, from chats.jsonl" in card and "/home/me" not in card
    )
    for line in (
        "hf download me/tiny-dflash --local-dir DRAFTER",
        "blockdraft serve --target TARGET --drafter DRAFTER",
        'custom_generate="me/tiny-dflash"',
        "vllm serve TARGET --speculative-config",
        "--speculative-draft-model-path me/tiny-dflash",
        "blockdraft export DRAFTER --target TARGET --format gguf",
    ):
        assert line in card, line
    assert str(tmp_path) not in card and str(tiny_target_dir) not in card


def test_the_bundled_pair(tmp_path: Path) -> None:
    prepare("bundled", str(BUNDLED), tmp_path / "out", None, NO_RECORDS)
    assert "2 layers and 1.4 M parameters" in (tmp_path / "out/README.md").read_text()


def test_card_without_records(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    prepare(tiny_drafter_dir, str(tiny_target_dir), tmp_path / "one", None, NO_RECORDS)
    card = (tmp_path / "one/README.md").read_text()
    assert "Not measured yet" in card and "Not recorded." in card and "OWNER/NAME" in card
    log = ({"step": 1, "tau": 1.2}, {"step": 2, "tau": 2.5}, {"step": 3, "tau": None})
    prepare(tiny_drafter_dir, str(tiny_target_dir), tmp_path / "two", None, DrafterRecords(None, log, None))
    assert "tau 2.50 (tokens per target forward pass) on held-out prompts" in (tmp_path / "two/README.md").read_text()


def test_cards_of_all_kinds(
    tmp_path: Path, tiny_target_dir: Path, tiny_eagle3_dir: Path, tiny_medusa_dir: Path, tiny_mtp_dir: Path
) -> None:
    target = str(tiny_target_dir)
    for folder, files, tag, lines in (
        (
            tiny_eagle3_dir,
            {"model.safetensors"},
            "eagle3",
            (
                '"method": "eagle3"',
                "--speculative-algorithm EAGLE3",
                "decoding_type",
                "outputs of the target's layers 0, 1",
            ),
        ),
        (
            tiny_medusa_dir,
            {"medusa_lm_head.pt"},
            "medusa",
            ("Not with SGLang: it runs no Medusa heads", "drafts up to 3"),
        ),
        (
            tiny_mtp_dir,
            {"model.safetensors"},
            "mtp",
            (
                "Not with vLLM: it runs MTP heads that lie in the target's own checkpoint",
                "the input of the target's head",
            ),
        ),
    ):
        out = tmp_path / tag
        prepare(folder, target, out, "me/mine", NO_RECORDS)
        assert {file.name for file in out.iterdir()} == {"README.md", "config.json", "custom_generate", *files}
        card = (out / "README.md").read_text()
        assert f"tags: [speculative-decoding, {tag}, custom_generate]" in card
        for line in (*lines, "blockdraft serve --target TARGET --drafter DRAFTER"):
            assert line in card, (tag, line)


def test_records_beside_a_drafter_are_found(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    assert read_drafter_records(drafter) == NO_RECORDS
    for name, content in (
        ("fit/bench/results.json", BENCH),
        ("fit/data/data.json", DATA),
        ("run/log.jsonl", {"tau": 2}),
    ):
        file = tmp_path / f"drafter.{name}"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content) + "\n")
    assert read_drafter_records(drafter) == DrafterRecords(BENCH, ({"tau": 2},), DATA)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/results.json").write_text('{"mine": 1}')
    assert read_drafter_records(drafter, bench=tmp_path / "other").bench == {"mine": 1}
    with pytest.raises(UsageError, match=r"other/data.json cannot be read"):
        read_drafter_records(drafter, data=tmp_path / "other")


def test_foreign_records_are_refused(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    target = str(tiny_target_dir)
    for wrong, message in (
        (DrafterRecords({"mine": 1}, (), None), "results.json was not written by `blockdraft bench --out`"),
        (DrafterRecords({**BENCH, "methods": {"none": {}}}, (), None), "results.json was not written"),
        (DrafterRecords(None, (), {"counts": []}), "data.json was not written by `blockdraft data --out`"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(tiny_drafter_dir, target, tmp_path / "out", None, wrong)
    assert not (tmp_path / "out").exists()


def test_refused(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    target = str(tiny_target_dir)
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "deep", replace(config, num_target_layers=9), tensors)
    for drafter, repo, message in (
        (tmp_path / "deep", None, "does not fit"),
        (tiny_drafter_dir, "just-a-name", "repo must have the form OWNER/NAME"),
        (tmp_path / "nowhere", None, "nowhere"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(drafter, target, tmp_path / "out", repo, NO_RECORDS)
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("x")
    with pytest.raises(UsageError, match="holds other files"):
        prepare(tiny_drafter_dir, target, tmp_path / "full", None, NO_RECORDS)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]


def test_upload(tmp_path: Path, hub: type[FakeHub]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert upload(tmp_path, "me/mine", private=True) == "https://hub/me/mine"
    assert hub.calls[0][1] == {"repo": "me/mine", "private": True, "exist_ok": True}
    assert hub.calls[1][1]["repo_id"] == "me/mine" and hub.calls[1][2] == ["config.json"]
    hub.refuses = True
    with pytest.raises(UsageError, match="401 Unauthorized.*hf auth login"):
        upload(tmp_path, "me/mine", private=False)


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["blockdraft", "push", *map(str, args)])
    try:
        cli.main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


def test_commands(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    hub: type[FakeHub],
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
) -> None:
    pair = (tiny_drafter_dir, "--target", tiny_target_dir)
    assert run(monkeypatch, *pair) == 2 and "add --repo OWNER/NAME, --out DIR" in capsys.readouterr().err
    assert run(monkeypatch, *pair, "--out", tmp_path / "out") == 0 and not hub.calls
    err = capsys.readouterr().err
    assert "README.md, config.json, custom_generate, model.safetensors" in err
    assert "does not say how many tokens are accepted; add --bench DIR" in err and "add --data DIR" in err
    assert run(monkeypatch, *pair, "--repo", "me/mine") == 0
    assert capsys.readouterr().out == "https://hub/me/mine\n"
    assert [call[0] for call in hub.calls] == ["create", "upload"]
    assert "custom_generate/generate.py" in hub.calls[1][2]


@pytest.mark.slow
def test_the_folder_serves_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "out"
    prepare(tiny_drafter_dir, str(tiny_target_dir), folder, None, NO_RECORDS)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    prompt = torch.tensor([[7, 60, 41, 33], [50, 51, 9, 8]])
    drafted = model.generate(
        prompt, custom_generate=str(folder), drafter=str(folder), trust_remote_code=True, max_new_tokens=12
    )
    assert drafted.tolist() == model.generate(prompt, max_new_tokens=12).tolist()
