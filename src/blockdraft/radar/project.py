"""Projection of memory and speed, plain and drafted, of a model on a device.

A forward of n tokens takes the longer of two times, and some of the shorter: that of reading weights and caches at the
device's bandwidth, and that of its arithmetic. To both come constants for each layer and step. A mixture of experts
reads those that any of the n tokens meets. A cycle that drafts is a forward of a block and a pass of the drafter, and
yields tau tokens. `page/projection.js` is the same in JavaScript; a test holds them together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from blockdraft.errors import UsageError
from blockdraft.models import Drafter
from blockdraft.radar.acceptance import LIKELY, TASKS, Tau, tau_of
from blockdraft.radar.devices import Device
from blockdraft.radar.shape import KEYS_OF_MOE, RECURRENT, Shape

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

CONSTANTS = Path(__file__).with_name("constants.toml")
# Bits of a weight on disk and in memory, scales included; llama.cpp's mixtures as they come out for a large model.
BITS = {
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
ARITHMETIC = {"fp8": ("fp8", "bf16", "fp32"), "nvfp4": ("fp4", "fp8", "bf16", "fp32")}
ON_CPUS = ("int8", "bf16", "fp32")  # of kinds with 8 bits or less
UNPACKING = 0.6  # share of the arithmetic that is left where weights are unpacked for it
SHARE = 0.9  # of a device's memory that may be taken
LINKED = 0.8  # of what several devices could do together, since they wait for each other
LINK_US = 15.0  # of a layer, for the sums over several devices
EAGER_US = 650.0  # of a layer, run operation by operation from Python, as by transformers on a GPU
DRAFT_LAYERS = 5
DRAFT_TAPS = 5
DRAFT_VOCABULARY = 32_000  # of EAGLE-3
SERIAL = {"eagle3", "mtp"}  # kinds that take a pass for each guess
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # blocks that are tried
DEFAULT_RAM_GB = 64.0
PREFILL_TOKENS = 2048
LOSES, WINS = 0.98, 1.02  # of plain decoding, within which nothing is told

Confidence = Literal["measured", "device", "class", "extrapolated"]
# Interval of plain decoding around its projection, by what it rests on. Drafted speed adds that of tau.
BANDS = {"measured": (0.85, 1.2), "device": (0.7, 1.35), "class": (0.6, 1.5), "extrapolated": (0.45, 1.9)}


@dataclass(frozen=True)
class Interval:
    """A projection: the likely value, and what it lies between nine times of ten."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Constants:
    """What devices of a class reach.

    Attributes:
        bandwidth, arithmetic: Shares of what the maker tells.
        overlap: Share of the shorter of the two times that is hidden behind the longer.
        layer_us, expert_us: Microseconds of a layer that are neither, and of one with routed experts besides.
        recurrent_us: Microseconds of a recurrent layer for each token behind the first.
        step_ms, cycle_ms: Milliseconds of a forward outside its layers, and of a drafting cycle besides.
        reported: Whether measurements of the class went into them.
    """

    bandwidth: float
    arithmetic: float
    overlap: float
    layer_us: float
    expert_us: float
    recurrent_us: float
    step_ms: float
    cycle_ms: float
    reported: bool


@dataclass(frozen=True)
class Machine:
    """A device, or several of a kind, as a projection takes it.

    Attributes:
        name: As it was asked for.
        kind: Class of devices.
        memory_gb: Of all of them, in GB (10**9 bytes).
        bandwidth_gbs: Of all of them, in GB/s.
        fp32, bf16, fp8, int8, fp4: Dense arithmetic of all of them, in teraflops; None if there is none.
        count: Number of devices.
        measured: Whether bandwidth and arithmetic were measured, so that the class has no share in them.
        cache_mb, cache_gbs: Size of a processor's largest cache, and its bandwidth; 0 if unknown.
        note: What `why` tells of it besides.
    """

    name: str
    kind: str
    memory_gb: float
    bandwidth_gbs: float
    fp32: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None
    count: int = 1
    measured: bool = False
    cache_mb: float = 0.0
    cache_gbs: float = 0.0
    note: str | None = None


@dataclass(frozen=True)
class Row:
    """One projection. Speeds are tokens per second of all texts of the batch together, as if the memory sufficed.

    Attributes:
        fits: Whether it fits the device's memory, with its drafter.
        memory_bytes: Weights, caches and workspace of target and drafter.
        first_token_seconds: For a prompt that fills the context, alone.
        drafted: None if nothing is drafted, as with a context of one block.
        block_size: Tokens of a block that are fastest, anchor included; 1 if nothing is drafted.
        why: What the figures come from.
    """

    device: str
    model: str
    weights: str
    context: int
    batch: int
    task: str
    fits: bool
    memory_bytes: int
    first_token_seconds: float
    plain: Interval
    drafted: Interval | None
    block_size: int
    confidence: Confidence
    why: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)


@cache
def constants() -> dict[str, Constants]:
    """Constants by class of devices."""
    return TypeAdapter(dict[str, Constants]).validate_python(tomllib.loads(CONSTANTS.read_text(encoding="utf-8")))


def machine_of(device: Device, count: int = 1, ram_gb: float | None = None) -> Machine:
    """A device of the table, several times.

    Args:
        ram_gb: Memory of a CPU, or of a chip that shares it; None is the table's, or `DEFAULT_RAM_GB`.

    Raises:
        UsageError: There is no memory, or no device.
    """
    if ram_gb is not None and not ram_gb > 0:
        raise UsageError(f"ram is {ram_gb:g} GB; it has to be more than 0.")
    if count < 1:
        raise UsageError(f"{count} devices cannot run a model; give 1 or more.")
    shared = device.kind in ("cpu", "apple")
    memory = (ram_gb if shared else None) or device.memory_gb or DEFAULT_RAM_GB
    scale = 1.0 if count == 1 else LINKED * count
    return Machine(
        name=device.name if count == 1 else f"{count}x {device.name}",
        kind=device.kind,
        memory_gb=memory * count,
        bandwidth_gbs=device.bandwidth_gbs * scale,
        fp32=_times(device.fp32, scale),
        bf16=_times(device.bf16, scale),
        fp8=_times(device.fp8, scale),
        int8=_times(device.int8, scale),
        fp4=_times(device.fp4, scale),
        count=count,
    )


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


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


def project(
    shape: Shape,
    machine: Machine,
    weights: str = "bf16",
    context: int = 4096,
    batch: int = 1,
    task: str = "mean",
    *,
    drafter: Drafter | None = None,
    block_size: int | None = None,
    tau: float | None = None,
    eager: bool = False,
    constant: Constants | None = None,
    known_devices: Iterable[str] = (),
) -> Row:
    """Projection of a model on a machine.

    Args:
        weights: One of `BITS`, or "file" for those of a GGUF file.
        context: Tokens of each text.
        batch: Texts that are decoded together.
        task: One of `acceptance.TASKS`.
        drafter: By default the fastest of the published ones, or one that is still to be trained.
        block_size: Tokens of a block; by default the fastest.
        tau: tau that was measured with `block_size`, in the place of published ones.
        eager: Whether operations are started one by one, as by transformers.
        constant: What the class reaches, in the place of `constants`.
        known_devices: Names of devices whose measurements went into the constants.

    Raises:
        UsageError: The context is longer than the model's, or an argument is not positive.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it has to be 1 or more.")
    if shape.context and context > shape.context:
        raise UsageError(
            f"context is {context}, but {shape.name} was made for {shape.context} tokens; give {shape.context} or less."
        )
    own = constant or constants()[machine.kind]
    bits = bits_of(shape, weights)
    step = _Step(shape, machine, own, bits, weights, context, batch, eager)
    plain = step.forward(1)
    candidates: Sequence[Drafter | None] = [drafter] if drafter else (shape.drafters or (None,))
    best: _Choice | None = None
    for each in candidates:
        found = _choose(step, each, task, block_size, tau)
        if best is None or found.speed > best.speed:
            best = found
    assert best is not None
    drafting = best.size <= context
    memory = memory_of(shape, bits, context, batch, best.size if drafting else 1, best.kind if drafting else None)
    confidence: Confidence = "extrapolated"
    if machine.measured:
        confidence = "measured"
    elif machine.name.split("x ")[-1] in known_devices:
        confidence = "device"
    elif own.reported:
        confidence = "class"
    low, high = BANDS[confidence]
    speed = batch / plain
    drafted = None
    if drafting:
        # The two sides of an interval are independent of each other: that of the machine, and that of tau.
        low_tau, mid_tau, high_tau = best.taus
        down = ((1 - low) ** 2 + (1 - low_tau / mid_tau) ** 2) ** 0.5
        up = ((high - 1) ** 2 + (high_tau / mid_tau - 1) ** 2) ** 0.5
        drafted = Interval(best.speed * max(1 - down, 0.1), best.speed, best.speed * (1 + up))
    gain = best.speed / speed if drafting else 1.0
    read, flops = step.read_bytes(1), step.flops(1)
    why = {
        "step_seconds": plain,
        "cycle_seconds": best.seconds if drafting else None,
        "read_bytes": int(read),
        "flops": flops,
        "bound": "memory" if step.memory_seconds(1) >= step.arithmetic_seconds(1) else "arithmetic",
        "block_bound": "memory"
        if step.memory_seconds(best.size) >= step.arithmetic_seconds(best.size)
        else "arithmetic",
        "experts_read": None if not shape.experts else [round(step.experts(1), 1), round(step.experts(best.size), 1)],
        "weight_bytes": memory["weights"],
        "drafter_bytes": memory["drafter"],
        "cache_bytes": memory["caches"],
        "workspace_bytes": memory["workspace"],
        "drafter": best.drafter.hub if best.drafter else None,
        "drafter_kind": best.kind if drafting else None,
        "tau": None if not drafting else dict(zip(("low", "mid", "high"), best.taus, strict=True)),
        "tau_source": None if not drafting else best.tau.where or best.tau.source,
        "speedup": gain if drafting else None,
        "drafting": "loses" if gain < LOSES else "wins" if gain > WINS else "neither",
        "note": machine.note,
    }
    return Row(
        device=machine.name,
        model=shape.name,
        weights=weights,
        context=context,
        batch=batch,
        task=task,
        fits=sum(memory.values()) <= SHARE * machine.memory_gb * 1e9,
        memory_bytes=sum(memory.values()),
        first_token_seconds=step.prompt(),
        plain=Interval(speed * low, speed, speed * high),
        drafted=drafted,
        block_size=best.size if drafting else 1,
        confidence=confidence,
        why=why,
    )


def batch_for(speed: float, shape: Shape, machine: Machine, most: int = 4096, **options: Any) -> int | None:
    """Smallest power of two of texts that reach a speed together, drafted or plain, and fit; None if none do."""
    batch = 1
    while batch <= most:
        row = project(shape, machine, batch=batch, **options)
        if not row.fits:
            return None
        if max(row.plain.mid, row.drafted.mid if row.drafted else 0.0) >= speed:
            return batch
        batch *= 2
    return None


@dataclass(frozen=True)
class _Choice:
    """A drafter and the block size that is fastest with it."""

    drafter: Drafter | None
    kind: str
    tau: Tau
    taus: tuple[float, float, float]
    size: int
    seconds: float
    speed: float


def _choose(step: _Step, drafter: Drafter | None, task: str, block_size: int | None, measured: float | None) -> _Choice:
    kind = drafter.kind if drafter else LIKELY
    tau = tau_of(drafter, task)
    if measured is not None:
        size = block_size or tau.block_size
        tau = Tau(measured, measured, measured, size, "published", None)
    most = max(tau.block_size, (drafter.block_size if drafter else None) or 0)
    sizes = [block_size] if block_size else [size for size in SIZES if size <= most]
    best: _Choice | None = None
    for size in sizes:
        taus = tau.at(size)
        seconds = step.forward(size) + step.draft(kind, size) + step.own.cycle_ms / 1e3
        found = _Choice(drafter, kind, tau, taus, size, seconds, step.batch * taus[1] / seconds)
        if best is None or found.speed > best.speed:
            best = found
    assert best is not None
    return best


@dataclass(frozen=True)
class _Step:
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
        kinds: Sequence[str] = ("bf16", "fp32")
        if packed:
            kinds = ON_CPUS if machine.kind == "cpu" else ARITHMETIC.get(self.weights, kinds)
        rates = {kind: getattr(machine, kind) for kind in (*kinds, "fp32", "bf16")}
        kind, rate = next((kind, float(rate)) for kind, rate in rates.items() if rate is not None)
        share = 1.0 if machine.measured else self.own.arithmetic
        return 1e12 * rate * share * (UNPACKING if packed and kind in ("bf16", "fp32") else 1.0)

    def _together(self, reading: float, computing: float) -> float:
        return max(reading, computing) + (1 - self.own.overlap) * min(reading, computing)

    def _layers(self, layers: int) -> float:
        """Seconds of layers outside of their bytes and arithmetic."""
        each = self.own.layer_us + (LINK_US if self.machine.count > 1 else 0.0)
        return layers * (EAGER_US if self.eager and self.machine.kind != "cpu" else each) / 1e6

    def forward(self, size: int) -> float:
        """Seconds of a forward."""
        shape, own = self.shape, self.own
        outside = self._layers(shape.layers) + own.step_ms / 1e3
        if shape.experts:
            outside += shape.layers * own.expert_us / 1e6
        outside += shape.recurrent_layers * (size - 1) * own.recurrent_us / 1e6
        return self._together(self.memory_seconds(size), self.arithmetic_seconds(size)) + outside

    def draft(self, kind: str, size: int) -> float:
        """Seconds of drafting: one pass over a block, or one for each guess."""
        shape, serial = self.shape, kind in SERIAL
        passes, tokens = (size - 1, self.batch) if serial else (1, size * self.batch)
        layers = draft_layers(kind)
        network, head = draft_weights(shape, kind), head_weights(shape, kind)
        head_bytes = head * (2.0 if kind == "eagle3" else self.bits / 8)
        window = self.batch * self.context * layers * 2 * shape.hidden // 4 * 2
        reading = self._reading(2.0 * network + head_bytes + window, 2.0 * network)
        computing = 2 * tokens * (network / self._rate(16) + head / self._rate())
        return passes * (self._together(reading, computing) + self._layers(layers))

    def prompt(self) -> float:
        """Seconds to the first token of a text that fills the context."""
        alone = replace(self, batch=1)
        return alone._together(
            alone.memory_seconds(min(self.context, 256)), alone.flops(self.context) / 2 / alone._rate()
        ) + (self._layers(self.shape.layers) + self.own.step_ms / 1e3) * -(-self.context // PREFILL_TOKENS)


def draft_layers(kind: str) -> int:
    """Layers of a drafter's network."""
    return 1 if kind in SERIAL or kind == "medusa" else DRAFT_LAYERS


def draft_weights(shape: Shape, kind: str) -> int:
    """Weights of a drafter's network without embedding and head, which are the target's: layers as wide as the
    target's, and the fusion of what it taps."""
    attention = 2 * shape.hidden * shape.heads * shape.head_size + shape.hidden * shape.hidden // 2
    width = min(shape.intermediate, 4 * shape.hidden) if not shape.experts else 3 * shape.hidden
    return draft_layers(kind) * (attention + 3 * shape.hidden * width) + DRAFT_TAPS * shape.hidden * shape.hidden


def head_weights(shape: Shape, kind: str) -> int:
    """Weights of the output head that a drafter runs."""
    return shape.hidden * (min(DRAFT_VOCABULARY, shape.vocabulary) if kind == "eagle3" else shape.vocabulary)


def cache_of(shape: Shape, tokens: int) -> int:
    """Bytes of the keys and values of a text in bf16, without recurrent states."""
    full = shape.full_layers * shape.full_numbers * tokens
    return 2 * (full + shape.window_layers * shape.window_numbers * min(tokens, shape.window))


def memory_of(shape: Shape, bits: float, context: int, batch: int, size: int, kind: str | None) -> dict[str, int]:
    """Bytes of an engine that decodes so many texts, by the sums of `Engine.memory_bytes`.

    Args:
        bits: Of a weight.
        size: Nodes of a text in a forward.
        kind: Kind of drafter; None for none.
    """
    from blockdraft.engine.memory import Memory

    target: Any = _Target(shape, context)
    drafter: Any = _Drafter(shape, kind)
    memory = Memory(target, drafter, batch, size, min(PREFILL_TOKENS, context), False)
    slots = batch * (context + size)
    weights = int(shape.parameters * bits / 8)
    extra = 0 if kind is None else 2 * draft_weights(shape, kind)
    extra += 2 * head_weights(shape, kind) if kind == "eagle3" else 0
    return {
        "weights": weights,
        "drafter": extra,
        "caches": memory.caches(slots),
        "workspace": memory.workspace(slots),
    }


class _Target:
    """What `Memory` asks of a target, of one that is not there."""

    def __init__(self, shape: Shape, context: int) -> None:
        import torch

        self.shape, self.max_context = shape, context
        self.vocab_size, self.hidden_size = shape.vocabulary, shape.hidden
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")

    def row_slots(self, tokens: int) -> int:
        return tokens

    def cache_bytes(self, batch: int, capacity: int) -> int:
        rows = -(-capacity // self.max_context) if capacity else 0
        of_slots = rows * cache_of(self.shape, -(-capacity // rows)) if rows else 0
        return batch * (of_slots + 4 * self.shape.recurrent_layers * self.shape.state_numbers)

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        shape = self.shape
        widths = 4 * shape.hidden + 3 * shape.intermediate + 3 * shape.heads * shape.head_size
        states = 4 * shape.recurrent_layers * shape.state_numbers * batch * min(nodes, 64)
        return 2 * batch * nodes * widths + states


class _Drafter:
    """What `Memory` asks of a drafter, of one that is not there."""

    device = None

    def __init__(self, shape: Shape, kind: str | None) -> None:
        self.shape, self.kind = shape, kind
        self.parts = [self]
        self.taps = range(DRAFT_TAPS if kind else 0)

    def state_bytes(self, batch: int, slots: int) -> int:
        layers = 0 if self.kind is None else draft_layers(self.kind)
        return batch * slots * layers * 2 * (self.shape.hidden // 4) * 2

    def workspace_bytes(self, batch: int, observed: int, reached: int) -> int:
        return 0 if self.kind is None else 2 * observed * 4 * self.shape.hidden


def data_of_page(shapes: Iterable[Shape], machines: Iterable[Machine], known_devices: Iterable[str] = ()) -> str:
    """What the page computes with, in JSON. `project` says what known devices are."""
    own = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int | float)}
    drafting = []
    for shape in shapes:
        choices: Sequence[Drafter | None] = shape.drafters or (None,)
        held = {field.name: getattr(shape, field.name) for field in fields(shape) if field.name != "drafters"}
        drafting.append({**held, "drafters": [_of_page(each) for each in choices]})
    return json.dumps(
        {
            "numbers": own,
            "bits": BITS,
            "bands": BANDS,
            "arithmetic": ARITHMETIC,
            "on_cpus": ON_CPUS,
            "sizes": SIZES,
            "serial": sorted(SERIAL),
            "keys_of_moe": KEYS_OF_MOE,
            "recurrent": sorted(RECURRENT),
            "known_devices": sorted(known_devices),
            "tasks": TASKS,
            "constants": {name: asdict(each) for name, each in constants().items()},
            "machines": [asdict(each) for each in machines],
            "models": drafting,
            "unknown": _of_page(None),
        }
    )


def _of_page(drafter: Drafter | None) -> dict[str, Any]:
    size = drafter.block_size if drafter else None
    return {
        "hub": drafter.hub if drafter else None,
        "kind": drafter.kind if drafter else LIKELY,
        "block_size": size,
        "tau": {task: asdict(tau_of(drafter, task)) for task in TASKS},
    }
