"""vLLM's own configuration classes read what we write: causality, windows, target layers, mask token and block."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from same_drafts import environment

from blockdraft.formats import zlab
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.targets import load_target
from blockdraft_tools.export import convert, format_for
from blockdraft_tools.inspect import inspect

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
WINDOW = 64
LAYERS = {
    "full": LayerAttention(causal=False, window=None),
    "windows": LayerAttention(causal=False, window=WINDOW),
    "causal windows": LayerAttention(causal=True, window=WINDOW),
}
READ = """
import json, sys
from transformers import AutoConfig
from vllm.model_executor.models import qwen3_dflash
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

folder = sys.argv[1]
raw = json.load(open(folder + "/config.json"))
said = {}
if "speculators_model_type" in raw:
    said = SpeculatorsConfig.extract_vllm_speculative_config(raw)
    config = SpeculatorsConfig.from_pretrained(folder)
else:
    config = AutoConfig.from_pretrained(folder)
layers = [qwen3_dflash._resolve_layer_attention(config, i) for i in range(config.num_hidden_layers)]
print(json.dumps({
    "layers": layers,
    "target_layers": config.dflash_config["target_layer_ids"],
    "mask": config.dflash_config["mask_token_id"],
    "rope": config.rope_parameters["rope_theta"],
    "draft_tokens": said.get("num_speculative_tokens"),
}))
"""


def read_by_vllm(folder: Path) -> dict[str, Any]:
    python = environment("vllm") / "bin" / "python"
    done = subprocess.run([python, "-c", READ, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def agrees(found: dict[str, Any], config: DraftConfig) -> None:
    assert [(each.window, each.causal) for each in config.layers] == [tuple(each) for each in found["layers"]]
    assert tuple(found["target_layers"]) == config.target_layers and found["mask"] == config.mask_token_id
    assert found["rope"] == config.rope_theta


@pytest.mark.parametrize("attention", LAYERS)
def test_every_layout(attention: str, tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    target_layers = tuple(
        target_layer for target_layer in config.target_layers if target_layer < config.num_target_layers - 1
    ) or (0,)
    assert len(target_layers) == len(config.target_layers)  # speculators cannot list the last layer
    config = replace(config, layers=(LAYERS[attention],) * len(config.layers))
    zlab.write_checkpoint(tmp_path / "zlab", config, tensors)
    agrees(read_by_vllm(tmp_path / "zlab"), config)
    loaded = load_target(tiny_target_dir, device="cpu")
    convert(
        tmp_path / "zlab", tmp_path / "speculators", format_for("speculators", loaded, str(tiny_target_dir)), loaded
    )
    found = read_by_vllm(tmp_path / "speculators")
    agrees(found, config)
    line = shlex.split(str(inspect(tmp_path / "zlab", tiny_target_dir).starts["vLLM"].line))
    said = json.loads(line[line.index("--speculative-config") + 1])
    assert found["draft_tokens"] == said["num_speculative_tokens"] == config.block_size - 1
