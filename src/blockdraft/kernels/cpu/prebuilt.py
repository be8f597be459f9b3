"""Libraries in wheels, compiled for common processors. `benchmarks/wheel.py` makes them."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.sources import MAX_LANES, PARALLEL, VECTORS, command, defines, keep, name_of, whole
from blockdraft.machine import processor_flags

FOLDER = Path(__file__).with_name("libraries")  # only in wheels
DTYPES = (  # of weights, inputs and store; head sizes are multiples of 16, weights may be quantized
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32, torch.int8),
    (torch.bfloat16, torch.float32, torch.int8),
    (torch.bfloat16, torch.bfloat16, torch.int8),
)


@dataclass(frozen=True)
class ProcessorLevel:
    """Processor level.

    Attributes:
        options: Options of gcc and clang to compile for it.
        needs: Flags that Linux lists for each such processor.
    """

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]


V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
VNNI = ("-mavx512vnni",)
BF16 = (*VNNI, "-mavx512bf16")
AMX = {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}
ZEN4 = {"avx512_vnni", "avx512_bf16", "sse4a"}  # SSE4a marks AMD's, whose attention is faster with BF16
ARMV8 = frozenset({"asimd", "fp"})
ARMV82 = ARMV8 | {"asimdrdm", "atomics", "crc32", "dcpop"}
LEVELS = {  # by `platform.machine()`, the best first
    "x86_64": (
        ProcessorLevel("x86-64-v4-amx", ("-march=x86-64-v4", *BF16, "-mamx-tile", "-mamx-bf16"), V4 | AMX),
        ProcessorLevel("x86-64-v4-bf16", ("-march=x86-64-v4", *BF16, "-msse4a"), V4 | ZEN4),
        ProcessorLevel("x86-64-v4-vnni", ("-march=x86-64-v4", *VNNI), V4 | {"avx512_vnni"}),
        ProcessorLevel("x86-64-v4", ("-march=x86-64-v4",), V4),
        ProcessorLevel("x86-64-v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), V3 | {"avx_vnni"}),
        ProcessorLevel("x86-64-v3", ("-march=x86-64-v3",), V3),
    ),
    "aarch64": (
        ProcessorLevel("armv8.2-i8mm", ("-march=armv8.2-a+dotprod+i8mm",), ARMV82 | {"asimddp", "i8mm"}),
        ProcessorLevel("armv8.2-dotprod", ("-march=armv8.2-a+dotprod",), ARMV82 | {"asimddp"}),
        ProcessorLevel("armv8", ("-march=armv8-a",), ARMV8),
    ),
}


def runs(machine: str, flags: Collection[str]) -> list[ProcessorLevel]:
    """Return the levels that a processor supports, the best first.

    Args:
        machine: Its `platform.machine()`.
        flags: All flags that Linux lists for it.
    """
    return [level for level in LEVELS.get(machine, ()) if level.needs <= {*flags}]


def find(weights: torch.dtype, inputs: torch.dtype, store: torch.dtype, lanes: int) -> tuple[Library, str] | None:
    """Return the best library for this processor and its level, if one was made of exactly these sources."""
    for level in runs(platform.machine(), processor_flags()) if FOLDER.is_dir() else ():
        library = whole(FOLDER, file_name(level, defines(weights, inputs, store, lanes, True)))
        if library is not None:
            return library, level.name
    return None


def make(compiler: str, folder: Path) -> None:
    """Compile the libraries that `find` looks for into a new folder, for all levels of this architecture.

    Raises:
        subprocess.CalledProcessError: The compiler failed; its messages are on stderr.
    """
    folder.mkdir(parents=True)
    for level in LEVELS[platform.machine()]:
        for dtypes in DTYPES:
            given = defines(*dtypes, MAX_LANES, True)
            out = folder / "partial"
            subprocess.run(
                command(compiler, out, "-s", "-DPORTABLE", *level.options, *VECTORS, *PARALLEL, *given), check=True
            )
            keep(out, file_name(level, given))


def file_name(level: ProcessorLevel, given: list[str]) -> str:
    return f"{level.name}-{name_of(level.options, VECTORS, PARALLEL, given)}"
