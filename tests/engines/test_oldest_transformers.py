"""The oldest transformers that engines take (optimum-intel 2.2.0) reads what we write: shapes and rotary embeddings."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from same_drafts import environment
from transformers import AutoModelForCausalLM, LlamaConfig

from blockdraft.formats import Checkpoint, find_layout, read_drafter
from blockdraft.targets import load_target
from blockdraft_tools.export import convert, format_for
from blockdraft_tools.quantize.run import quantize

pytestmark = pytest.mark.openvino
THETA = 300_000.0  # no class's default
SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 32}
FIELDS = ("rope_theta", "rope_scaling", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
READ = f"""
import json, sys
from transformers import AutoConfig
found = []
for folder in sys.argv[1:]:
    raw = json.load(open(folder + "/config.json"))
    raw = raw.get("transformer_layer_config", raw)  # of the speculators format
    config = AutoConfig.for_model(**raw)
    found.append({{name: getattr(config, name) for name in {FIELDS!r}}})
print(json.dumps(found))
"""


def read_by_the_oldest(*folders: Path) -> list[dict[str, Any]]:
    python = environment("transformers") / "bin" / "python"
    done = subprocess.run([python, "-c", READ, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_targets(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=96, rope_parameters={"rope_theta": THETA, **SCALING})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "few")
    [found] = read_by_the_oldest(tmp_path / "few")
    assert found == {name: sizes.get(name) for name in FIELDS} | {
        "rope_theta": THETA,
        "rope_scaling": SCALING,
        "vocab_size": 96,
    }


def test_drafters(tiny_target_dir: Path, tiny_drafter_dir: Path, tiny_eagle3_dir: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    for drafter, layout in ((tiny_drafter_dir, "zlab"), (tiny_eagle3_dir, "eagle3")):
        given = read_drafter(drafter, None, target.num_layers)
        config = replace(given.config, rope_theta=THETA, rope_scaling=SCALING)
        find_layout(layout).write(tmp_path / layout, Checkpoint(config, given.tensors))
    convert(tmp_path / "zlab", tmp_path / "spec", format_for("speculators", target, "some/target"), target)
    found = read_by_the_oldest(tmp_path / "zlab", tmp_path / "spec", tmp_path / "eagle3")
    told = {"rope_theta": THETA, "rope_scaling": SCALING, "hidden_size": target.hidden_size}
    assert [{name: each[name] for name in told} for each in found] == [told] * 3
