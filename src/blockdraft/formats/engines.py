"""How engines are started with a drafter, and why some cannot be."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.errors import UsageError
from blockdraft.formats.architectures import architecture_of
from blockdraft.formats.gguf.drafter import drafter_metadata
from blockdraft.nn.draft_config import DraftConfig

ZLAB, SPECULATORS, GGUF = "zlab", "speculators", "gguf"
OURS = "blockdraft"


@dataclass(frozen=True)
class Start:
    """Attributes:
    line: What starts the engine; None where it does not read the drafter as it is.
    reason: Why not.
    remedy: What writes it so that the engine reads it; None where nothing does.
    """

    line: str | None
    reason: str | None = None
    remedy: str | None = None


def starts(
    config: DraftConfig,
    layout: str,
    drafter: str,
    target: str,
    given: Sequence[str] = (),
    target_gguf: str | None = None,
) -> dict[str, Start]:
    """How to start each engine with a drafter.

    Args:
        layout: How the drafter lies: "zlab", "speculators" or "gguf".
        drafter, target: Folders, hub names or files.
        given: Options that name the target to our commands.
        target_gguf: The target's GGUF file, for llama.cpp.
    """
    model = [*given]
    ours = ["blockdraft", "serve", *model, "--drafter", drafter]

    def export(to: str) -> str:
        return shlex.join(["blockdraft", "export", drafter, *model, "--format", to, "--out", f"{to}-drafter"])

    return {
        OURS: Start(shlex.join(ours)),
        "vLLM": _vllm(config, layout, drafter, target, export(ZLAB), export(SPECULATORS)),
        "SGLang": _sglang(config, layout, drafter, target, export(ZLAB)),
        "llama.cpp": _llama_cpp(config, layout, drafter, target_gguf, export(GGUF)),
    }


def llama_cpp_line(config: DraftConfig, drafter: str, target: str) -> str:
    """What starts llama.cpp's server with two GGUF files."""
    architecture = architecture_of(config)
    assert architecture.llama_cpp is not None
    line = ["llama-server", "-m", target, "-md", drafter, "--spec-type", architecture.llama_cpp.speculator]
    return shlex.join([*line, "--spec-draft-n-max", str(architecture.guesses(config))])


def _vllm(config: DraftConfig, layout: str, drafter: str, target: str, to_zlab: str, to_speculators: str) -> Start:
    architecture = architecture_of(config)
    if layout == SPECULATORS:
        return Start(shlex.join(["vllm", "serve", drafter]))
    if layout == ZLAB and architecture.vllm is not None:
        said = {"method": architecture.vllm, "model": drafter, "num_speculative_tokens": architecture.guesses(config)}
        return Start(shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(said)]))
    name = architecture.names[0]
    remedy = to_zlab if architecture.vllm is not None else to_speculators if architecture.speculator else None
    return Start(None, f"it reads no {name} in this format", remedy)


def _sglang(config: DraftConfig, layout: str, drafter: str, target: str, to_zlab: str) -> Start:
    architecture = architecture_of(config)
    if architecture.sglang is None:
        return Start(None, f"how it is started with {architecture.names[0]} is not known here")
    if layout != ZLAB:
        return Start(None, "it reads z-lab's layout", to_zlab)
    line = ["python", "-m", "sglang.launch_server", "--model-path", target]
    line += ["--speculative-algorithm", architecture.sglang, "--speculative-draft-model-path", drafter]
    return Start(shlex.join([*line, "--speculative-num-draft-tokens", str(config.block_size)]))  # anchor included


def _llama_cpp(config: DraftConfig, layout: str, drafter: str, target: str | None, to_gguf: str) -> Start:
    try:
        drafter_metadata(config)
    except UsageError as refused:
        return Start(None, str(refused))
    if layout != GGUF:
        return Start(None, "it reads GGUF files", to_gguf)
    return Start(llama_cpp_line(config, drafter, target or "TARGET.gguf"))
