"""Command lines and configurations that start other engines with a drafter. Tests compare their options with those
recorded from each engine."""

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
    """How to start an engine with a drafter, or why it cannot be started.

    Attributes:
        line: Command line that starts the engine; None if it does not read the drafter in this form.
        reason: Reason why it does not.
        remedy: Command that writes the drafter in a form that the engine reads; None if there is none.
        files: Contents, by name, of files that the command line names.
    """

    line: str | None
    reason: str | None = None
    remedy: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def typed(self) -> str:
        """Commands that write the files, followed by the command line."""
        assert self.line is not None
        return as_typed(self.line, self.files)


def as_typed(line: str, files: Mapping[str, str]) -> str:
    """Commands that write these files, followed by a command line."""
    return "\n".join([*(f"cat > {name} <<'END'\n{content}\nEND" for name, content in files.items()), line])


def vllm(target: str, method: str, drafter: str, draft_tokens: int) -> Start:
    said = {"method": method, "model": drafter, "num_speculative_tokens": draft_tokens}
    return Start(shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(said)]))


def vllm_alone(drafter: str) -> Start:
    """Start of vLLM with a folder in the speculators format, which names its target."""
    return Start(shlex.join(["vllm", "serve", drafter]))


def sglang(target: str, algorithm: str, drafter: str, tokens: int, more: Mapping[str, int] | None = None) -> Start:
    """Start of SGLang.

    Args:
        tokens: Tokens of a proposal, anchor included.
        more: Further options.
    """
    line = ["python", "-m", "sglang.launch_server", "--model-path", target]
    line += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", drafter]
    numbers = {**(more or {}), "--speculative-num-draft-tokens": tokens}
    return Start(shlex.join([*line, *(str(part) for option in numbers.items() for part in option)]))


def tensorrt_llm(
    target: str, kind: str, drafter: str, draft_tokens: int, more: Mapping[str, Any] | None = None
) -> Start:
    """Start of TensorRT-LLM.

    Args:
        kind: TensorRT-LLM's `decoding_type`.
        more: Further keys of its speculative configuration.
    """
    said = {"decoding_type": kind, "speculative_model": drafter, "max_draft_len": draft_tokens, **(more or {})}
    line = shlex.join(["trtllm-serve", target, "--config", TENSORRT_LLM_FILE])
    return Start(line, files={TENSORRT_LLM_FILE: json.dumps({"speculative_config": said})})  # JSON is YAML


def openvino(drafter: str) -> Start:
    """OpenVINO GenAI is a library, for which a drafter is converted first."""
    line = ["optimum-cli", "export", "openvino", "--model", drafter, "--task", "text-generation-with-past"]
    line += ["--trust-remote-code", "--disable-convert-tokenizer", "--weight-format", "fp32", "drafter-ov"]
    return Start(None, "it reads what optimum has converted", shlex.join(line))


def nowhere(reasons: Mapping[str, str]) -> dict[str, Start]:
    """All engines, with the reason why none of them runs a kind of drafter."""
    return {engine: Start(None, reason) for engine, reason in reasons.items()}
