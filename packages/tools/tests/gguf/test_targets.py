"""GGUF files written by blockdraft equal those of llama.cpp's converter, and give transformers' logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf_models import MODELS, SMALL, model_of, scores
from gguf_writer import write_gguf
from thinned import thinned
from transformers import AutoConfig

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import open_gguf
from blockdraft.targets import load_target
from blockdraft_tools.checkpoint import open_checkpoint
from blockdraft_tools.gguf.targets import write_gguf_target


def write(folder: Path, name: str, **differences: Any) -> Path:
    """Write a model as a folder and as a GGUF file, and return the file."""
    model_of(name, **differences).save_pretrained(folder)
    with open_checkpoint(folder) as source:
        write_gguf_target(folder / "m.gguf", source, {"general.name": "tiny"}, "f32")
    return folder / "m.gguf"


UNWRITABLE = (
    "deepseek_v2",
    "deepseek_v2-groups",
    "deepseek_v3",
    "glm4_moe_lite",
    "phi3-long",
    "gemma4_text",
    "gemma4_text-keys",
    "gemma4_text-experts",
    "gpt_oss",
    "gpt_oss-yarn",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "nemotron_h",
    "nemotron_h-dense",
    "lfm2",
    "lfm2_moe",
    "ministral3",
    "qwen2_moe",
    "qwen2_moe-old",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
WRITABLE = [name for name in MODELS if name not in UNWRITABLE]


@pytest.mark.parametrize("name", thinned(WRITABLE, keep=2))
def test_what_is_written_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Metadata and tensors equal those of a file that is written as by llama.cpp's converter."""
    path, twin = write(tmp_path, name), tmp_path / "twin.gguf"
    model, (_, metadata, extra) = model_of(name), MODELS[name]
    write_gguf(twin, model, metadata=metadata, extra=extra)
    actual, expected = open_gguf(path), open_gguf(twin)
    assert set(actual.tensors) == set(expected.tensors)
    for tensor, theirs in zip(actual.tensors.values(), map(expected.tensors.get, actual.tensors), strict=True):
        assert theirs is not None
        torch.testing.assert_close(tensor.read(), theirs.read(), rtol=1e-6, atol=0)
    other_words = {"llama-old-linear": "rope.scale_linear", "llama-unscaled": "rope.scaling"}
    for key, value in expected.metadata.items():
        if other_words.get(name, "none") not in key:
            own = actual.metadata[key]
            assert own == (value[0] if isinstance(value, list) and isinstance(own, int) else value), key
    tokens = torch.randint(0, SMALL["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits
    target = load_target(path, device="cpu", compile="off")
    torch.testing.assert_close(scores(target, tokens), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "differences", "message"),
    [
        ("mistral", {"sliding_window": 8}, "it would lose windows"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "it would lose windows"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
            "scaled by dynamic with factor, which cannot be written to GGUF; those scaled by linear, yarn, llama3",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "attention_factor": 1.0,
                    "rope_theta": 500.0,
                }
            },
            "scaled by yarn with attention_factor",
        ),
        ("gemma2", {"final_logit_softcapping": None}, "it would lose final_softcap"),
        ("gemma3_text", {"query_pre_attn_scalar": 20}, "it would lose query_scale"),
    ],
)
def test_what_the_format_cannot_say(name: str, differences: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(name, **SMALL | MODELS[name][0] | differences)
    assert config.model_type == name
    with pytest.raises(UsageError, match=message):
        write(tmp_path, name, **differences)


def test_numbers_that_differ_by_float32_alone(tmp_path: Path) -> None:
    """A folder that transformers has made of a file has such."""
    path = write(tmp_path, "llama", rms_norm_eps=9.999999747378752e-06)
    assert load_target(path, device="cpu", compile="off") is not None


def test_other_spellings_of_the_suffix_and_broken_texts(tmp_path: Path) -> None:
    path = write(tmp_path, "llama")
    expected = load_target(path)
    name = b"general.name" + bytes(4 + 8)  # then its type and length
    data = bytearray(path.read_bytes())
    data[data.index(b"general.name") + len(name)] = 0xFF
    for spelled, content in (("M.GGUF", path.read_bytes()), ("n.Gguf", bytes(data))):
        (tmp_path / spelled).write_bytes(content)
        loaded = load_target(tmp_path / spelled)
        assert loaded.architecture == expected.architecture and loaded.backend == expected.backend
    assert open_gguf(tmp_path / "n.Gguf").metadata["general.name"] == "\ufffdiny"


def test_parts_in_capitals_are_found(tmp_path: Path) -> None:
    path = write(tmp_path, "llama")
    reader = GGUFReader(path)
    writer = GGUFWriter(tmp_path / "parts.gguf", "llama", split_max_tensors=4)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            value, kind = field.contents(), field.types[0]
            more = (field.types[-1],) if kind == GGUFValueType.ARRAY else ()
            writer.add_key_value(field.name, value, kind, *more)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for part in tmp_path.glob("parts-*.gguf"):
        part.rename(part.with_suffix(".GGUF"))
    first = min(tmp_path.glob("parts-*.GGUF"))
    assert set(open_gguf(first).tensors) == set(open_gguf(path).tensors)
