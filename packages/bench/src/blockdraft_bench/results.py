"""Results of a benchmark, the content of results.json."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import psutil
import torch

from blockdraft.machine import processor_name
from blockdraft_bench.speed import Figures, Profile, Trial, figures


@dataclass(frozen=True)
class Results:
    """Content of results.json.

    Attributes:
        methods: Figures by method, over all sets.
        sets: Figures by method, for each prompt set.
        arguments: Options of the benchmark.
        versions: Versions of blockdraft, torch, transformers and python.
        hardware: Machine, as in `hardware`.
        profiles: Time of each method's steps by part, if measured.
    """

    methods: dict[str, Figures]
    sets: dict[str, dict[str, Figures]]
    arguments: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    profiles: dict[str, Profile] | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def results(
    trials: Sequence[Trial],
    arguments: Mapping[str, Any],
    device: torch.device,
    profiles: dict[str, Profile] | None = None,
    sampled: Collection[str] = (),
) -> Results:
    """Collect the results of a benchmark.

    Args:
        arguments: Options of the benchmark, `temperature` among them.
        sampled: Methods whose draft tokens are sampled if decoding is not greedy.
    """
    incomparable = () if arguments["temperature"] == 0 else sampled
    sets = list(dict.fromkeys(t.prompt_set for t in trials))
    return Results(
        methods=figures(trials, incomparable),
        sets={name: figures([t for t in trials if t.prompt_set == name], incomparable) for name in sets},
        arguments=dict(arguments),
        versions={
            "blockdraft": version("blockdraft"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        hardware=hardware(device),
        profiles=profiles,
    )


def hardware(device: torch.device) -> dict[str, Any]:
    """Describe the machine: processor, cores, logical cores, torch's threads, memory in bytes, and GPU if used."""
    return {
        "cpu": processor_name(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
