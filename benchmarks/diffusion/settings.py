"""Settings of training and measuring. They are the command's options, so no two share a name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blockdraft.diffusion.strategies import read_strategy
from blockdraft.settings import Amount, Count, Natural, Share, Texts, settings


@settings
class TextSettings:
    """Models of characters by block size.

    Attributes:
        models: Which are compared.
        seeds: Models of each kind; they differ in their first weights, the order of the text and the noise.
        steps: Optimiser steps of each model.
        batch: Rows of a step.
        length: Characters of a row, and so the block of the model that has one block for the whole.
        hidden: Width of the network.
        layers: Layers of the network.
        heads: Heads of attention.
        learning_rate: Peak learning rate of AdamW.
        warmup: Steps in which the rate rises.
        held_out: Share of the text, its end, that is measured on and not learned.
        scored: Characters of it that are measured on; 0 takes all.
        draws: Draws of the noise for each measurement.
    """

    models: Texts = ("autoregressive", "block 1", "block 1 clipped", "block 4", "block 4 clipped", "block 16",
                     "block 16 clipped", "whole", "whole clipped")  # fmt: skip
    seeds: Count = 3
    steps: Count = 2000
    batch: Count = 16
    length: Annotated[int, Field(ge=16)] = 128
    hidden: Count = 128
    layers: Count = 3
    heads: Count = 4
    learning_rate: Amount = 2e-3
    warmup: Natural = 100
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    scored: Natural = 0
    draws: Annotated[int, Field(ge=4)] = 8


@settings
class StrategySettings:
    """Sampling from the models of characters.

    Attributes:
        sampled: Models that are sampled from, the autoregressive one beside them.
        strategies: As `blockdraft diffusion generate` takes them.
        samples: Samples of each model, seed and strategy.
        given: Characters of the held-out text that each sample goes on from.
        temperature: Divisor of the logits.
    """

    sampled: Texts = ("block 4", "block 16", "whole")
    strategies: Texts = ("left_to_right", "first_hitting", "ancestral=16", "ancestral=4", "static=2", "static=4",
                         "threshold=0.9", "threshold=0.6", "entropy=0.3", "entropy=1")  # fmt: skip
    samples: Count = 16
    given: Count = 16
    temperature: Amount = 1.0

    def __post_init__(self) -> None:
        for strategy in self.strategies:
            read_strategy(strategy)


@settings
class ConvertedSettings:
    """A causal model that becomes a block-diffusion model and answers problems.

    Attributes:
        block_size: Tokens of a block.
        tune_steps: Optimiser steps after the conversion.
        tune_batch: Rows of a step.
        tune_length: Tokens of a row.
        tune_rate: Peak learning rate of AdamW.
        low: Least noise that is learned.
        written: Problems whose answers, by the target itself, are learned, where no --data is given.
        asked: Problems that are measured on, the first ones.
        new_tokens: Most tokens of an answer.
        ways: Strategies by which the converted model answers.
        together: Answers that are written together.
    """

    block_size: Count = 4
    tune_steps: Count = 1500
    tune_batch: Count = 8
    tune_length: Annotated[int, Field(ge=2)] = 256
    tune_rate: Amount = 3e-4
    low: Share = 0.001
    written: Count = 3000
    asked: Count = 200
    new_tokens: Count = 200
    ways: Texts = ("left_to_right", "static=2", "threshold=0.95", "threshold=0.9", "threshold=0.7", "entropy=0.3")
    together: Count = 16

    def __post_init__(self) -> None:
        for way in self.ways:
            read_strategy(way)


# Defaults of a quick run, which shows that all works and nothing else.
QUICK = {"steps": "250", "batch": "8", "length": "64", "hidden": "64", "layers": "2", "heads": "2", "warmup": "25"}
QUICK |= {"scored": "4000", "draws": "4", "samples": "2", "tune_steps": "25", "tune_batch": "4", "tune_length": "128"}
QUICK |= {"written": "200", "asked": "16", "new_tokens": "96", "ways": "left_to_right,static=2,threshold=0.9"}
