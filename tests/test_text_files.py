"""Byte order marks, and pointers of Git LFS in the place of files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from blockdraft.cli.target import read_template
from blockdraft.drafters import load_drafter
from blockdraft.drafters.draft_vocab import check_draft_vocab
from blockdraft.errors import UsageError
from blockdraft.formats.folder import read_config
from blockdraft.models.places import TINY
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target, load_target_text
from blockdraft.text_files import MARK, POINTER, read_json, read_text, refuse_pointer
from blockdraft_train.settings_files import read_settings

CONTENT = POINTER + b"v1\noid sha256:" + b"0" * 64 + b"\nsize 12345678\n"


@pytest.fixture
def target(tmp_path: Path, tiny_target_dir: Path) -> Path:
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    return tmp_path / "target"


def mark(file: Path) -> None:
    file.write_bytes(MARK + file.read_bytes())


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(MARK + b'port = 8012\r\nhost = "::1"\r\n')
    made = read_settings(ServeSettings, file)
    assert (made.port, made.host) == (8012, "::1")
    file.write_bytes(MARK + b"{{ messages }}")
    assert read_template(file) == "{{ messages }}"
    file = tmp_path / "a.json"
    file.write_bytes(MARK + b"[1, 2]")
    assert check_draft_vocab(file) == [1, 2] == read_json(file)
    (tmp_path / "config.json").write_bytes(MARK + b'{"a": 1}')
    assert read_config(tmp_path) == {"a": 1}


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_a_model_whose_files_have_byte_order_marks(target: Path, tiny_target_dir: Path, backend: str) -> None:
    expected = load_target_text(tiny_target_dir)
    files = [file for file in target.iterdir() if file.suffix in (".json", ".jinja", ".txt")]
    for file in files:
        mark(file)
    before = {file: file.read_bytes() for file in files}
    loaded = load_target(target, backend=backend)
    assert loaded.eos_token_ids == expected.eos_token_ids and loaded.path == target
    assert loaded.tokenizer is not None and expected.tokenizer is not None
    assert loaded.tokenizer("the ant")["input_ids"] == expected.tokenizer("the ant")["input_ids"]
    assert loaded.tokenizer.chat_template == expected.tokenizer.chat_template
    assert {file: file.read_bytes() for file in files} == before


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("model.safetensors", load_target),
        ("config.json", load_target),
        ("tokenizer.json", load_target),
        ("tokenizer.json", load_target_text),
        ("generation_config.json", load_target_text),
        ("config.json", read_config),
    ],
)
def test_a_pointer_in_a_model_is_named(target: Path, name: str, load: Callable[[Path], object]) -> None:
    (target / name).write_bytes(CONTENT)
    with pytest.raises(UsageError, match=rf"{name} is a pointer of Git LFS .* run `git lfs pull`"):
        load(target)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pointer_in_a_drafter_is_named(tmp_path: Path, name: str) -> None:
    shutil.copytree(TINY / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / name).write_bytes(CONTENT)
    with pytest.raises(UsageError, match=rf"{name} is a pointer of Git LFS"):
        load_drafter(tmp_path / "drafter", target=load_target(TINY / "target"))


def test_other_pointers_are_named(tmp_path: Path) -> None:
    for name, load in (("a.gguf", load_target), ("a.txt", read_text), ("a.json", check_draft_vocab)):
        (tmp_path / name).write_bytes(CONTENT)
        with pytest.raises(UsageError, match=rf"{name}.*(is a pointer of Git LFS|git lfs pull)"):
            load(tmp_path / name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "tokenizer.model", "chat_template.jinja"])
def test_any_pointer_in_a_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTENT)
    with pytest.raises(UsageError, match=rf"{name} is a pointer of Git LFS"):
        refuse_pointer(tmp_path)


def test_a_pointer_that_nothing_needs_is_no_fault(target: Path) -> None:
    (target / "pytorch_model.bin").write_bytes(CONTENT)
    assert load_target(target).tokenizer is not None


def test_a_broken_file_beside_no_pointer_is_still_broken(target: Path) -> None:
    (target / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_target(target)
