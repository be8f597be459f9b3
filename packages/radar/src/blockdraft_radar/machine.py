"""This machine: its GPUs as reported by drivers, and its processors, measured in about two seconds."""

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
from blockdraft_radar.devices import Device, Machine, check_ram, find, machine_of

CACHES, OWN_SHARE = Path("/sys/devices/system/cpu/cpu0/cache"), 0.5  # the largest cache is shared with other programs
HERE = "here"  # name of this machine for `--device`
COMMAND_SECONDS = 10.0  # timeout of a driver's tool
LARGE, SMALL = 2**28, 2**22  # bytes to read for measuring memory and cache bandwidth
SIDE, TOKENS = 1024, 16  # size of the square matrix that is multiplied, and number of tokens
GROUP = 32  # weights that share a scale, as in most quantized files
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")


def gpus() -> list[str]:
    """Return the names of this machine's GPUs, from nvidia-smi, rocm-smi and macOS."""
    return [*_nvidia(), *_amd(), *_apple()]


def _nvidia() -> Iterator[str]:
    yield from _lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def _amd() -> Iterator[str]:
    # Example: "GPU[0] : Card Series: AMD Instinct MI300X"; older versions print "Card series".
    for line in _lines("rocm-smi", "--showproductname"):
        if "card series" in line.lower():
            yield line.rsplit(":", 1)[1].strip()


def _apple() -> Iterator[str]:
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return
    yield from _lines("sysctl", "-n", "machdep.cpu.brand_string")


def _lines(*command: str) -> list[str]:
    """Return the lines that a tool prints, or nothing if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return []
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in process.stdout.splitlines() if line.strip()]


def here(report: Callable[[str], None] = lambda line: None, ram_gb: float | None = None) -> list[Machine]:
    """Return this machine's GPUs that are in the table, and its processors.

    Args:
        report: Called with a message for each GPU that is not in the table.
        ram_gb: Memory to assume, in GB; None uses all memory.

    Raises:
        UsageError: `ram_gb` is not positive.
    """
    machines: list[Machine] = []
    names = gpus()
    for name in dict.fromkeys(names):
        try:
            machines.append(machine_of(device_here(name), names.count(name), ram_gb))
        except UsageError as error:
            report(f"This machine's {name} is skipped: {error}")
    return [*machines, measured(ram_gb)]


def device_here(name: str) -> Device:
    """Return the device for a driver's name, with the number of GPU cores for Apple's chips.

    Raises:
        UsageError: The table has no such device.
    """
    if name.startswith("Apple"):
        cores = [line.rsplit(":", 1)[1] for line in _lines("system_profiler", "SPDisplaysDataType") if "Cores" in line]
        if cores:
            try:
                return find(f"{name} {cores[0].strip()}-core")
            except UsageError:
                pass  # chips with only one number of cores have the plain name
    return find(name)


def measured(ram_gb: float | None = None) -> Machine:
    """Measure the bandwidth and arithmetic of this machine's processors, in about two seconds.

    Args:
        ram_gb: Memory to assume, in GB; None uses all memory.

    Raises:
        UsageError: `ram_gb` is not positive.
    """
    check_ram(ram_gb)
    import torch

    rates = {name: 2.0 * TOKENS * SIDE**2 / _fastest(product) for name, product in _products().items()}
    large, small = torch.ones(LARGE // 4), torch.ones(SMALL // 4)
    # Sums of small tensors run on one thread, so this is the cache bandwidth of one core.
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
    """Return the decoder's matrix products by the kind of weights and inputs."""
    import torch

    from blockdraft.kernels.cpu.build import build
    from blockdraft.machine import multiplies_bfloat16
    from blockdraft.nn.packed import PackedLinear
    from blockdraft.nn.quantization import QuantizedWeight

    weight, x = torch.rand(SIDE, SIDE).bfloat16(), torch.rand(TOKENS, SIDE)
    codes = torch.randint(-8, 8, (SIDE, SIDE), dtype=torch.int8)
    quantized = QuantizedWeight(codes, torch.rand(SIDE, SIDE // GROUP).half(), None, 4)
    kinds: dict[str, tuple[torch.Tensor | QuantizedWeight, torch.dtype]]
    kinds = {"float32": (weight, torch.float32), "4 bits": (quantized, torch.float32)}
    if multiplies_bfloat16():
        kinds["bfloat16"] = weight, torch.bfloat16

    def product(weight: torch.Tensor | QuantizedWeight, inputs: torch.dtype) -> Callable[[], object]:
        layer = PackedLinear(weight.to(inputs) if isinstance(weight, torch.Tensor) else weight)
        library = build(torch.bfloat16, inputs, integers=True, inputs=inputs).library()
        if library is None:  # then the decoder uses torch too
            converted = x.to(inputs)
            return lambda: layer(converted)
        packed, out = layer.pack(library), torch.empty(TOKENS, SIDE)
        return lambda: packed(x, out)

    return {name: product(*kind) for name, kind in kinds.items()}


def _fastest(run: Callable[[], object], seconds: float = 0.35) -> float:
    """Return the minimum duration of a call, over at least three calls and this many seconds."""
    run()
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best, calls = min(best, time.perf_counter() - began), calls + 1
    return best


def _cache_mb() -> float:
    """Return this program's share of the largest cache in MB on Linux, or 0."""
    sizes = [file.read_text().strip().removesuffix("K") for file in CACHES.glob("index*/size")]
    return OWN_SHARE * max((int(size) * 1024 / 1e6 for size in sizes if size.isdigit()), default=0.0)
