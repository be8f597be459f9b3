"""Settings of making, training, measuring and sampling block-diffusion models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, Seed, Share, Texts, settings


@settings
class ConvertSettings:
    """Conversion of a causal language model into a block-diffusion model."""

    block_size: Count = Field(8, description="Number of tokens per block; 1 leaves the model autoregressive.")
    token_shift: bool = Field(
        True,
        description="Predict the next token at each position, as before, which needs the least training. Otherwise "
        "each position predicts its own token.",
    )
    mask_token_id: Natural | None = Field(
        None,
        description="Token that stands for unknown ones; by default the tokenizer's mask token, or else a new one.",
    )


@settings
class NewSettings:
    """Shape of a model with random weights in the paper's layout. The defaults are its tiny model."""

    layers: Count = Field(8, description="Number of layers.")
    hidden_size: Count = Field(256, description="Width of the hidden states.")
    heads: Count = Field(8, description="Number of attention heads.")
    context: Annotated[int, Field(ge=2)] = Field(1024, description="Maximum sequence length in tokens.")
    block_size: Count = Field(8, description="Number of tokens per block; 1 makes the model autoregressive.")
    mask_token_id: Natural | None = Field(
        None,
        description="Token that stands for unknown ones; by default the tokenizer's mask token, or else a new one.",
    )
    seed: Seed = Field(0, description="Seed of the weights.")

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.heads):
            even = 2 * self.heads
            raise UsageError(
                f"hidden_size is {self.hidden_size} and heads {self.heads}; each head needs an even share of a state, "
                f"so give a multiple of {even}, such as {even * max(1, self.hidden_size // even)}."
            )
        if self.block_size > self.context:
            raise UsageError(f"block_size is {self.block_size} and context {self.context}; give smaller blocks.")


@settings
class LikelihoodSettings:
    """Measurement of a text's likelihood."""

    length: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Sequence length in tokens, of which the first is given; longer texts are cut. By default 512, "
        "or the model's context if that is shorter.",
    )
    draws: Annotated[int, Field(ge=4)] = Field(
        8,
        description="Noise samples of the whole text, from which the interval is estimated; blocks of one token need "
        "none.",
    )
    batch: Count = Field(8, description="Sequences computed together.")
    seed: Seed = Field(0, description="Seed of the noise.")


@settings
class SampleSettings:
    """Sampling of text."""

    max_new_tokens: Count = Field(128, description="Maximum length of an answer in tokens.")
    strategy: str = Field(
        "threshold=0.9",
        description="Tokens that a pass fixes: first_hitting (one, at random), ancestral=STEPS (those of one of "
        "STEPS steps of the reverse process), static=N (the N likeliest), threshold=P (all with "
        "probability P or more), entropy=H (the surest, whose entropies without the largest sum to at "
        "most H nats), or left_to_right.",
    )
    temperature: Amount = Field(0.0, description="Divisor of the logits; 0 takes the likeliest token at each position.")
    top_k: Natural = Field(0, description="Keep the k most probable tokens; 0 keeps all.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Keep the most probable tokens that together reach this probability; 1 keeps all."
    )
    seed: Seed | None = Field(
        None,
        description="The same seed gives the same tokens; prompt i of several gets the seed + i. By default a random "
        "one.",
    )
    ignore_eos: bool = Field(False, description="Go on past the model's end tokens.")
    batch_size: Count = Field(16, description="Number of texts generated together.")


@settings
class DiffusionRecipe:
    """Training of a block-diffusion model. Rate, warm-up, clipping and EMA are those of arXiv 2503.09573."""

    block_size: Count | None = Field(
        None,
        description="Number of tokens per block; by default the model's. The paper trains first with one block of "
        "the whole length, then with the final block size.",
    )
    length: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Sequence length in tokens; by default 512, or the model's context if that is shorter."
    )
    batch: Count | None = Field(
        None, description="Sequences per step, over all processes; by default 16 on a GPU and 4 on a CPU."
    )
    low: Share = Field(0.001, description="Smallest time that is sampled.")
    high: Share = Field(
        1.0,
        description="Largest time that is sampled. Small blocks learn faster from a part of the times, such as 0.45 "
        "to 0.95 for blocks of 4.",
    )
    learning_rate: Amount = Field(3e-4, description="Peak learning rate of AdamW.")
    warmup: Natural = Field(100, description="Steps in which the learning rate rises to its peak, where it stays.")
    ema: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9999,
        description="Decay of the moving average of the weights, which is saved; 0 saves the weights themselves.",
    )
    seed: Seed = Field(0, description="Seed of order and noise.")
    held_out: Share = Field(0.02, description="Share of the sequences, the last ones, to hold out and measure on.")
    eval_every: Natural = Field(500, description="Steps between evaluations; 0 evaluates at the end only.")
    save_every: Natural = Field(500, description="Steps between checkpoints; 0 saves by time only.")
    save_minutes: Amount = Field(
        5.0, description="Minutes between checkpoints, in addition to `save_every`; 0 saves by steps only."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description='Arithmetic: "auto" is bfloat16 on a GPU and on a CPU with instructions for it (AVX512-BF16, '
        "AMX), else float32. The weights are float32 either way.",
    )
    trackers: Texts = Field((), description="Accelerate trackers that receive the metrics, in addition to log.jsonl.")

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise UsageError(f"low is {self.low} and high {self.high}; give two times with 0 < low <= high <= 1.")
