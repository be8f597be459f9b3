"""Dimensions of models from the catalogue, configurations and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from gguf import GGUFReader
from gguf_writer import write_gguf
from radar_configs import DEEPSEEK_V3, LFM2_8B_A1B, QWEN3_8B, QWEN3_30B_A3B
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft.errors import UsageError
from blockdraft_radar.shape import known_shapes, read_shape, shape_of_config


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen3-8b", QWEN3_8B),
        ("qwen3-30b-a3b", QWEN3_30B_A3B),
        ("deepseek-v3", DEEPSEEK_V3),
        ("lfm2.5-8b-a1b", LFM2_8B_A1B),
    ],
)
def test_configuration_agrees_with_the_catalogue(name: str, config: dict[str, Any]) -> None:
    from_catalogue, from_config = read_shape(name), shape_of_config(config, name)
    assert from_config.parameters == pytest.approx(from_catalogue.parameters, rel=0.001)
    assert from_config.active == pytest.approx(from_catalogue.active, rel=0.01)
    fields = "full_layers", "full_numbers", "experts", "experts_per_token", "recurrent_layers", "state_numbers"
    for field in (*fields, "vocabulary", "context", "tied"):
        assert getattr(from_config, field) == getattr(from_catalogue, field), field


def test_windows_and_recurrent_layers_of_a_configuration() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 12
    windowed = shape_of_config({**QWEN3_8B, "layer_types": kinds, "sliding_window": 1024}, "x")
    assert (windowed.window_layers, windowed.full_layers, windowed.window) == (24, 12, 1024)
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 9
    recurrent = shape_of_config({"text_config": {**QWEN3_8B, "layer_types": kinds}}, "x")
    assert (recurrent.recurrent_layers, recurrent.full_layers) == (27, 9)
    assert recurrent.state_numbers > 0


def test_most_models_of_the_catalogue_have_shapes() -> None:
    assert len(known_shapes()) >= 200


def test_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert read_shape(str(tmp_path)).hidden == 4096
    assert read_shape(str(tmp_path / "config.json")).layers == 36


def test_gguf_file(tiny_target_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    file = tmp_path / "model.gguf"
    write_gguf(file, model, tokenizer=AutoTokenizer.from_pretrained(tiny_target_dir))
    shape = read_shape(str(file))
    assert shape.stored_bytes == file.stat().st_size
    assert shape.parameters == model.num_parameters()
    assert shape.layers == model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "is not a JSON object"),
        ("{}", "lacks hidden_size"),
        (json.dumps({**QWEN3_8B, "hidden_size": -1}), "hidden_size must be an integer from 1 to"),
        (json.dumps({**QWEN3_8B, "num_hidden_layers": "36"}), "num_hidden_layers must be an integer"),
        (json.dumps({**QWEN3_8B, "num_experts": 4, "num_experts_per_tok": 8}), "there are 4 experts"),
    ],
)
def test_broken_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_shape(str(tmp_path))


def test_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="did you mean qwen3-8b"):
        read_shape("qwen3-8")
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_shape(str(tmp_path))
    with pytest.raises(UsageError, match="does not exist"):
        read_shape(str(tmp_path / "model.gguf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("nobody/nothing", "nobody/nothing/model.gguf"):
        with pytest.raises(UsageError, match=name):
            read_shape(name)


def test_gguf_on_the_hub_reads_only_the_header(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> None:
    file = tmp_path / "somebody" / "models" / "model.gguf"
    file.parent.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    write_gguf(file, model, tokenizer=AutoTokenizer.from_pretrained(tiny_target_dir))
    header = GGUFReader(file).data_offset
    constants("blockdraft_radar.shape", HEADER_BYTES=header)
    block_sizes: list[int] = []

    class Hub(LocalFileSystem):
        def open(self, name: str, mode: str, block_size: int) -> Any:
            block_sizes.append(block_size)
            return super().open(str(tmp_path / name), mode)

    monkeypatch.setattr("huggingface_hub.HfFileSystem", Hub)
    shape = read_shape("somebody/models/model.gguf")
    assert block_sizes == [header] and header < file.stat().st_size / 2
    assert replace(shape, name="", path=None) == replace(read_shape(str(file)), name="", path=None)
