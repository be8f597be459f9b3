"""Widens the bundled pair, to measure speed at sizes without a trained pair.

Every neuron is repeated `factor` times and every weight that sums over repeated inputs is divided by `factor`, heads
are repeated, and the final norm is divided, since the head sums too. So each activation occurs `factor` times: the wide
pair says the same words, with the same tau, at the cost of its size. A factor that is a power of two rounds no weight.

    python -m benchmarks.sizes.widen 4 build/wide4
    python -m benchmarks.sizes.widen 4 build/wide4 DIR/target DIR/drafter      # others of the same shape
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from benchmarks.harness.command import Parser
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft import targets

TARGET = Path(targets.BUNDLED)
DRAFTER = TARGET.parent / "drafter"
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def widen(folder: Path, out: Path, factor: int) -> Path:
    """Write a wider twin of a target, or of a DFlash, DFlash2 or DSpark drafter, of Qwen3's shape; returns `out`.

    Raises:
        ValueError: The factor is no power of two.
    """
    if factor < 1 or factor & (factor - 1):
        raise ValueError(f"factor is {factor}; choose a power of two, which rounds no weight.")
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    for name in WIDTHS:
        config[name] *= factor
    config.pop("target_fingerprint", None)  # of a drafter: the wide target is another one
    (out / "config.json").write_text(json.dumps(config, indent=2))
    weights = load_file(folder / "model.safetensors")
    groups = hidden // config.get("dflash_config", {}).get("conv_group_size", hidden)
    wide = {name: _wide(name, weight, factor, hidden, groups).contiguous() for name, weight in weights.items()}
    save_file(wide, out / "model.safetensors", {"format": "pt"})
    for file in folder.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(file, out / file.name)
    return out


def _wide(name: str, weight: Tensor, factor: int, hidden: int, groups: int) -> Tensor:
    """Return a weight of the wider twin.

    Args:
        hidden: Size before.
        groups: Of channels that share a correction of a convolution, before.
    """
    if name.startswith("markov_head.") or name.endswith("_codebook") or name == "confidence_head.proj.bias":
        return weight  # of tokens, and a single number
    if name == "confidence_head.proj.weight":  # reads what the final norm made, as the head does, and the token before
        return torch.cat([weight[:, :hidden].repeat(1, factor), weight[:, hidden:]], dim=1)
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if part in ("q_norm", "k_norm"):  # of one head
        return weight
    if part == "norm":  # the last one, before the head
        return weight.repeat(factor) / factor
    if weight.ndim == 1:
        return weight.repeat(factor)
    if part in ("embed_tokens", "lm_head", "hidden_projection"):
        return weight.repeat(1, factor)
    if part == "base_kernel":  # of each channel
        return weight.repeat(1, 1, factor)
    if part == "kernel_projection":
        return weight.unflatten(0, (-1, groups)).repeat(1, factor, factor).flatten(0, 1) / factor
    if part == "fc":  # reads several layers side by side, each of which is repeated
        outputs, inputs = weight.shape
        each = weight.view(outputs, inputs // outputs, outputs).repeat(factor, 1, factor)
        return each.flatten(1) / factor
    return weight.repeat(factor, factor) / factor


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("factor", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("sources", type=Path, nargs="*", default=[TARGET, DRAFTER], metavar="DIR")
    given = parser.parse()
    for source in given.sources:
        print(widen(source, given.out / source.name, given.factor))


if __name__ == "__main__":
    main()
