"""Cost of training a drafter: hours for responses, hidden states and training, disk space and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blockdraft.errors import UsageError
from blockdraft_radar.devices import Machine
from blockdraft_radar.drafting import DEFAULT_KIND, cost_of, draft_weights
from blockdraft_radar.project import SHARE, project
from blockdraft_radar.shape import Shape

MAX_BATCH = 256  # responses generated at once per device
TRAINING_SHARE = 0.43  # efficiency relative to dense bfloat16 arithmetic (Domino's trainer on H200: 43.5 to 44.1 %)
FORWARD_BACKWARD = 6  # operations per trained weight and position; the frozen head takes as many, computed twice
OPTIMIZER_BYTES = 16  # per trained weight: bfloat16 and float32 copies, gradient, AdamW's two moments
ACTIVATIONS = (16, 6)  # numbers kept per position and layer, in multiples of the hidden size and of the MLP width
HIDDEN_STATE_BYTES = 2


@dataclass(frozen=True)
class TrainPlan:
    """Size of a training run.

    Attributes:
        samples: Number of prompts.
        tokens: Tokens of a prompt and its response.
        epochs: Passes over the samples.
        anchors: Blocks per sample.
        block_size: Tokens of a block.
        target_layers: Number of target layers whose hidden states the drafter reads.
        batch: Samples per device and step.
    """

    samples: int = 100_000
    tokens: int = 1_024
    epochs: int = 6
    anchors: int = 256
    block_size: int = 16
    target_layers: int = 5
    batch: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}.")


@dataclass(frozen=True)
class TrainCost:
    """Cost of training a drafter.

    Attributes:
        trained: Number of trained weights.
        response_hours: Time of the target to generate all responses.
        hidden_state_hours: Time of the target to compute the hidden states.
        hidden_state_bytes: Hidden states on disk; none are stored if the target runs next to the trainer.
        training_hours: Time of all epochs.
        hours: Sum of the three.
        flops: Arithmetic operations of training.
        samples_per_second: Training speed on all devices.
        target_bytes, training_bytes: Memory of the target on all devices, and of the trainer on each device.
        fits: Whether both fit.
        devices_needed: Number of these devices that the target needs.
    """

    model: str
    device: str
    trained: int
    response_hours: float
    hidden_state_hours: float
    hidden_state_bytes: int
    training_hours: float
    hours: float
    flops: float
    samples_per_second: float
    target_bytes: int
    training_bytes: int
    fits: bool
    devices_needed: int

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object that `--json` prints."""
        return asdict(self)


def train_cost(shape: Shape, machine: Machine, plan: TrainPlan, weights: str = "bf16") -> TrainCost:
    """Return the cost of training a DFlash drafter for a model.

    Args:
        machine: One device, or several, which share the target and train with data parallelism.
        weights: Kind of weights of the target.
    """
    context = min(plan.tokens, shape.context or plan.tokens)
    batch = MAX_BATCH * machine.count
    alone = project(shape, machine, weights, context, 1)
    while not (projection := project(shape, machine, weights, context, batch)).fits and batch > 1:
        batch //= 2
    rate = 1e12 * (machine.bf16 or machine.fp32 or 0.0)
    rate *= 0.5 if machine.measured else TRAINING_SHARE
    tokens = plan.samples * plan.tokens
    cost = cost_of(DEFAULT_KIND)
    trained = draft_weights(shape, cost)
    slots = plan.anchors * plan.block_size
    head = shape.vocabulary * shape.hidden
    # Each layer computes keys and values of all tokens with a part of its weights, and the fusion runs on all tokens.
    fused = plan.target_layers * shape.hidden**2 + cost.layers * shape.hidden**2 // 2
    flops_per_sample = FORWARD_BACKWARD * (slots * (trained + head) + plan.tokens * fused)
    per_second = rate / flops_per_sample
    hidden, width = ACTIVATIONS
    numbers = hidden * shape.hidden + width * min(shape.intermediate, 4 * shape.hidden)
    activations = 2 * plan.batch * cost.layers * (slots + plan.tokens) * numbers
    frozen = 2 * head * (1 if shape.tied else 2)
    training = OPTIMIZER_BYTES * trained // machine.count + frozen + activations  # sharded, as by FSDP
    device_bytes = SHARE * machine.memory_gb * 1e9 / machine.count
    responses = tokens / projection.plain.mid / 3600
    hidden_states = 2 * shape.active * tokens / rate / 3600
    training_hours = plan.samples * plan.epochs / per_second / 3600
    return TrainCost(
        model=shape.name,
        device=machine.name,
        trained=trained,
        response_hours=responses,
        hidden_state_hours=hidden_states,
        hidden_state_bytes=HIDDEN_STATE_BYTES * plan.target_layers * shape.hidden * tokens,
        training_hours=training_hours,
        hours=responses + hidden_states + training_hours,
        flops=float(flops_per_sample) * plan.samples * plan.epochs,
        samples_per_second=per_second,
        target_bytes=alone.memory_bytes,
        training_bytes=training,
        fits=alone.fits and training <= device_bytes,
        devices_needed=-(-alone.memory_bytes // int(device_bytes)),
    )
