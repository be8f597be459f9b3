"""Settings of making, training, measuring and sampling block-diffusion models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, Seed, Share, Texts, settings


@settings
class ConvertSettings:
    """Conversion of a causal language model into a block-diffusion model.

    Attributes:
        block_size: Tokens of a block; 1 leaves the model autoregressive.
        token_shift: Predict the next token at each token, as before, which needs the least training; else each position
            predicts its own token.
        mask_token_id: Token that stands for unknown ones; None is the tokenizer's mask token, or else a new one.
        seed: Seed of the embedding of a new mask token.
    """

    block_size: Count = 8
    token_shift: bool = True
    mask_token_id: Natural | None = None
    seed: Seed = 0


@settings
class NewSettings:
    """Shape of a model with random weights. The defaults are the paper's tiny model.

    Attributes:
        kind: "dit" is the paper's network and layout; "causal" has the layers of Qwen3, as converted models do.
        layers: Number of layers.
        hidden_size: Size of a hidden state.
        heads: Heads of attention.
        context: Most tokens of a text.
        block_size: Tokens of a block; 1 makes the model autoregressive.
        condition_size: Size of the embedding that conditions the norms of the dit.
        mask_token_id: Token that stands for unknown ones; None is the tokenizer's mask token, or else a new one.
        seed: Seed of the weights.
    """

    kind: Literal["dit", "causal"] = "dit"
    layers: Count = 8
    hidden_size: Count = 256
    heads: Count = 8
    context: Annotated[int, Field(ge=2)] = 1024
    block_size: Count = 8
    condition_size: Count = 64
    mask_token_id: Natural | None = None
    seed: Seed = 0

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
    """Measurement of a text's likelihood.

    Attributes:
        length: Tokens of a row, the first of which is given; longer texts are cut. None is 512, or the model's context
            if that is shorter.
        draws: Samples of the noise for the whole text, which the interval comes from; blocks of one token need none.
        batch: Rows that are computed at once.
        seed: Seed of the noise.
    """

    length: Annotated[int, Field(ge=2)] | None = None
    draws: Annotated[int, Field(ge=4)] = 8
    batch: Count = 8
    seed: Seed = 0


@settings
class SampleSettings:
    """Sampling of text.

    Attributes:
        max_new_tokens: Number of tokens after which an answer is cut, exact to the token.
        strategy: Tokens of a block that a pass settles: first_hitting (one, at random), ancestral=STEPS (those of one
            of so many steps of the reverse process), static=N (the N likeliest), threshold=P (all that have at least
            probability P), entropy=H (the surest, whose entropies without the largest add up to at most H nats), or
            left_to_right.
        temperature: 0 takes the likeliest token at each position; otherwise the divisor of the logits.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the most probable tokens that together reach this probability; 1 keeps all.
        seed: Same seed, same tokens; row i of several has the seed + i. None samples a seed.
        ignore_eos: Go on past the model's end tokens.
        batch_size: Texts that are written at once; others wait until one of them ends.
    """

    max_new_tokens: Count = 128
    strategy: str = "threshold=0.9"
    temperature: Amount = 0.0
    top_k: Natural = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Seed | None = None
    ignore_eos: bool = False
    batch_size: Count = 16


@settings
class DiffusionRecipe:
    """Training of a block-diffusion model. Rate, warm-up, clipping and EMA are those of arXiv 2503.09573.

    Attributes:
        block_size: Tokens of a block; None is the model's block size. The paper first trains with one block of the
            whole length, and then with the block size that is wanted.
        length: Tokens of a row; None is 512, or the model's context if that is shorter.
        batch: Rows of a step, over all processes; None is 16 on a GPU and 4 on a CPU.
        schedule: Rise of the share of masked tokens with the time that is sampled for a block.
        low: Least time that is sampled.
        high: Largest time that is sampled. Small blocks learn faster from a part of the times, such as 0.45 to 0.95 for
            blocks of 4.
        search_every: Steps between searches for the interval of times in which the losses of blocks vary least, which
            then replaces `low` and `high`; 0 never searches.
        search_batches: Batches of rows that a search reads.
        complementary: Learn each row twice in a step, masked the second time where it was not masked the first.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        warmup: Steps in which the rate rises to its peak, where it stays.
        clip: Largest norm of the gradient; 0 does not clip.
        ema: Decay of the moving average of the weights, which is written; 0 writes the weights themselves.
        seed: Seed of the order of the rows and of the noise.
        held_out: Share of the rows, the last ones, that is only measured on.
        eval_every: Steps between measurements; 0 measures at the end alone.
        save_every: Steps between checkpoints; 0 saves by time only.
        save_minutes: Minutes between checkpoints, in addition to those of `save_every`; 0 saves by steps only.
        keep: Number of checkpoints that are kept, the newest ones.
        dtype: Arithmetic: "auto" is bfloat16 on a GPU, and on a CPU with instructions for it (AVX512-BF16, AMX), else
            float32. The weights are float32 either way.
        save_dtype: Numbers of the weights that are written.
        trackers: Trackers of Accelerate that get the metrics besides log.jsonl.
    """

    block_size: Count | None = None
    length: Annotated[int, Field(ge=2)] | None = None
    batch: Count | None = None
    schedule: Literal["linear", "square", "root", "logarithmic", "cosine"] = "linear"
    low: Share = 0.001
    high: Share = 1.0
    search_every: Natural = 0
    search_batches: Count = 8
    complementary: bool = False
    learning_rate: Amount = 3e-4
    weight_decay: Amount = 0.0
    warmup: Natural = 100
    clip: Amount = 1.0
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.9999
    seed: Seed = 0
    held_out: Share = 0.02
    eval_every: Natural = 500
    save_every: Natural = 500
    save_minutes: Amount = 5.0
    keep: Count = 2
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    trackers: Texts = ()

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise UsageError(f"low is {self.low} and high {self.high}; give two times with 0 < low <= high <= 1.")
        if self.complementary and self.schedule != "linear":
            raise UsageError(f"schedule is {self.schedule!r}; complementary masks take the schedule linear.")
