"""Mistral: Llama with a sliding window in all layers or none."""

from __future__ import annotations

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.families.base import base_config, equal_layers


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    return base_config(config, equal_layers(config, config.sliding_window))
