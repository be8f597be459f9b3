"""This machine as a device: what its drivers tell, and two seconds of measuring its processors."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from blockdraft.errors import UsageError
from blockdraft.machine import processor_flags, processor_name
from blockdraft.radar.devices import Device, Machine, find, machine_of

CACHES, OWN_SHARE = Path("/sys/devices/system/cpu/cpu0/cache"), 0.5  # the largest cache is shared with others
HERE = "here"  # name of this machine's processors for `--device`
COMMAND_SECONDS = 10.0  # that a driver's tool may take
LARGE, SMALL = 2**28, 2**22  # bytes that are read to measure memory, and a cache
SIDE, ROWS = 1024, 16  # of the matrix that is multiplied, and tokens
GROUP = 32  # weights that share a scale, as in most files of few bits
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")


def gpus() -> list[str]:
    """Names of this machine's GPUs, as NVIDIA's and AMD's tools and Apple's system tell them, one for each."""
    return [*_nvidia(), *_amd(), *_apple()]


def _nvidia() -> Iterator[str]:
    yield from _lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def _amd() -> Iterator[str]:
    # Lines are such as "GPU[0] : Card Series: AMD Instinct MI300X", older ones "Card series".
    for line in _lines("rocm-smi", "--showproductname"):
        if "card series" in line.lower():
            yield line.rsplit(":", 1)[1].strip()


def _apple() -> Iterator[str]:
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return
    yield from _lines("sysctl", "-n", "machdep.cpu.brand_string")


def _lines(*command: str) -> list[str]:
    """Lines that a tool prints; none where there is no such tool, or it fails."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def here(tell: Callable[[str], None] = lambda line: None, ram_gb: float | None = None) -> list[Machine]:
    """This machine: its GPUs that the table knows, and its processors, measured.

    Args:
        tell: Called with what is not in the table.
        ram_gb: Memory to reckon with, in GB; None is all there is.

    Raises:
        UsageError: The memory is not positive.
    """
    found: list[Machine] = []
    names = gpus()
    for name in dict.fromkeys(names):
        try:
            found.append(machine_of(device_here(name), names.count(name), ram_gb))
        except UsageError as error:
            tell(f"This machine's {name} is left out: {error}")
    return [*found, measured(ram_gb)]


def device_here(name: str) -> Device:
    """Device of the table that a driver names, with the number of graphics cores for Apple's.

    Raises:
        UsageError: The table has none.
    """
    if name.startswith("Apple"):
        cores = [line.rsplit(":", 1)[1] for line in _lines("system_profiler", "SPDisplaysDataType") if "Cores" in line]
        if cores:
            try:
                return find(f"{name} {cores[0].strip()}-core")
            except UsageError:
                pass  # the plain name stands for the only size of some chips
    return find(name)


def measured(ram_gb: float | None = None) -> Machine:
    """This machine's processors, with bandwidth and arithmetic as they are measured in about two seconds.

    Args:
        ram_gb: Memory to reckon with, in GB; None is all there is.

    Raises:
        UsageError: The memory is not positive.
    """
    if ram_gb is not None and not ram_gb > 0:
        raise UsageError(f"ram is {ram_gb:g} GB; it has to be more than 0.")
    import torch

    rates = {name: 2.0 * ROWS * SIDE**2 / _fastest(product) for name, product in _products().items()}
    large, small = torch.ones(LARGE // 4), torch.ones(SMALL // 4)
    # Sums run on several threads for large tensors only, so the cache is read by one.
    memory, cached = LARGE / _fastest(lambda: large.dot(large)), SMALL / _fastest(lambda: small.sum())
    cache = _cache_mb()
    flags = processor_flags()
    instructions = [name for name in INSTRUCTIONS if name in flags]
    threads = torch.get_num_threads()
    total = psutil.virtual_memory().total / 1e9
    return Machine(
        name=processor_name(),
        kind="cpu",
        memory_gb=ram_gb or total,
        bandwidth_gbs=memory / 1e9,
        fp32=rates["float32"] / 1e12,
        bf16=rates["bfloat16"] / 1e12 if "bfloat16" in rates else None,
        int8=rates["4 bits"] / 1e12,
        measured=True,
        cache_mb=cache if cached > memory else 0.0,
        cache_gbs=cached * threads / 1e9 if cached > memory else 0.0,
        note=f"{threads} threads, {', '.join(instructions) or platform.machine()}; measured now: "
        f"{memory / 1e9:.0f} GB/s, GFLOP/s: {', '.join(f'{rate / 1e9:.0f} {name}' for name, rate in rates.items())}",
    )


def _products() -> dict[str, Callable[[], object]]:
    """Products as the decoder computes them, by the kind of weights and inputs."""
    import torch

    from blockdraft.kernels.cpu.build import build
    from blockdraft.machine import multiplies_bfloat16
    from blockdraft.nn.packed import PackedLinear
    from blockdraft.nn.quantization import QuantizedWeight

    weight, x = torch.rand(SIDE, SIDE).bfloat16(), torch.rand(ROWS, SIDE)
    codes = torch.randint(-8, 8, (SIDE, SIDE), dtype=torch.int8)
    few = QuantizedWeight(codes, torch.rand(SIDE, SIDE // GROUP).half(), None, 4)
    kinds: dict[str, tuple[torch.Tensor | QuantizedWeight, torch.dtype]]
    kinds = {"float32": (weight, torch.float32), "4 bits": (few, torch.float32)}
    if multiplies_bfloat16():
        kinds["bfloat16"] = weight, torch.bfloat16

    def product(weight: torch.Tensor | QuantizedWeight, inputs: torch.dtype) -> Callable[[], object]:
        layer, given = PackedLinear(weight.to(inputs) if isinstance(weight, torch.Tensor) else weight), x.to(inputs)
        library = build(torch.bfloat16, inputs, integers=True, inputs=inputs).library()
        if library is None:  # torch's operations, as the decoder then runs
            return lambda: layer(given)
        packed, out = layer.pack(library), torch.empty(ROWS, SIDE)
        return lambda: packed(x, out)

    return {name: product(*kind) for name, kind in kinds.items()}


def _fastest(run: Callable[[], object], seconds: float = 0.35) -> float:
    """Least seconds of a call among those that fit the time, three at least."""
    run()
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best, calls = min(best, time.perf_counter() - began), calls + 1
    return best


def _cache_mb() -> float:
    """Size of this program's share of the largest cache in MB, as Linux tells it; 0 elsewhere."""
    sizes = [file.read_text().strip().removesuffix("K") for file in CACHES.glob("index*/size")]
    return OWN_SHARE * max((int(size) * 1024 / 1e6 for size in sizes if size.isdigit()), default=0.0)
