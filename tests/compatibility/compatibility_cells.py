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
}
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
DRAFTER_NAMES = ("DFlash", "DFlash2", "DSpark", "EAGLE-3", "Medusa", "MTP head", "draft LM", "prompt lookup")
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
NOT_COMPILED = {"qwen3_moe", "qwen3_5_text"}  # native, and not compiled


class Cell(NamedTuple):
    family: str
    drafter: str
    backend: str


CELLS = [Cell(family, drafter, backend) for backend in BACKENDS for family in FAMILIES for drafter in DRAFTERS]


def is_refused(family: str, backend: str) -> bool:
    own = backend == "transformers" or family in NATIVE
    return not own or (backend == "compiled for a CPU" and family in NOT_COMPILED)


def document(outcomes: Mapping[Cell, str]) -> str:
    """`docs/compatibility.md`, given what the tests found."""
    parts = [INTRODUCTION]
    for backend in BACKENDS:
        parts.append(f"## {backend[0].upper()}{backend[1:]}\n\n{HOW[backend]}\n")
        rows = [["Family", *DRAFTER_NAMES]]
        for family in FAMILIES:
            cells = [outcomes.get(Cell(family, drafter, backend), UNTESTED) for drafter in DRAFTERS]
            rows.append([f"{FAMILY_NAMES[family]} (`{family}`)", *cells])
        parts.append(_table(rows))
    refused = [[f"`{family}`", reason] for family, reason in sorted(REFUSED_FAMILIES.items())]
    parts.append(f"{LAST}\n\n{_table([['Family', 'Why'], *refused])}")
    return "\n".join(parts)


def expected() -> dict[Cell, str]:
    """What the tests find where all of them pass."""
    return {cell: REFUSED if is_refused(cell.family, cell.backend) else TESTED for cell in CELLS}


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


INTRODUCTION = """# What runs with what

`python tests/compatibility` runs the tests of these cells and writes this page. *Tested*: with a tiny random model of
the family, in float32, a batch whose rows draft trees and chains, greedy and at a temperature, gives the tokens of
plain decoding of each request alone. *Refused*: loading fails, and the message names the family and the reason; with
the backend "auto" transformers then runs the model. *Untested* says nothing.

Families with recurrent layers (gated delta nets, Mamba-2) keep the state after the committed tokens of each row, which
no forward changes. Through transformers a forward runs these layers from there, over a chain at once and over each path
of a tree; what is accepted is then run through these layers alone, and a prompt, of which all is kept, once. Our own
decoder computes all nodes of a tree at once, and the state behind what is accepted from what it has computed. States
cannot be cut, so prompts that begin alike are not shared between requests, and such a model cannot be a draft LM.
`exact` ([exactness.md](exactness.md)) refuses them with transformers, as it does latent attention and attention sinks.

Checkpoints that were quantised otherwise than [quantize.md](quantize.md) says run through transformers, as far as it
can on the device. With torchao's int8 weights on a CPU, drafted answers are tested to be those of the same target's
plain decoding.
"""
HOW = {
    "transformers": '`load_target(path, backend="hf")`: any decoder-only model whose layers attend, and the '
    "recurrent ones listed here.",
    "native": '`load_target(path, backend="native", compile="off")`: our own decoder.',
    "compiled for a CPU": '`load_target(path, backend="native")`: the same decoder, in C. What it does not know runs '
    'uncompiled, unless compile is "on".',
}
LAST = """## Refused everywhere

Encoder-decoders, and recurrent layers of other families than those above: no test says that their states can be brought
back to what was accepted. And by name:"""

assert {*FAMILY_NAMES} == {*FAMILIES} and {*ATTENTION} <= {*FAMILIES}
