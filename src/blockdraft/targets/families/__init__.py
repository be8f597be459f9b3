"""Families that the native decoder knows: one file a family, named after the `model_type` of its configuration.

Each holds `decoder_config`, which turns a configuration of transformers into a `DecoderConfig` or raises `NotCovered`.
One that ends in `_text` may say `HAS_OTHER_PARTS`: then transformers' causal LM of the models around it is the text
part alone.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from transformers import PretrainedConfig

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.families.base import NotCovered, check_covered

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "base"))


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a model's text part, where it has others that are left out; else its own."""
    family = f"{config.model_type}_text"
    has_others = family in FAMILIES and getattr(import_module(f"{__name__}.{family}"), "HAS_OTHER_PARTS", False)
    return config.get_text_config() if has_others else config


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    """The decoder of a model.

    Raises:
        NotCovered: Its family or one of its settings is none that the native decoder knows.
    """
    config = text_part(config)
    family = config.model_type
    if family not in FAMILIES:
        raise NotCovered(f"{family} is none of its families: {', '.join(FAMILIES)}")
    check_covered(config)
    found: DecoderConfig = import_module(f"{__name__}.{family}").decoder_config(config)
    return found


__all__ = ["FAMILIES", "NotCovered", "decoder_config", "text_part"]
