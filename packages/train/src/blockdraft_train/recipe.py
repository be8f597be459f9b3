"""Recipes: all settings of a training run, from a TOML file, flags, or both (`settings_files.read_settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, Share, Texts, settings

if TYPE_CHECKING:
    from blockdraft.targets import Target

R = TypeVar("R", bound="Recipe")


@settings
class Recipe:
    """Settings that all variants share. A variant may add fields and change defaults by subclassing.

    Rate, warm-up, clipping, epochs, anchors and length are those of arXiv 2602.06036. Fields that are None by default
    are derived from target and data before training starts (`defaults.py`).
    """

    beginnings: ClassVar[tuple[str, ...]] = ()  # values of `init` that are no folder, where a variant has that field
    block_size: Annotated[int, Field(ge=2)] = Field(16, description="Number of tokens per block, anchor included.")
    length: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Sequence length in tokens. Documents are packed into sequences, and longer ones are cut. By "
        "default 3072, or the target's context if that is shorter.",
    )
    batch: Count | None = Field(
        None,
        description="Sequences per step, over all processes and accumulated batches; by default 8, or fewer if the "
        "data fill fewer.",
    )
    anchors: Count | None = Field(
        None, description="Blocks per sequence, drawn anew in each epoch; by default a sixth of `length`."
    )
    anchor_placement: Literal["random", "fixed"] = Field(
        "random", description='"random", or "fixed" for consecutive blocks, as a baseline.'
    )
    held_out: Natural | None = Field(
        None,
        description="Number of documents to hold out and measure on; by default 64, or a tenth of all documents if "
        "that is less.",
    )
    hidden_states: str | None = Field(
        None,
        description="Where the target's hidden states come from. By default the target runs in each step. 'memory' "
        "computes them once and keeps them: on a CPU at the start, in bfloat16; on a GPU in the first "
        "pass, in up to half of its free memory. Anything else is a folder written by `blockdraft "
        "hidden-states`.",
    )
    objective: Mapping[str, Amount] = Field(
        default_factory=lambda: {"decay": 1.0}, description="Names of objectives and their weights."
    )
    gamma: Amount | None = Field(
        None,
        description="Decay constant, in block positions, of the objectives that decay; by default it depends on the "
        "block size, and 0 means no decay.",
    )
    epochs: Count = Field(6, description="Passes over the data.")
    steps: Count | None = Field(None, description="Number of optimizer steps; by default it follows from `epochs`.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description='"adamw", or "muon" for matrices and AdamW for the rest.'
    )
    learning_rate: Amount = Field(6e-4, description="Peak learning rate of AdamW.")
    muon_learning_rate: Amount = Field(0.02, description="Peak learning rate of Muon.")
    weight_decay: Amount = Field(0.0, description="Weight decay of AdamW.")
    muon_weight_decay: Amount = Field(0.01, description="Weight decay of Muon.")
    schedule: Literal["cosine", "linear", "wsd"] = Field(
        "cosine",
        description='Learning rate decay after warm-up: "cosine", "linear", or "wsd" (constant, then a cosine over '
        "the last fifth of the steps).",
    )
    warmup: Share = Field(0.04, description="Share of the steps in which the learning rate rises.")
    final: Share = Field(0.0, description="Final learning rate, as a share of the peak.")
    clip: Amount = Field(1.0, description="Maximum gradient norm; 0 does not clip.")
    seed: Natural = Field(
        0, description="Seed of initial weights, order, anchors and the choice of held-out documents."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description='Arithmetic of the draft network. "auto" is bfloat16 on a GPU and on a CPU with instructions for '
        "it (AVX512-BF16, AMX), else float32. Trained weights are float32 either way.",
    )
    qat_bits: Literal[4, 8] | None = Field(
        None,
        description="Quantization-aware training: quantize the weights to 4 or 8 bits in every other step, so that "
        "the drafter works well both with and without quantization. On a CPU it then runs quantized next "
        "to targets of at least so many bits, or of bfloat16. Kinds that never run quantized refuse it.",
    )
    save_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Number format of the saved weights."
    )
    accumulation: Count = Field(1, description="Batches per process that make up a step.")
    chunk: Count = Field(128, description="Blocks whose logits exist at the same time; fewer need less memory.")
    compile: bool = Field(False, description="Compile the training step, which takes a minute and then saves time.")
    eval_every: Natural = Field(500, description="Steps between evaluations; 0 evaluates at the end only.")
    eval_prompts: Natural = Field(16, description="Held-out prompts that an evaluation decodes.")
    eval_tokens: Count = Field(128, description="Maximum length of such a response in tokens.")
    eval_temperature: Amount = Field(0.0, description="Sampling temperature of such a response; 0 is greedy.")
    save_every: Natural = Field(500, description="Steps between checkpoints; 0 saves by time only.")
    save_minutes: Amount = Field(
        5.0, description="Minutes between checkpoints, in addition to `save_every`; 0 saves by steps only."
    )
    keep: Count = Field(2, description="Number of checkpoints to keep, the newest ones.")
    trackers: Texts = Field(
        ("tensorboard",), description="Accelerate trackers that receive the metrics, in addition to log.jsonl."
    )

    def __post_init__(self) -> None:
        faults = []
        if not any(self.objective.values()):
            faults.append(f"objective is {dict(self.objective)}; give names and weights of 0 or more, not all 0.")
        if self.batch is not None and self.batch % self.accumulation:
            faults.append(f"batch must be a multiple of accumulation, {self.accumulation}, got {self.batch}.")
        if faults:
            raise UsageError(" ".join(faults))


def with_place(recipe: R, target: Target) -> R:
    """Return a recipe whose `init` is a path, where it names the bundled drafter or one of the hub."""
    from blockdraft.drafters import place_of  # slow to import

    init = begun_with(recipe)
    return recipe if init is None else replace(recipe, init=str(place_of(init, target)))  # type: ignore[call-arg]


def begun_with(recipe: Recipe) -> str | None:
    """Return the folder of the drafter that training starts from, or None if there is none."""
    init: str | None = getattr(recipe, "init", None)  # only some variants can
    return None if init in recipe.beginnings else init
