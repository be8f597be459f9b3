"""Pairs of a target and a drafter by size: the bundled one made wider, or random weights of a published shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from benchmarks.gpu.shapes import SHAPES, WEIGHT_SCALE, Shape, draft_config
from benchmarks.sizes.widen import DRAFTER, TARGET, widen
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.formats.zlab import write_checkpoint

# Of the bundled pair: tau is 2.67 with 3 draft tokens. Pairs that were never trained use it too.
PAIR_ACCEPTANCE = 0.735
TRAINED_CONTEXT = 1024  # of the bundled pair


def make(size: str, folder: Path, context: int) -> tuple[Path, Path]:
    """Write a pair that has room for so many tokens; returns the folders of target and drafter.

    Args:
        size: A number, by which the bundled pair is widened, or the name of a shape.

    Raises:
        ValueError: An unknown shape, or a number that is no power of two.
    """
    if size.isdigit():
        made = [widen(source, folder / source.name, int(size)) for source in (TARGET, DRAFTER)]
        for each in made:
            config = json.loads((each / "config.json").read_text())
            config["max_position_embeddings"] = max(context, config["max_position_embeddings"])
            (each / "config.json").write_text(json.dumps(config, indent=2))
        return made[0], made[1]
    return _random_pair(known_shape(size), folder)


def row_lengths(size: str) -> tuple[int, int, int]:
    """Return the row lengths of a target's matrices that read hidden states, heads, and the inside of an MLP."""
    config = json.loads((TARGET / "config.json").read_text()) if size.isdigit() else vars(known_shape(size).target)
    factor = int(size) if size.isdigit() else 1
    heads = config["num_attention_heads"] * config["head_dim"]
    return factor * config["hidden_size"], factor * heads, factor * config["intermediate_size"]


def known_shape(name: str) -> Shape:
    """Return a shape by name. Raises ValueError for an unknown one."""
    if name not in SHAPES:
        raise ValueError(f"Size {name!r} is neither a number nor a shape; the shapes are {', '.join(SHAPES)}.")
    return SHAPES[name]


def acceptance(size: str, length: int) -> float | None:
    """Return the probability that a replaced draft token is right if those before it are.

    None means that the drafter's own tokens count, behind a prompt of this length.
    """
    if size.isdigit():
        return PAIR_ACCEPTANCE if length > TRAINED_CONTEXT else None
    shape = known_shape(size)
    taus = [tau for method, _, tau, _ in shape.taus if method == "dflash"]
    return acceptance_of(sum(taus) / len(taus), shape.block_size) if taus else PAIR_ACCEPTANCE


def acceptance_of(tau: float, block_size: int) -> float:
    """Return the probability that yields this tau in whole blocks, if it is the same for every draft token."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(block_size)) < tau else (low, middle)
    return low


def parameters(folder: Path) -> int:
    """Return the number of weights in a folder."""
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def _random_pair(shape: Shape, folder: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.target)
        network = DFlashNetwork(draft_config(shape)).state_dict()
    wanted = model.state_dict()
    if shape.target.tie_word_embeddings:
        del wanted["lm_head.weight"]
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    save_file(_random(wanted), target / "model.safetensors", {"format": "pt"})
    for file in TARGET.iterdir():  # the words do not matter, but a GGUF file holds a tokenizer
        if file.name.startswith("tokenizer"):
            shutil.copy(file, target / file.name)
    write_checkpoint(drafter, draft_config(shape), _random(network))
    return target, drafter


def _random(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return random weights of these names and shapes in bfloat16; norms are 1."""
    made = {"dtype": torch.bfloat16}
    return {
        name: torch.randn(each.shape, **made) * WEIGHT_SCALE if each.ndim > 1 else torch.ones(each.shape, **made)
        for name, each in like.items()
    }
