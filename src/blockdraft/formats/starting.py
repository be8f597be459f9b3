"""Command lines and configuration files that start other engines with a drafter."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP = "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"
OPENVINO = "OpenVINO GenAI"
TENSORRT_LLM_FILE = "trtllm.yaml"


@dataclass(frozen=True)
class Start:
    """Command that starts an engine with a drafter, or the reason why there is none.

    Attributes:
        line: Command line, or None if the engine cannot read the drafter in this layout.
        reason: Why the engine cannot read it.
        remedy: Command that converts the drafter to a layout the engine reads, if there is one.
        files: Contents, by name, of the files that the command line refers to.
    """

    line: str | None
    reason: str | None = None
    remedy: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def typed(self) -> str:
        """Shell commands that write the files, followed by the command line."""
        assert self.line is not None
        files = (f"cat > {name} <<'END'\n{content}\nEND" for name, content in self.files.items())
        return "\n".join([*files, self.line])


def vllm(target: str, method: str, drafter: str, draft_tokens: int) -> Start:
    config = {"method": method, "model": drafter, "num_speculative_tokens": draft_tokens}
    return Start(shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)]))


def vllm_alone(drafter: str) -> Start:
    """Start vLLM with a folder in the speculators format, which contains the name of its target."""
    return Start(shlex.join(["vllm", "serve", drafter]))


def sglang(target: str, algorithm: str, drafter: str, tokens: int, more: Mapping[str, int] | None = None) -> Start:
    """Start SGLang.

    Args:
        tokens: Tokens per proposal, including the anchor.
        more: Additional options.
    """
    line = ["python", "-m", "sglang.launch_server", "--model-path", target]
    line += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", drafter]
    numbers = {**(more or {}), "--speculative-num-draft-tokens": tokens}
    return Start(shlex.join([*line, *(str(part) for option in numbers.items() for part in option)]))


def tensorrt_llm(
    target: str, kind: str, drafter: str, draft_tokens: int, more: Mapping[str, Any] | None = None
) -> Start:
    """Start TensorRT-LLM.

    Args:
        kind: `decoding_type` in TensorRT-LLM.
        more: Additional keys of the speculative configuration.
    """
    config = {"decoding_type": kind, "speculative_model": drafter, "max_draft_len": draft_tokens, **(more or {})}
    line = shlex.join(["trtllm-serve", target, "--config", TENSORRT_LLM_FILE])
    return Start(line, files={TENSORRT_LLM_FILE: json.dumps({"speculative_config": config})})  # JSON is YAML


def openvino(drafter: str) -> Start:
    """Convert the drafter for OpenVINO GenAI, which is a library and has no server."""
    line = ["optimum-cli", "export", "openvino", "--model", drafter, "--task", "text-generation-with-past"]
    line += ["--trust-remote-code", "--disable-convert-tokenizer", "--weight-format", "fp32", "drafter-ov"]
    return Start(None, "it reads checkpoints converted by optimum", shlex.join(line))


def nowhere(reasons: Mapping[str, str]) -> dict[str, Start]:
    """Return the reason of each engine for not running a kind of drafter."""
    return {engine: Start(None, reason) for engine, reason in reasons.items()}
