"""Commands that start each engine with a drafter."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats.architectures import architecture_of, find_architecture
from blockdraft.formats.base import find_layout
from blockdraft.formats.gguf.kinds import kind_of
from blockdraft.formats.starting import (
    LLAMA_CPP,
    OPENVINO,
    SGLANG,
    TENSORRT_LLM,
    VLLM,
    Start,
    openvino,
    sglang,
    tensorrt_llm,
    vllm,
    vllm_alone,
)
from blockdraft.nn.draft_config import DraftConfig
from blockdraft_tools.gguf.drafters import drafter_metadata

ZLAB, SPECULATORS, GGUF = "zlab", "speculators", "gguf"
OURS = "blockdraft"


def starts(
    config: Any,
    layout: str,
    drafter: str,
    target: str,
    given: Sequence[str] = (),
    target_gguf: str | None = None,
) -> dict[str, Start]:
    """Return the command of each engine, by its name, or the reason why it cannot run the drafter.

    Args:
        config: Configuration of the drafter's network.
        layout: Name of the drafter's layout, or "gguf".
        drafter, target: Folder, hub name or file.
        given: Options that name the target in blockdraft commands.
        target_gguf: GGUF file of the target, for llama.cpp.
    """

    def export(to: str) -> str:
        return shlex.join(["blockdraft", "export", drafter, *given, "--format", to, "--out", f"{to}-drafter"])

    ours = Start(shlex.join(["blockdraft", "serve", *given, "--drafter", drafter]))
    folder_layout = kind_of(config).layout if layout == GGUF else layout
    commands = find_layout(folder_layout).starts(config, drafter, target, export)
    if commands is None:
        commands = {
            VLLM: _vllm(config, layout, drafter, target, export(ZLAB), export(SPECULATORS)),
            SGLANG: _sglang(config, layout, drafter, target, export(ZLAB)),
            TENSORRT_LLM: _tensorrt_llm(config, layout, drafter, target, export(ZLAB)),
        }
    elif layout == GGUF:
        reason = f"it reads such drafters in the {folder_layout} format"
        commands = dict.fromkeys(commands, Start(None, reason, export(folder_layout)))
    if LLAMA_CPP not in commands:
        commands[LLAMA_CPP] = _llama_cpp(config, layout, drafter, target_gguf, export(GGUF))
    return {OURS: ours, **commands, OPENVINO: _openvino(config, layout, drafter, export(ZLAB))}


def llama_cpp_line(config: Any, drafter: str, target: str) -> str:
    """Return the command line that starts llama-server with two GGUF files.

    Raises:
        UsageError: llama.cpp cannot run the drafter.
    """
    speculator, draft_tokens = kind_of(config).start(config)
    line = ["llama-server", "-m", target, "-md", drafter, "--spec-type", speculator]
    return shlex.join([*line, "--spec-draft-n-max", str(draft_tokens)])


def _vllm(config: DraftConfig, layout: str, drafter: str, target: str, to_zlab: str, to_speculators: str) -> Start:
    architecture = architecture_of(config)
    if layout == SPECULATORS:
        return vllm_alone(drafter)
    if layout == ZLAB and architecture.vllm is not None:
        return vllm(target, architecture.vllm, drafter, architecture.draft_tokens(config))
    name = architecture.names[0]
    remedy = to_zlab if architecture.vllm is not None else to_speculators if architecture.speculator else None
    return Start(None, f"it reads no {name} in this format", remedy)


def _sglang(config: DraftConfig, layout: str, drafter: str, target: str, to_zlab: str) -> Start:
    architecture = architecture_of(config)
    if architecture.sglang is None:
        return Start(None, f"no command for {architecture.names[0]} is known")
    if layout != ZLAB:
        return Start(None, "it reads z-lab's layout", to_zlab)
    return sglang(target, architecture.sglang, drafter, config.block_size)


def _tensorrt_llm(config: DraftConfig, layout: str, drafter: str, target: str, to_zlab: str) -> Start:
    architecture = architecture_of(config)
    if architecture.tensorrt_llm is None:
        return Start(None, f"no command for {architecture.names[0]} is known")
    if layout != ZLAB:
        return Start(None, "it reads z-lab's layout", to_zlab)
    return tensorrt_llm(target, architecture.tensorrt_llm, drafter, architecture.draft_tokens(config))


def _openvino(config: Any, layout: str, drafter: str, to_zlab: str) -> Start:
    architecture = find_architecture(config)
    if architecture is None or not architecture.openvino:
        return Start(None, "only DFlash has been verified with it")
    return openvino(drafter) if layout == ZLAB else Start(None, "optimum converts z-lab's layout for it", to_zlab)


def _llama_cpp(config: Any, layout: str, drafter: str, target: str | None, to_gguf: str) -> Start:
    try:
        drafter_metadata(config)
        line = llama_cpp_line(config, drafter, target or "TARGET.gguf")
    except UsageError as refused:
        return Start(None, str(refused))
    return Start(line) if layout == GGUF else Start(None, "it reads GGUF files", to_gguf)
