"""Small targets for tests of servers: `python -m tests.server_targets DIR`.

DIR/random is a random model of some thousand parameters, DIR/pair the bundled one; both have a chat template with tools
and thinking.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from blockdraft import targets

BUNDLED = Path(targets.BUNDLED)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")  # knows tools and thinking
CONTEXT, PAIR_CONTEXT = 256, 4096
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": CONTEXT}


def random_target(out: Path, seed: int = 0) -> Path:
    """Write a random target to a folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = json.loads((BUNDLED / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("layer_types", "max_window_layers")}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**config | SIZES | {"dtype": "float32"}))
        weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}  # tied
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(model.config.to_dict(), default=str), encoding="utf-8")
    return with_tools(out)


def with_tools(folder: Path) -> Path:
    """Give a model folder the bundled tokenizer and the template."""
    for file in BUNDLED.iterdir():
        if file.name.startswith(("tokenizer", "generation_config")):
            shutil.copy(file, folder / file.name)
    shutil.copy(TEMPLATE, folder / TEMPLATE.name)
    return folder


def pair_with_tools(out: Path) -> Path:
    """Write the bundled target, which its drafter still fits, with room for long lists of tools."""
    shutil.copytree(BUNDLED, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"max_position_embeddings": PAIR_CONTEXT}))
    return with_tools(out)


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    print(random_target(out / "random"), pair_with_tools(out / "pair"), sep="\n")


if __name__ == "__main__":
    main()
