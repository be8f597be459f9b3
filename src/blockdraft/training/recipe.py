"""Recipes: all settings of a training run, from a TOML file, flags, or both (`settings.read_settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, Share, Texts, settings


@settings
class Recipe:
    """Settings that all variants share. A variant may add fields and change defaults by subclassing.

    Rate, warm-up, clipping, epochs, anchors and length are those of arXiv 2602.06036. Fields that are None by default
    are filled in from target and data before training begins (`defaults.py`).

    Attributes:
        block_size: Tokens of a block, anchor included.
        length: Tokens of a row. Documents are packed into rows, and longer ones are cut. None is 3072, or the target's
            context if that is shorter.
        batch: Rows of a step, over all processes and accumulated batches; None is 8, or fewer if the data fill fewer.
        anchors: Blocks of a row, drawn again in each epoch; None is a sixth of `length`.
        anchor_placement: "random", or "fixed" for blocks that follow each other, as a baseline.
        held_out: Documents that are held out to measure on; None is 64, or a tenth of all documents if that is less.
        hidden_states: Source of the target's hidden states. None runs the target in each step; "memory" computes them
            once
            and keeps them: on a CPU at the start, in bfloat16, on a GPU in the first pass, in up to half of
            its free memory; anything else is a folder of stored features.
        objective: Names of objectives and their weights.
        gamma: Decay constant, in slots, of the objectives that decay; None depends on the block size, 0 is no decay.
        epochs: Passes over the data.
        steps: Optimizer steps; None follows from `epochs`.
        optimizer: "adamw", or "muon" for matrices with AdamW for the rest.
        learning_rate: Peak learning rate of AdamW.
        muon_learning_rate: Peak learning rate of Muon.
        weight_decay: Weight decay of AdamW.
        muon_weight_decay: Weight decay of Muon.
        schedule: Fall of the rates after the warm-up: "cosine", "linear", or "wsd", which is constant and then a cosine
            over the last fifth of the steps.
        warmup: Share of the steps in which the rates rise.
        final: Share of the peak rates at the end.
        clip: Maximum norm of the gradient; 0 does not clip.
        seed: Seed of initial weights, order, anchors and the choice of held-out documents.
        dtype: Arithmetic of the draft network. "auto" is bfloat16 on a GPU and on a CPU with instructions for it
            (AVX512-BF16, AMX), and float32 elsewhere. Trained weights are float32 in any case.
        qat_bits: Bits, 4 or 8, to which the weights are rounded in every other step, so that the drafter guesses
            well both with its own weights and with such ones. Its file says so, and on a CPU it has them beside targets
            of so many bits or more, and of bfloat16. None rounds none. Kinds that are not rounded there refuse it.
        save_dtype: Type of the weights that are written.
        accumulation: Batches of each process that make up a step.
        chunk: Blocks whose logits exist at the same time.
        compile: Compile the training step, which takes a minute and then saves time.
        eval_every: Steps between evaluations; 0 evaluates at the end only.
        eval_prompts: Held-out prompts that the engine answers in an evaluation.
        eval_tokens: Maximum number of tokens of such an answer.
        eval_temperature: Sampling temperature of such an answer; 0 is greedy.
        save_every: Steps between checkpoints; 0 saves by time only.
        save_minutes: Minutes between checkpoints, in addition to those of `save_every`; 0 saves by steps only.
        keep: Number of newest checkpoints that are kept.
        trackers: Trackers of Accelerate that get the metrics in addition to log.jsonl.
    """

    beginnings: ClassVar[tuple[str, ...]] = ()  # values of `init` that are no folder, where a variant has that field
    block_size: Annotated[int, Field(ge=2)] = 16
    length: Annotated[int, Field(ge=2)] | None = None
    batch: Count | None = None
    anchors: Count | None = None
    anchor_placement: Literal["random", "fixed"] = "random"
    held_out: Natural | None = None
    hidden_states: str | None = None
    objective: Mapping[str, Amount] = field(default_factory=lambda: {"decay": 1.0})
    gamma: Amount | None = None
    epochs: Count = 6
    steps: Count | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Amount = 6e-4
    muon_learning_rate: Amount = 0.02
    weight_decay: Amount = 0.0
    muon_weight_decay: Amount = 0.01
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup: Share = 0.04
    final: Share = 0.0
    clip: Amount = 1.0
    seed: Natural = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    qat_bits: Literal[4, 8] | None = None
    save_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    accumulation: Count = 1
    chunk: Count = 128
    compile: bool = False
    eval_every: Natural = 500
    eval_prompts: Natural = 16
    eval_tokens: Count = 128
    eval_temperature: Amount = 0.0
    save_every: Natural = 500
    save_minutes: Amount = 5.0
    keep: Count = 2
    trackers: Texts = ("tensorboard",)

    def __post_init__(self) -> None:
        wrong = []
        if not any(self.objective.values()):
            wrong.append(f"objective is {dict(self.objective)}; give names and weights of 0 or more, not all 0.")
        if self.batch is not None and self.batch % self.accumulation:
            wrong.append(f"batch is {self.batch}; it must be a multiple of accumulation, {self.accumulation}.")
        if wrong:
            raise UsageError(" ".join(wrong))


def begun_with(recipe: Recipe) -> str | None:
    """Folder of the drafter that training begins with; None if it begins with none."""
    init: str | None = getattr(recipe, "init", None)  # only some variants can
    return None if init in recipe.beginnings else init
