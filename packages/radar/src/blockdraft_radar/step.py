"""Roofline model of a target's forward pass and a drafter's pass on a machine.

A forward pass takes the time of reading weights and caches at the device's bandwidth, or the time of its arithmetic,
whichever is longer, plus the part of the shorter one that does not overlap. Each layer and step adds constants. A
mixture of experts reads every expert that any token uses: with 8 of 128 experts, 4 tokens read 29 and 16 tokens 82.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gguf import GGML_QUANT_SIZES
from pydantic import TypeAdapter

from blockdraft.drafters import DraftCost
from blockdraft.errors import UsageError
from blockdraft_radar.devices import Machine
from blockdraft_radar.drafting import draft_weights, head_weights
from blockdraft_radar.shape import Shape, kv_cache_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

CONSTANTS = Path(__file__).with_name("constants.toml")
# Bits per weight on disk and in memory, including scales. For llama.cpp's mixtures, the average over a large model.
BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp8": 8.0,
    "int8": 8.25,
    "int4": 4.25,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "Q8_0": 8.5,
    "Q6_K": 6.6,
    "Q5_K_M": 5.7,
    "Q4_K_M": 4.85,
    "Q4_0": 4.55,
    "Q4_1": 5.0,
    "Q3_K_M": 3.9,
    "IQ4_XS": 4.3,
}
# Other types of GGUF files, as the package gguf stores them.
for _type, (_values, _bytes) in GGML_QUANT_SIZES.items():
    if _type.name[0] not in "I" or _type.name.startswith("IQ"):  # integers are no weights
        BITS.setdefault(_type.name, 8 * _bytes / _values)
# Arithmetic for each kind of weights: the first type that the device supports. Other kinds are converted to bf16.
ARITHMETIC = {**dict.fromkeys(("fp32", "F32", "F64"), ("fp32",)), "fp8": ("fp8", "bf16", "fp32")}
ARITHMETIC["nvfp4"] = ("fp4", "fp8", "bf16", "fp32")
ON_CPUS = ("int8", "bf16", "fp32")  # for weights of 8 bits or less
UNPACKING = 0.6  # efficiency of arithmetic with quantized weights, which are unpacked first
OF_KERNELS = 0.7  # efficiency of our kernels in whole forward passes, relative to a kernel alone
LINK_US = 15.0  # microseconds per layer for the all-reduce over several devices
EAGER_US = 650.0  # microseconds per layer in eager mode, such as transformers on a GPU
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Constants:
    """Efficiency and overheads of a class of devices.

    Attributes:
        bandwidth, arithmetic, prompt: Efficiency relative to the maker's figures; `prompt` is that of arithmetic over
            many tokens, such as a prompt's.
        overlap: Share of the shorter of reading and arithmetic that overlaps with the longer.
        layer_us, expert_us: Overhead per layer in microseconds, and additional overhead of routed experts.
        recurrent_us: Microseconds of a recurrent layer for each token after the first.
        text_us: Microseconds per sequence of a forward pass, such as for sampling.
        step_ms, draft_ms: Overhead of a forward pass and additional overhead of a drafting step, in milliseconds.
        reported: Whether the values are fitted to measurements of the class.
        devices: Devices with such measurements.
    """

    bandwidth: float
    arithmetic: float
    prompt: float
    overlap: float
    layer_us: float
    expert_us: float
    recurrent_us: float
    text_us: float
    step_ms: float
    draft_ms: float
    reported: bool
    devices: tuple[str, ...] = ()


@cache
def constants() -> dict[str, Constants]:
    """Return the constants by class of devices."""
    return TypeAdapter(dict[str, Constants]).validate_python(tomllib.loads(CONSTANTS.read_text(encoding="utf-8")))


def bits_of(shape: Shape, weights: str) -> float:
    """Return the bits per weight of a kind, or of the model's file for "file".

    Raises:
        UsageError: The kind is unknown.
    """
    if weights == "file":
        return 8 * shape.stored_bytes / shape.parameters
    return BITS[kind_of_weights(weights)]


def kind_of_weights(name: str) -> str:
    """Return the key of `BITS` for a name in small or capital letters. Raise a UsageError if there is none."""
    known = {key.lower(): key for key in reversed(BITS)} | {key: key for key in BITS}
    if (kind := known.get(name, known.get(name.lower()))) is None:
        raise UsageError(f"weights must be one of {', '.join(BITS)}, got {name!r}.")
    return kind


@dataclass(frozen=True)
class Roofline:
    """Durations of forward passes of a model on a machine. `size` is the number of tokens per sequence."""

    shape: Shape
    machine: Machine
    constant: Constants
    bits: float
    weights: str
    context: int
    batch: int
    eager: bool

    def experts(self, size: int) -> float:
        """Return the expected number of routed experts of a layer that any token uses: E (1 - (1 - k/E)^tokens).

        Assumes that each token chooses at random. Neighbouring tokens choose alike, so blocks read somewhat fewer.
        """
        shape = self.shape
        unused = (1 - shape.experts_per_token / shape.experts) ** (size * self.batch)
        return shape.experts * (1 - unused)

    def weights_read(self, size: int) -> float:
        """Return the number of weights that a forward pass reads."""
        shape = self.shape
        embedding = 0 if shape.tied else shape.vocabulary * shape.hidden
        if not shape.experts or shape.experts == shape.experts_per_token:
            return shape.active - embedding
        expert = (shape.parameters - shape.active) / (shape.experts - shape.experts_per_token)
        return shape.parameters - embedding - (shape.experts - self.experts(size)) * expert

    def read_bytes(self, size: int) -> float:
        """Return the bytes of weights and caches that a forward pass reads."""
        states = self.shape.recurrent_layers * self.shape.state_numbers * 4 * (1 + size)
        return self.weights_read(size) * self.bits / 8 + self.batch * (
            kv_cache_bytes(self.shape, self.context) + states
        )

    def flops(self, size: int) -> float:
        """Return the arithmetic operations: two per weight and token, and attention."""
        shape, tokens = self.shape, size * self.batch
        weights = shape.active if shape.tied else shape.active - shape.vocabulary * shape.hidden
        attended = shape.full_layers * self.context + shape.window_layers * min(self.context, shape.window)
        return 2 * tokens * weights + 4 * tokens * attended * shape.heads * shape.head_size

    def memory_seconds(self, size: int) -> float:
        return self._reading(self.read_bytes(size), self.shape.parameters * self.bits / 8)

    def _reading(self, read: float, resident: float) -> float:
        machine = self.machine
        if machine.cache_gbs and resident < 1e6 * machine.cache_mb:
            return read / (1e9 * machine.cache_gbs)
        return read / (1e9 * machine.bandwidth_gbs * (1.0 if machine.measured else self.constant.bandwidth))

    def arithmetic_seconds(self, size: int) -> float:
        return self.flops(size) / self._rate()

    def _rate(self, bits: float | None = None, prompt: bool = False) -> float:
        """Return operations per second with weights of `bits`, or with the target's weights, for few or many tokens."""
        machine, packed = self.machine, (bits or self.bits) < 16
        kinds: Sequence[str] = ARITHMETIC.get("" if bits else self.weights, ("bf16", "fp32"))
        if machine.kind == "cpu":  # 16-bit weights are multiplied in float32 unless bfloat16 is faster
            kinds = ON_CPUS if packed else ("bf16", "fp32") if machine.measured else ("fp32", "bf16")
        rates = {kind: getattr(machine, kind) for kind in (*kinds, "fp32", "bf16")}
        kind, rate = next((kind, float(rate)) for kind, rate in rates.items() if rate is not None)
        if machine.measured:
            return 1e12 * rate * OF_KERNELS * (2 if prompt else 1)
        efficiency = self.constant.prompt if prompt else self.constant.arithmetic
        return 1e12 * rate * efficiency * (UNPACKING if packed and kind not in ("fp8", "fp4") else 1.0)

    def _overlapped(self, reading: float, computing: float) -> float:
        return max(reading, computing) + (1 - self.constant.overlap) * min(reading, computing)

    def _overhead(self, layers: int) -> float:
        """Return the overhead of layers in seconds."""
        overhead = self.constant.layer_us + (LINK_US if self.machine.count > 1 else 0.0)
        return layers * (EAGER_US if self.eager and self.machine.kind != "cpu" else overhead) / 1e6

    def seconds(self, size: int, cost: DraftCost | None = None) -> float:
        """Return the seconds of a step: a forward pass, and drafting if the cost of a drafter is given."""
        shape, constant = self.shape, self.constant
        overhead = self._overhead(shape.layers) + constant.step_ms / 1e3 + self.batch * constant.text_us / 1e6
        if shape.experts:
            overhead += shape.layers * constant.expert_us / 1e6
        overhead += shape.recurrent_layers * (size - 1) * constant.recurrent_us / 1e6
        if cost is not None:
            overhead += self.draft(cost, size) + constant.draft_ms / 1e3
        return self._overlapped(self.memory_seconds(size), self.arithmetic_seconds(size)) + overhead

    def draft(self, cost: DraftCost, size: int) -> float:
        """Return the seconds of drafting: one pass over a block, or one pass per draft token."""
        shape = self.shape
        passes, tokens = (size - 1, self.batch) if cost.serial else (1, size * self.batch)
        network, head = draft_weights(shape, cost), head_weights(shape, cost)
        # Next to a quantized target, our CPU decoder quantizes drafters too; engines on other devices do not.
        quantized = self.bits < 16 and self.machine.kind == "cpu"
        width = self.bits / 8 if quantized else 2.0
        head_bytes = head * (self.bits / 8 if cost.head_vocabulary is None else width)
        window = self.batch * self.context * cost.layers * 2 * shape.hidden // 4 * 2
        reading = self._reading(width * network + head_bytes + window, width * network)
        computing = 2 * tokens * (network / self._rate(8 * width) + head / self._rate())
        return passes * (self._overlapped(reading, computing) + self._overhead(cost.layers))

    def prompt(self) -> float:
        """Return the time to first token of a prompt that fills the context."""
        alone = replace(self, batch=1)
        return alone._overlapped(
            alone.memory_seconds(min(self.context, 256)), alone.flops(self.context) / alone._rate(prompt=True)
        ) + (self._overhead(self.shape.layers) + self.constant.step_ms / 1e3) * -(-self.context // PREFILL_TOKENS)
