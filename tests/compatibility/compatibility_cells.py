"""Combinations of family, drafter and backend, their test outcomes, and the page that lists them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiny_families import ATTENTION, FAMILIES

from blockdraft.models import catalogue
from blockdraft.targets import FAMILIES as NATIVE
from blockdraft.targets.hf import REFUSED_FAMILIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
TESTED, REFUSED, UNTESTED = "tested", "refused", "untested"

# Arguments of `load_target` by backend.
BACKENDS: dict[str, dict[str, Any]] = {
    "transformers": {"backend": "hf"},
    "native": {"backend": "native", "compile": "off"},
    "compiled for a CPU": {"backend": "native", "compile": "on"},
    "mlx": {"backend": "mlx"},
    "jax": {"backend": "jax"},
}
# Modules that backends need, which are also the markers of their tests. (tests/jax is a package `jax`, too.)
PACKAGES = {"mlx": "mlx_lm", "jax": "jax.numpy"}
TITLES = {"mlx": "MLX", "jax": "JAX"}
# Fixture with a small checkpoint of each drafter; None for drafters that are loaded by name or from a target.
DRAFTERS: dict[str, str | None] = {
    "dflash": "tiny_drafter_dir",
    "dflash2": "tiny_dflash2_dir",
    "dspark": "tiny_dspark_dir",
    "eagle3": "tiny_eagle3_dir",
    "medusa": "tiny_medusa_dir",
    "mtp": "tiny_mtp_dir",
    "draft_lm": None,
    "lookup": None,
}
DRAFTER_NAMES = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "mtp": "MTP head",
    "draft_lm": "language model as drafter",
    "lookup": "lookup",
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
    "lfm2": "LFM2, short convolutions",
    "lfm2_moe": "LFM2-MoE, short convolutions",
    "bamba": "Bamba, Mamba-2",
    "granitemoehybrid": "Granite 4 hybrid, Mamba-2",
    "nemotron_h": "Nemotron-H, Mamba-2",
    "falcon_h1": "Falcon-H1, Mamba-2",
}
# Families of the catalogue from 2025 and 2026, and why their GGUF files do not run compiled; None: they do.
SPARSE = "its attention reads a choice of tokens"
RECENT: dict[str, str | None] = {
    "deepseek_v3": None,
    "deepseek_v32": SPARSE,
    "ernie4_5": "not in the table of families",
    "ernie4_5_moe": "not in the table of families",
    "exaone4": "not in the table of families",
    "gemma3": None,
    "gemma4": None,
    "glm4_moe": "not in the table of families",
    "glm4_moe_lite": None,
    "glm_moe_dsa": SPARSE,
    "gpt_oss": None,
    "kimi_k2": "its tokenizer (`kimi-k2`) is not read, so it takes token ids alone",
    "lfm2": None,
    "lfm2_moe": None,
    "llama4": "not in the table of families",
    "minimax_m2": "not in the table of families",
    "ministral3": None,
    "mistral4": "not in the table of families",
    "nemotron_h": None,
    "olmo3": None,
    "qwen3": None,
    "qwen3_5": None,
    "qwen3_5_moe": None,
    "qwen3_moe": None,
    "qwen3_next": None,
    "qwen3_vl": None,
    "qwen3_vl_moe": None,
    "smollm3": None,
}
YES = {"nemotron_h": "Nano: yes; Super and Ultra: no, their experts read a latent projection"}
HYBRIDS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h"}
NATIVE_ONLY = {"jax": {"deepseek_v3", "gemma4_text", "gpt_oss", "olmo2", "phi3", "qwen3_moe", *HYBRIDS}}


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
    return family not in NATIVE or family in NATIVE_ONLY.get(backend, ())


def document(outcomes: Mapping[Cell, str]) -> str:
    """Return the text of `docs/compatibility.md`: one line per family, naming drafters whose outcome differs."""

    def outcome_of(family: str, backend: str) -> str:
        by_drafter = {name: outcomes.get(Cell(family, key, backend), UNTESTED) for key, name in DRAFTER_NAMES.items()}
        usual, *others = sorted(dict.fromkeys(by_drafter.values()), key=[*by_drafter.values()].count, reverse=True)
        exceptions = [
            f"{other} with {', '.join(name for name, outcome in by_drafter.items() if outcome == other)}"
            for other in others
        ]
        return "; ".join([*exceptions, f"{usual} with others" if exceptions else usual])

    families = [
        [f"{name} (`{family}`)", *(outcome_of(family, backend) for backend in BACKENDS)]
        for family, name in FAMILY_NAMES.items()
    ]
    models = defaultdict[str, list[str]](list)
    for model in catalogue():
        models[model.family or ""].append(model.id)
    files = [
        [f"`{family}`", ", ".join(models[family]), YES.get(family, "yes") if reason is None else f"no: {reason}"]
        for family, reason in RECENT.items()
    ]
    recent = _table([["Family", "Models of the catalogue", "Runs compiled from GGUF"], *files])
    table = _table([["Family", *(TITLES.get(name, f"{name[0].upper()}{name[1:]}") for name in BACKENDS)], *families])
    refused = [[f"`{family}`", reason] for family, reason in sorted(REFUSED_FAMILIES.items())]
    return "\n".join([INTRODUCTION, table, FILES, recent, f"{LAST}\n\n{_table([['Family', 'Why'], *refused])}"])


def expected() -> dict[Cell, str]:
    """Return the outcomes when all tests pass."""
    return {cell: REFUSED if is_refused(cell.family, cell.backend) else TESTED for cell in CELLS}


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


INTRODUCTION = f"""# Compatibility

This page lists which families of targets run on which backend. Each was tested with these drafters:
{", ".join(DRAFTER_NAMES.values())}.

- *tested*: a tiny random model of the family, in float32, generates the same tokens as plain decoding of each request
  alone. The batch drafts trees and chains, greedy and sampled.
- *refused*: loading fails with a message that names the family and the reason. The default backend, "auto", then runs
  the model with transformers or with the uncompiled native decoder.
- *untested*: not known.

Drafters that [MLX](mlx.md) and [JAX](jax.md) do not run themselves run in torch, with a warning.

| Backend | How to select it |
|---|---|
| Transformers | `load_target(path, backend="hf")`: any decoder-only attention model, and the recurrent ones below |
| Native | `load_target(path, backend="native", compile="off")`: our own decoder |
| Compiled for a CPU | `load_target(path, backend="native", compile="on")`: the same decoder in C |
| MLX | `load_target(path, backend="mlx")`: [mlx-lm's model](mlx.md); tested on `mlx[cpu]` |
| JAX | `load_target(path, backend="jax")`: [families of our own decoder in JAX](jax.md); tested on a CPU |
"""
FILES = """## GGUF files of models from 2025 and 2026

DeepSeek's, Kimi's and GLM-4.7-Flash's files have latent attention (`deepseek2`). Tiny models of the shapes of
DeepSeek-V2, V3 and GLM-4.7-Flash are tested, and none of their published files. Those of Kimi and Moonlight take token
ids alone, because their tokenizer is not read. The text part of Qwen3-VL runs as Qwen3. Of Nemotron 3, Nano runs; Super
and Ultra are refused, because their experts read a latent projection. The context of Ministral 3 and Devstral 2 ends at
their original one, mostly 16,384 tokens, because attention is scaled by position beyond. Granite 4-H
(`granitehybrid`), which the catalogue does not list, runs compiled from GGUF too.

MTP heads of these models:

- Qwen3.5 and later: a head in the GGUF file or folder runs compiled and [drafts by default](gguf.md#mtp-heads).
- DeepSeek-V3: llama.cpp's converter leaves the MTP layer out (`skip_mtp` in its `conversion/deepseek.py`), so GGUF
  files have no head. One in [the folder](export.md#mtp-heads-in-the-targets-folder), in 16 bits, runs compiled and
  drafts by default.
- GLM-4.7-Flash: older GGUF files have no head for the same reason. Newer converters write it. There and in the folder
  it runs compiled and drafts by default.
- DeepSeek-V2, Granite 4-H and Nemotron 3 Nano: no head is read. Use `lookup`, the default, or another drafter.
"""
LAST = """All families of the native decoder but Gemma 4 can be [quantized](quantize.md) at load and on disk. Quantized
checkpoints of other layouts than those of that page run through transformers, if it supports them on the device.

## Recurrent layers

Families with gated delta nets or Mamba-2 layers keep a state that cannot be cut, so such a model cannot draft for
another. Compiled for a CPU, both keep [checkpoints](architecture.md#targets) of their states, at which requests share
prefixes; elsewhere they share none. Short convolutions keep a state only through transformers.

## Refused everywhere

Encoder-decoders are refused, and recurrent layers of other families than those above, because no test shows that their
states can be rolled back. These are refused by name:"""

assert {*FAMILY_NAMES} == {*FAMILIES} and {*ATTENTION} <= {*FAMILIES}
