"""FasterDecoding's layout of Medusa's heads."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.drafters import load_drafter
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, DrafterTarget, find_layout, layout_of, layouts, read_drafter
from blockdraft.formats.trained import Trained
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.targets import load_target
from blockdraft_medusa.network import MedusaConfig, MedusaNetwork
from blockdraft_tools.export import ExportFormat, convert

CONFIG = MedusaConfig(hidden_size=8, vocab_size=20, num_target_layers=3, num_heads=5)
# As published: config.json states two heads and no architecture; the file holds five.
RAW = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}


def tensors(config: MedusaConfig = CONFIG) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {name: tensor.half() for name, tensor in MedusaNetwork(config).state_dict().items()}


def put(folder: Path, actual: Any, raw: dict[str, Any] = RAW) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    torch.save(actual, folder / "medusa_lm_head.pt")
    return folder


def test_names_are_those_of_the_published_files() -> None:
    assert list(tensors())[:4] == ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "1.0.linear.weight"]
    two = MedusaConfig(8, 20, 3, num_heads=1, num_layers=2)
    assert [*tensors(two)][2:] == ["0.1.linear.weight", "0.1.linear.bias", "0.2.weight"]


def test_a_published_folder_is_read(tmp_path: Path) -> None:
    actual = read_drafter(put(tmp_path / "heads", tensors()), None, 3)
    assert actual.config == CONFIG
    assert all(torch.equal(tensor, actual.tensors[name]) for name, tensor in tensors().items())
    (tmp_path / "safe").mkdir()
    (tmp_path / "safe" / "config.json").write_text(json.dumps(RAW))
    save_file(tensors(), tmp_path / "safe" / "medusa_lm_head.safetensors")
    again = read_drafter(tmp_path / "safe", None, 3)
    assert again.config == CONFIG and all(torch.equal(again.tensors[name], tensors()[name]) for name in tensors())


@pytest.mark.parametrize("shared", [False, True])
def test_round_trip(shared: bool, tmp_path: Path) -> None:
    config = MedusaConfig(8, 20, 3, num_heads=2, num_layers=2, shared_head=shared)
    layout = layouts()["medusa"]
    layout.write(
        tmp_path / "heads", Checkpoint(config, tensors(config), trained=Trained("abc", 4)), DrafterTarget("some/target")
    )
    assert {file.name for file in (tmp_path / "heads").iterdir()} == {"config.json", "medusa_lm_head.pt"}
    raw = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (raw["medusa_num_heads"], raw["medusa_num_layers"]) == (2, 2)
    assert raw["base_model_name_or_path"] == "some/target"
    actual = read_drafter(tmp_path / "heads", None, 3)
    assert actual.config == config and actual.trained == Trained("abc", 4)
    assert actual.tensors.keys() == tensors(config).keys()
    layout.write(tmp_path / "heads", Checkpoint(CONFIG, tensors()))  # replaces a drafter
    assert read_drafter(tmp_path / "heads", None, 3).config == CONFIG


def test_export_of_a_loaded_drafter(tmp_path: Path, tiny_medusa_dir: Path, tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    convert(tiny_medusa_dir, tmp_path / "copy", ExportFormat("medusa", DrafterTarget("some/target")), target)
    ours, theirs = load_drafter(tmp_path / "copy", target=target), load_drafter(tiny_medusa_dir, target=target)
    assert type(ours) is type(theirs) and ours.block_size == theirs.block_size == 4
    with pytest.raises(ValueError, match="MedusaConfig is a configuration that z-lab's layout"):
        convert(tiny_medusa_dir, tmp_path / "other", ExportFormat("zlab"), target)


def test_a_folder_without_an_architecture_is_loaded(tmp_path: Path, tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    config = MedusaConfig(target.hidden_size, target.vocab_size, target.num_layers, num_heads=2)
    drafter = load_drafter(put(tmp_path / "heads", tensors(config)), target=target)
    assert type(drafter).__name__ == "MedusaDrafter" and drafter.block_size == 3
    with pytest.raises(ValueError, match="hidden_size must be the target's, 32, got 8"):
        load_drafter(put(tmp_path / "small", tensors()), target=target)


class Bad:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("touched"),))


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt: broken, or more than tensors"):
        read_drafter(put(tmp_path / "code", {"0.0.linear.weight": Bad()}), None, 3)
    assert not Path("touched").exists()
    broken = put(tmp_path / "broken", tensors())
    data = (broken / "medusa_lm_head.pt").read_bytes()
    for left in (data[: len(data) // 2], b"", pickle.dumps(3, protocol=2), b"text"):
        (broken / "medusa_lm_head.pt").write_bytes(left)
        with pytest.raises(ValueError, match="broken, or more than tensors"):
            read_drafter(broken, None, 3)
    for name, actual, message in (
        ("list", [torch.zeros(2)], "its content must be .*got 'list'"),
        ("empty", {}, "the number of heads must be at least 1, got 0"),
        ("whole", {f"medusa_head.{n}": t for n, t in tensors().items()}, "it lacks 0.0.linear.weight"),
        (
            "flat",
            {**tensors(), "0.0.linear.weight": torch.tensor(1.0)},
            "the shape of a weight of head 0 must be of two dimensions",
        ),
        (
            "thin",
            {**tensors(), "0.1.weight": torch.zeros(20)},
            "the shape of a weight of head 0 must be of two dimensions",
        ),
        ("gap", {n: t for n, t in tensors().items() if n != "3.1.weight"}, "3.1.weight: expected .20, 8., found None"),
    ):
        with pytest.raises(ValueError, match=message):
            read_drafter(put(tmp_path / name, actual), None, 3)
    shared = {n: t for n, t in tensors().items() if "linear" in n}
    with pytest.raises(ValueError, match="vocab_size must be .*is absent"):
        read_drafter(put(tmp_path / "shared", shared), None, 3)
    with pytest.raises(ValueError, match="medusa_num_layers must be .*got 0"):
        read_drafter(put(tmp_path / "none", tensors(), {**RAW, "medusa_num_layers": 0}), None, 3)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"new cannot be written \(the disk is full, or a file too large\)"):
            find_layout("medusa").write(tmp_path / "new", Checkpoint(CONFIG, tensors()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


def test_other_configurations_are_refused(tiny_drafter_dir: Path) -> None:
    config = read_drafter(tiny_drafter_dir, None, 3).config
    assert isinstance(config, DraftConfig)
    with pytest.raises(ValueError, match="the configuration must be MedusaConfig, the only one .*, got 'DraftConfig'"):
        layouts()["medusa"].check(config)


def test_a_model_with_heads_is_no_drafter() -> None:
    assert layout_of({**RAW, "architectures": ["LlamaForCausalLM"]}) is None
    assert layout_of(RAW) is layouts()["medusa"]
