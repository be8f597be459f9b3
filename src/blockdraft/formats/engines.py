"""How engines are started with a drafter, and why some cannot be."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.architectures import architecture_of
from blockdraft.formats.base import Kind
from blockdraft.formats.find import find_layout
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
    config: Any,
    layout: str,
    drafter: str,
    target: str,
    given: Sequence[str] = (),
    target_gguf: str | None = None,
) -> dict[str, Start]:
    """How to start each engine with a drafter.

    Args:
        layout: How the drafter lies: a file of `formats`, or "gguf".
        drafter, target: Folders, hub names or files.
        given: Options that name the target to our commands.
        target_gguf: The target's GGUF file, for llama.cpp.
    """
    export = partial(_export, drafter, given)
    ours = Start(shlex.join(["blockdraft", "serve", *given, "--drafter", drafter]))
    kind = None if layout == GGUF else find_layout(layout).kind
    if kind is not None:
        return {OURS: ours, **_of_kind(kind, kind.guesses(config), drafter, target, export)}
    return {
        OURS: ours,
        "vLLM": _vllm(config, layout, drafter, target, export(ZLAB), export(SPECULATORS)),
        "SGLang": _sglang(config, layout, drafter, target, export(ZLAB)),
        "llama.cpp": _llama_cpp(config, layout, drafter, target_gguf, export(GGUF)),
    }


def _export(drafter: str, given: Sequence[str], to: str) -> str:
    return shlex.join(["blockdraft", "export", drafter, *given, "--format", to, "--out", f"{to}-drafter"])


def _of_kind(kind: Kind, guesses: int, drafter: str, target: str, export: Callable[[str], str]) -> dict[str, Start]:
    refused = Start(None, kind.elsewhere, None if kind.instead is None else export(kind.instead))
    vllm = refused if kind.vllm is None else Start(_vllm_line(kind.vllm, drafter, target, guesses))
    sglang = refused if kind.sglang is None else Start(_sglang_line(kind.sglang(guesses), drafter, target, guesses + 1))
    return {"vLLM": vllm, "SGLang": sglang, "llama.cpp": refused}


def llama_cpp_line(config: DraftConfig, drafter: str, target: str) -> str:
    """What starts llama.cpp's server with two GGUF files."""
    architecture = architecture_of(config)
    assert architecture.llama_cpp is not None
    line = ["llama-server", "-m", target, "-md", drafter, "--spec-type", architecture.llama_cpp.speculator]
    return shlex.join([*line, "--spec-draft-n-max", str(architecture.guesses(config))])


def _vllm(config: DraftConfig, layout: str, drafter: str, target: str, to_zlab: str, to_speculators: str) -> Start:
    architecture = architecture_of(config)
    if layout == SPECULATORS:
        return Start(_vllm_line("", drafter, target, 0))
    if layout == ZLAB and architecture.vllm is not None:
        return Start(_vllm_line(architecture.vllm, drafter, target, architecture.guesses(config)))
    name = architecture.names[0]
    remedy = to_zlab if architecture.vllm is not None else to_speculators if architecture.speculator else None
    return Start(None, f"it reads no {name} in this format", remedy)


def _vllm_line(method: str, drafter: str, target: str, guesses: int) -> str:
    """With the method "" the drafter's folder says the rest."""
    if not method:
        return shlex.join(["vllm", "serve", drafter])
    said = {"method": method, "model": drafter, "num_speculative_tokens": guesses}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(said)])


def _sglang(config: DraftConfig, layout: str, drafter: str, target: str, to_zlab: str) -> Start:
    architecture = architecture_of(config)
    if architecture.sglang is None:
        return Start(None, f"how it is started with {architecture.names[0]} is not known here")
    if layout != ZLAB:
        return Start(None, "it reads z-lab's layout", to_zlab)
    return Start(_sglang_line([architecture.sglang], drafter, target, config.block_size))


def _sglang_line(algorithm: Sequence[str], drafter: str, target: str, tokens: int) -> str:
    """`tokens` are those of a block, the anchor included."""
    line = ["python", "-m", "sglang.launch_server", "--model-path", target]
    line += ["--speculative-algorithm", *algorithm, "--speculative-draft-model-path", drafter]
    return shlex.join([*line, "--speculative-num-draft-tokens", str(tokens)])


def _llama_cpp(config: DraftConfig, layout: str, drafter: str, target: str | None, to_gguf: str) -> Start:
    try:
        drafter_metadata(config)
    except UsageError as refused:
        return Start(None, str(refused))
    if layout != GGUF:
        return Start(None, "it reads GGUF files", to_gguf)
    return Start(llama_cpp_line(config, drafter, target or "TARGET.gguf"))
