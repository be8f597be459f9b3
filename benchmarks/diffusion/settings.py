"""Settings of training and measuring. They are the command's options, so no two share a name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blockdraft.diffusion.strategies import read_strategy
from blockdraft.settings import Amount, Count, Natural, Share, Texts, settings


@settings
class TextSettings:
    """Models of characters by block size."""

    models: Texts = Field(
        (
            "autoregressive",
            "block 1",
            "block 1 clipped",
            "block 4",
            "block 4 clipped",
            "block 16",
            "block 16 clipped",
            "whole",
            "whole clipped",
        ),
        description="Which are compared.",
    )
    seeds: Count = Field(
        3,
        description="Models of each kind; they differ in their first weights, the order of the text and the noise.",
    )
    steps: Count = Field(2000, description="Optimiser steps of each model.")
    batch: Count = Field(16, description="Rows of a step.")
    length: Annotated[int, Field(ge=16)] = Field(
        128,
        description="Characters of a row, and so the block of the model that has one block for the whole.",
    )
    hidden: Count = Field(128, description="Width of the network.")
    layers: Count = Field(3, description="Layers of the network.")
    heads: Count = Field(4, description="Heads of attention.")
    learning_rate: Amount = Field(2e-3, description="Peak learning rate of AdamW.")
    warmup: Natural = Field(100, description="Steps in which the rate rises.")
    held_out: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1,
        description="Share of the text, its end, that is measured on and not learned.",
    )
    scored: Natural = Field(0, description="Characters of it that are measured on; 0 takes all.")
    draws: Annotated[int, Field(ge=4)] = Field(8, description="Draws of the noise for each measurement.")


@settings
class StrategySettings:
    """Sampling from the models of characters."""

    sampled: Texts = Field(
        ("block 4", "block 16", "whole"),
        description="Models that are sampled from, the autoregressive one beside them.",
    )
    strategies: Texts = Field(
        (
            "left_to_right",
            "first_hitting",
            "ancestral=16",
            "ancestral=4",
            "static=2",
            "static=4",
            "threshold=0.9",
            "threshold=0.6",
            "entropy=0.3",
            "entropy=1",
        ),
        description="As `blockdraft diffusion generate` takes them.",
    )
    samples: Count = Field(16, description="Samples of each model, seed and strategy.")
    given: Count = Field(16, description="Characters of the held-out text that each sample goes on from.")
    temperature: Amount = Field(1.0, description="Divisor of the logits.")

    def __post_init__(self) -> None:
        for strategy in self.strategies:
            read_strategy(strategy)


@settings
class ConvertedSettings:
    """A causal model that becomes a block-diffusion model and answers problems."""

    block_size: Count = Field(4, description="Tokens of a block.")
    tune_steps: Count = Field(1500, description="Optimiser steps after the conversion.")
    tune_batch: Count = Field(8, description="Rows of a step.")
    tune_length: Annotated[int, Field(ge=2)] = Field(256, description="Tokens of a row.")
    tune_rate: Amount = Field(3e-4, description="Peak learning rate of AdamW.")
    low: Share = Field(0.001, description="Least noise that is learned.")
    written: Count = Field(
        3000,
        description="Problems whose answers, by the target itself, are learned, where no --data is given.",
    )
    asked: Count = Field(200, description="Problems that are measured on, the first ones.")
    new_tokens: Count = Field(200, description="Most tokens of an answer.")
    ways: Texts = Field(
        ("left_to_right", "static=2", "threshold=0.95", "threshold=0.9", "threshold=0.7", "entropy=0.3"),
        description="Strategies by which the converted model answers.",
    )
    together: Count = Field(16, description="Answers that are written together.")

    def __post_init__(self) -> None:
        for way in self.ways:
            read_strategy(way)


# Defaults of a quick run, which shows that all works and nothing else.
QUICK = {"steps": "250", "batch": "8", "length": "64", "hidden": "64", "layers": "2", "heads": "2", "warmup": "25"}
QUICK |= {"scored": "4000", "draws": "4", "samples": "2", "tune_steps": "25", "tune_batch": "4", "tune_length": "128"}
QUICK |= {"written": "200", "asked": "16", "new_tokens": "96", "ways": "left_to_right,static=2,threshold=0.9"}
