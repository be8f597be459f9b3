"""Seconds of a target's forward and of a drafter's pass on a machine.

A forward of n tokens takes the longer of two times, and some of the shorter: that of reading weights and caches at the
device's bandwidth, and that of its arithmetic. To both come constants for each layer and step. A mixture of experts
reads those that any of the n tokens meets. `page/projection.js` is the same in JavaScript; a test holds them together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from blockdraft.drafters import DraftCost
from blockdraft.errors import UsageError
from blockdraft.radar.devices import Machine
from blockdraft.radar.drafting import draft_weights, head_weights
from blockdraft.radar.shape import Shape, cache_of

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

CONSTANTS = Path(__file__).with_name("constants.toml")
# Bits of a weight on disk and in memory, scales included; llama.cpp's mixtures as they come out for a large model.
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
# Arithmetic that a kind of weights is multiplied in, the first that a device has; all others are turned into bf16.
ARITHMETIC = {"fp32": ("fp32",), "fp8": ("fp8", "bf16", "fp32"), "nvfp4": ("fp4", "fp8", "bf16", "fp32")}
ON_CPUS = ("int8", "bf16", "fp32")  # of kinds with 8 bits or less
UNPACKING = 0.6  # share of the arithmetic that is left where weights of few bits are unpacked for it
OF_KERNELS = 0.7  # share of the arithmetic of our kernels alone that they reach in whole forwards
LINK_US = 15.0  # of a layer, for the sums over several devices
EAGER_US = 650.0  # of a layer, run operation by operation from Python, as by transformers on a GPU
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Constants:
    """What devices of a class reach.

    Attributes:
        bandwidth, arithmetic: Shares of what the maker tells.
        overlap: Share of the shorter of the two times that is hidden behind the longer.
        layer_us, expert_us: Microseconds of a layer that are neither, and of one with routed experts besides.
        recurrent_us: Microseconds of a recurrent layer for each token behind the first.
        text_us: Microseconds of each text of a batch in a forward, such as for taking its token.
        step_ms, cycle_ms: Milliseconds of a forward outside its layers, and of a drafting cycle besides.
        reported: Whether measurements of the class went into them.
        devices: Devices of the class whose measurements did.
    """

    bandwidth: float
    arithmetic: float
    overlap: float
    layer_us: float
    expert_us: float
    recurrent_us: float
    text_us: float
    step_ms: float
    cycle_ms: float
    reported: bool
    devices: tuple[str, ...] = ()


@cache
def constants() -> dict[str, Constants]:
    """Constants by class of devices."""
    return TypeAdapter(dict[str, Constants]).validate_python(tomllib.loads(CONSTANTS.read_text(encoding="utf-8")))


def bits_of(shape: Shape, weights: str) -> float:
    """Bits of a weight: of the file if there is one, or else of the kind.

    Raises:
        UsageError: Nobody knows the kind.
    """
    if weights == "file":
        return 8 * shape.stored_bytes / shape.parameters
    if weights not in BITS:
        raise UsageError(f"{weights!r} is no kind of weights; those are {', '.join(BITS)}.")
    return BITS[weights]


@dataclass(frozen=True)
class Step:
    """Seconds of forwards. `size` is always the number of tokens of each text."""

    shape: Shape
    machine: Machine
    own: Constants
    bits: float
    weights: str
    context: int
    batch: int
    eager: bool

    def experts(self, size: int) -> float:
        """Routed experts of a layer that any of the tokens meets, as if they chose at random."""
        shape = self.shape
        missed = (1 - shape.experts_per_token / shape.experts) ** (size * self.batch)
        return shape.experts * (1 - missed)

    def met_weights(self, size: int) -> float:
        """Weights that are read."""
        shape = self.shape
        outside = shape.parameters if shape.tied else shape.parameters - shape.vocabulary * shape.hidden
        if not shape.experts or shape.experts == shape.experts_per_token:
            return outside
        an_expert = (shape.parameters - shape.active) / (shape.experts - shape.experts_per_token)
        return outside - (shape.experts - self.experts(size)) * an_expert

    def read_bytes(self, size: int) -> float:
        """Bytes of weights and caches that are read."""
        states = self.shape.recurrent_layers * self.shape.state_numbers * 4 * (1 + size)
        return self.met_weights(size) * self.bits / 8 + self.batch * (cache_of(self.shape, self.context) + states)

    def flops(self, size: int) -> float:
        """Operations of the arithmetic, two for each weight and token, and of attention."""
        shape, tokens = self.shape, size * self.batch
        weights = shape.active if shape.tied else shape.active - shape.vocabulary * shape.hidden
        seen = shape.full_layers * self.context + shape.window_layers * min(self.context, shape.window)
        return 2 * tokens * weights + 4 * tokens * seen * shape.heads * shape.head_size

    def memory_seconds(self, size: int) -> float:
        """Seconds of reading."""
        return self._reading(self.read_bytes(size), self.shape.parameters * self.bits / 8)

    def _reading(self, read: float, resident: float) -> float:
        machine = self.machine
        if machine.cache_gbs and resident < 1e6 * machine.cache_mb:
            return read / (1e9 * machine.cache_gbs)
        return read / (1e9 * machine.bandwidth_gbs * (1.0 if machine.measured else self.own.bandwidth))

    def arithmetic_seconds(self, size: int) -> float:
        """Seconds of arithmetic."""
        return self.flops(size) / self._rate()

    def _rate(self, bits: float | None = None) -> float:
        """Operations a second, with the target's weights, or others of so many bits."""
        machine, packed = self.machine, (bits or self.bits) < 16
        kinds: Sequence[str] = ARITHMETIC.get("" if bits else self.weights, ("bf16", "fp32"))
        if machine.kind == "cpu":  # weights of 16 bits are multiplied in float32 there, but where bfloat16 is faster
            kinds = ON_CPUS if packed else ("bf16", "fp32") if machine.measured else ("fp32", "bf16")
        rates = {kind: getattr(machine, kind) for kind in (*kinds, "fp32", "bf16")}
        kind, rate = next((kind, float(rate)) for kind, rate in rates.items() if rate is not None)
        if machine.measured:
            return 1e12 * rate * OF_KERNELS
        return 1e12 * rate * self.own.arithmetic * (UNPACKING if packed and kind not in ("fp8", "fp4") else 1.0)

    def _together(self, reading: float, computing: float) -> float:
        return max(reading, computing) + (1 - self.own.overlap) * min(reading, computing)

    def _layers(self, layers: int) -> float:
        """Seconds of layers outside of their bytes and arithmetic."""
        each = self.own.layer_us + (LINK_US if self.machine.count > 1 else 0.0)
        return layers * (EAGER_US if self.eager and self.machine.kind != "cpu" else each) / 1e6

    def forward(self, size: int) -> float:
        """Seconds of a forward."""
        shape, own = self.shape, self.own
        outside = self._layers(shape.layers) + own.step_ms / 1e3 + self.batch * own.text_us / 1e6
        if shape.experts:
            outside += shape.layers * own.expert_us / 1e6
        outside += shape.recurrent_layers * (size - 1) * own.recurrent_us / 1e6
        return self._together(self.memory_seconds(size), self.arithmetic_seconds(size)) + outside

    def draft(self, cost: DraftCost, size: int) -> float:
        """Seconds of drafting: one pass over a block, or one for each guess."""
        shape = self.shape
        passes, tokens = (size - 1, self.batch) if cost.serial else (1, size * self.batch)
        network, head = draft_weights(shape, cost), head_weights(shape, cost)
        # Our decoder rounds drafters beside a target of few bits as it is; other devices' engines do not.
        rounded = self.bits < 16 and self.machine.kind == "cpu"
        width = self.bits / 8 if rounded else 2.0
        head_bytes = head * (self.bits / 8 if cost.head_vocabulary is None else width)
        window = self.batch * self.context * cost.layers * 2 * shape.hidden // 4 * 2
        reading = self._reading(width * network + head_bytes + window, width * network)
        computing = 2 * tokens * (network / self._rate(8 * width) + head / self._rate())
        return passes * (self._together(reading, computing) + self._layers(cost.layers))

    def prompt(self) -> float:
        """Seconds to the first token of a text that fills the context."""
        alone = replace(self, batch=1)
        return alone._together(
            alone.memory_seconds(min(self.context, 256)), alone.flops(self.context) / 2 / alone._rate()
        ) + (self._layers(self.shape.layers) + self.own.step_ms / 1e3) * -(-self.context // PREFILL_TOKENS)
