"""What a drafter for a model costs to make on some devices: answers, features on disk, hours and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.radar.devices import Machine
from blockdraft.radar.drafting import LIKELY, cost_of, draft_weights
from blockdraft.radar.project import SHARE, project
from blockdraft.radar.shape import Shape

MOST_BATCH = 256  # answers that are written together, for each device
TRAINING_SHARE = 0.43  # of the dense bfloat16 arithmetic (Domino's trainer on H200: 43.5 to 44.1 %)
FORWARD_BACKWARD = 6  # operations for each trained weight and slot; a frozen head takes as many, being computed twice
OPTIMISER_BYTES = 16  # of a trained weight: bfloat16 and float32 copies, gradient, AdamW's two moments
ACTIVATIONS = (16, 6)  # numbers that a slot of a layer leaves behind, in hidden sizes and in widths of the MLP
HIDDEN_STATE_BYTES = 2


@dataclass(frozen=True)
class TrainPlan:
    """How much a drafter is trained.

    Attributes:
        samples: Prompts that the target answers.
        tokens: Tokens of a prompt with its answer.
        epochs: Times that each is trained on.
        anchors: Blocks of a sample.
        block_size: Tokens of a block.
        target_layers: Layers of the target that are read.
        batch: Samples that a device holds at once.
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
                raise UsageError(f"{name} is {value}; it has to be 1 or more.")


@dataclass(frozen=True)
class TrainCost:
    """What making a drafter costs.

    Attributes:
        trained: Weights that are trained.
        answer_hours: Of the target, to answer all prompts.
        hidden_state_hours: Of the target, to read the answers and keep features.
        hidden_state_bytes: Of features on disk; none are kept where the target runs beside the trainer.
        training_hours: Of all epochs.
        hours: Of all three.
        flops: Operations of the training.
        samples_per_second: Of the training, on all devices.
        target_bytes, training_bytes: Memory that the target takes on all devices, and the trainer on each.
        fits: Whether both fit.
        devices_needed: Least number of these devices that hold the target.
    """

    model: str
    device: str
    trained: int
    answer_hours: float
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
        """As `--json` prints it."""
        return asdict(self)


def train_cost(shape: Shape, machine: Machine, plan: TrainPlan, weights: str = "bf16") -> TrainCost:
    """What a DFlash drafter for a model costs.

    Args:
        machine: One device, or several, which share the target and each train on samples of their own.
        weights: Of the target.
    """
    context = min(plan.tokens, shape.context or plan.tokens)
    batch = MOST_BATCH * machine.count
    alone = project(shape, machine, weights, context, 1)
    while batch > 1 and not (row := project(shape, machine, weights, context, batch)).fits:
        batch //= 2
    row = project(shape, machine, weights, context, batch) if batch == 1 else row
    rate = 1e12 * (machine.bf16 or machine.fp32 or 0.0)
    rate *= 0.5 if machine.measured else TRAINING_SHARE
    tokens = plan.samples * plan.tokens
    cost = cost_of(LIKELY)
    trained = draft_weights(shape, cost)
    slots = plan.anchors * plan.block_size
    head = shape.vocabulary * shape.hidden
    # Each layer turns all tokens of the text into keys and values, a part of its weights, and so does the fusion.
    fused = plan.target_layers * shape.hidden**2 + cost.layers * shape.hidden**2 // 2
    a_sample = FORWARD_BACKWARD * (slots * (trained + head) + plan.tokens * fused)
    per_second = rate / a_sample
    hidden, width = ACTIVATIONS
    left = hidden * shape.hidden + width * min(shape.intermediate, 4 * shape.hidden)
    activations = 2 * plan.batch * cost.layers * (slots + plan.tokens) * left
    frozen = 2 * head * (1 if shape.tied else 2)
    training = OPTIMISER_BYTES * trained // machine.count + frozen + activations  # sharded, as by FSDP
    a_device = SHARE * machine.memory_gb * 1e9 / machine.count
    answers = tokens / row.plain.mid / 3600
    hidden_states = 2 * shape.active * tokens / rate / 3600
    trains = plan.samples * plan.epochs / per_second / 3600
    return TrainCost(
        model=shape.name,
        device=machine.name,
        trained=trained,
        answer_hours=answers,
        hidden_state_hours=hidden_states,
        hidden_state_bytes=HIDDEN_STATE_BYTES * plan.target_layers * shape.hidden * tokens,
        training_hours=trains,
        hours=answers + hidden_states + trains,
        flops=float(a_sample) * plan.samples * plan.epochs,
        samples_per_second=per_second,
        target_bytes=alone.memory_bytes,
        training_bytes=training,
        fits=alone.fits and training <= a_device,
        devices_needed=-(-alone.memory_bytes // int(a_device)),
    )
