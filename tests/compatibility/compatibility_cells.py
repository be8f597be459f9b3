"""What runs with what: cells that tests fill, and the document that is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiny_families import ATTENTION, FAMILIES

from blockdraft.targets import FAMILIES as NATIVE
from blockdraft.targets.hf import REFUSED_FAMILIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
TESTED, REFUSED, UNTESTED = "tested", "refused", "untested"

# Arguments of `load_target`.
BACKENDS: dict[str, dict[str, Any]] = {
    "transformers": {"backend": "hf"},
    "native": {"backend": "native", "compile": "off"},
    "compiled for a CPU": {"backend": "native", "compile": "on"},
    "mlx": {"backend": "mlx"},
    "jax": {"backend": "jax"},
}
# Modules that backends need (tests/jax is a `jax`, too). Their tests have their names as markers.
PACKAGES = {"mlx": "mlx_lm", "jax": "jax.numpy"}
TITLES = {"mlx": "MLX", "jax": "JAX"}
# The fixture with a small checkpoint of each drafter; None for one that goes by its name, or that is the target's own.
DRAFTERS: dict[str, str | None] = {
    "dflash": "tiny_drafter_dir",
    "dflash2": "tiny_dflash2_dir",
    "dspark": "tiny_dspark_dir",
    "eagle3": "tiny_eagle3_dir",
    "medusa": "tiny_medusa_dir",
    "mtp": "tiny_mtp_dir",
    "draft_lm": None,
    "prompt_lookup": None,
}
DRAFTER_NAMES = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "mtp": "MTP head",
    "draft_lm": "language model as drafter",
    "prompt_lookup": "prompt lookup",
}
FAMILY_NAMES = {
    "llama": "Llama",
    "mistral": "Mistral, sliding window",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "gemma2": "Gemma 2, windows and soft-caps",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4, shared keys and values",
    "gpt_oss": "gpt-oss, attention sinks",
    "phi3": "Phi-3, sliding window",
    "olmo2": "OLMo 2",
    "glm4": "GLM-4",
    "deepseek_v3": "DeepSeek-V3, latent attention",
    "qwen3_next": "Qwen3-Next, gated delta net",
    "qwen3_5_text": "Qwen3.5, gated delta net",
    "qwen3_5_moe_text": "Qwen3.5-MoE, gated delta net",
    "olmo_hybrid": "OLMo hybrid, gated delta net",
    "bamba": "Bamba, Mamba-2",
    "granitemoehybrid": "Granite 4 hybrid, Mamba-2",
    "nemotron_h": "Nemotron-H, Mamba-2",
    "falcon_h1": "Falcon-H1, Mamba-2",
}
NOT_COMPILED = {"qwen3_moe", "qwen3_5_text"}  # native, and neither compiled nor in JAX


class Cell(NamedTuple):
    family: str
    drafter: str
    backend: str


CELLS = [Cell(family, drafter, backend) for backend in BACKENDS for family in FAMILIES for drafter in DRAFTERS]


def is_refused(family: str, backend: str) -> bool:
    if backend == "mlx":
        return family not in ATTENTION
    if backend == "transformers":
        return False
    return family not in NATIVE or (backend in ("compiled for a CPU", "jax") and family in NOT_COMPILED)


def document(outcomes: Mapping[Cell, str]) -> str:
    """`docs/compatibility.md`, given what the tests found: a line a family, which names drafters where they differ."""

    def told(family: str, backend: str) -> str:
        by_drafter = {name: outcomes.get(Cell(family, key, backend), UNTESTED) for key, name in DRAFTER_NAMES.items()}
        first, *others = sorted(dict.fromkeys(by_drafter.values()), key=[*by_drafter.values()].count, reverse=True)
        apart = {each: [name for name, outcome in by_drafter.items() if outcome == each] for each in others}
        told = [f"{each} with {', '.join(names)}" for each, names in apart.items()]
        return "; ".join([*told, f"{first} with others" if told else first])

    families = [
        [f"{name} (`{family}`)", *(told(family, backend) for backend in BACKENDS)]
        for family, name in FAMILY_NAMES.items()
    ]
    table = _table([["Family", *(TITLES.get(name, f"{name[0].upper()}{name[1:]}") for name in BACKENDS)], *families])
    refused = [[f"`{family}`", reason] for family, reason in sorted(REFUSED_FAMILIES.items())]
    return "\n".join([INTRODUCTION, table, f"{LAST}\n\n{_table([['Family', 'Why'], *refused])}"])


def expected() -> dict[Cell, str]:
    """What the tests find where all of them pass."""
    return {cell: REFUSED if is_refused(cell.family, cell.backend) else TESTED for cell in CELLS}


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


INTRODUCTION = f"""# What runs with what

Which families of targets run on which backend, tried with each of these drafters:
{", ".join(DRAFTER_NAMES.values())}.

- *tested*: a tiny random model of the family, in float32, gives the tokens of plain decoding of each request alone, in
  a batch whose rows draft trees and chains, greedy and at a temperature.
- *refused*: loading fails, and the message names the family and the reason. With the backend "auto", the default,
  transformers then runs the model, or the native decoder uncompiled.
- *untested* says nothing.

Beside MLX and JAX, torch runs the drafters that [these](mlx.md) [pages](jax.md) do not name, and a warning says so.

| Backend | Asked for by |
|---|---|
| Transformers | `load_target(path, backend="hf")`: any decoder-only model that attends, and the recurrent ones below |
| Native | `load_target(path, backend="native", compile="off")`: our own decoder |
| Compiled for a CPU | `load_target(path, backend="native", compile="on")`: the same decoder, in C |
| MLX | `load_target(path, backend="mlx")`: [mlx-lm's model](mlx.md); tested on `mlx[cpu]` |
| JAX | `load_target(path, backend="jax")`: [families of our own decoder in JAX](jax.md); tested on a CPU |
"""
LAST = """Quantised checkpoints of other layouts than [quantize.md](quantize.md) names run through transformers, as far
as it can on the device. With torchao's int8 weights on a CPU, drafted answers are tested to be those of the same
target's plain decoding.

## Recurrent layers

Families with gated delta nets or Mamba-2 layers keep a state, which cannot be cut. So prompts that begin alike are not
shared between requests, and such a model cannot draft for another. Through transformers `exact`
([exactness.md](exactness.md)) refuses them, as it does latent attention and attention sinks.
[architecture.md](architecture.md) says how a state is kept for each path of a tree.

## Refused everywhere

Encoder-decoders, and recurrent layers of other families than those above, since no test says that their states can be
brought back to what was accepted. And by name:"""

assert {*FAMILY_NAMES} == {*FAMILIES} and {*ATTENTION} <= {*FAMILIES}
