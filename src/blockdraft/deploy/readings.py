"""The ways in which a drafter's checkpoint is read wrongly: its configuration, and what it may have meant instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from blockdraft.nn.draft_config import DraftConfig, LayerAttention

WINDOWS = (32, 128, 512, 1024, 2048, 4096)  # tried where they are shorter than the texts
THETAS = (10_000.0, 1_000_000.0, 10_000_000.0)


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint.

    Attributes:
        fault: What would be wrong with the checkpoint if this reading is right: "taps", "shift", "window",
            "causality", "rope" or "dtype"; empty for the reading as its configuration says.
        told: The reading in words.
        remedy: What to do then.
        config: Of the network.
        shift: By how many tokens a slot's guess stands behind the place that its configuration says.
        dtype: Of the draft pass; None is the target's.
    """

    fault: str
    told: str
    remedy: str
    config: DraftConfig
    shift: int = 0
    dtype: torch.dtype | None = None


def readings(
    config: DraftConfig, first_slot: int, shape: Mapping[str, Any], dtype: torch.dtype, longest: int
) -> Iterator[Reading]:
    """The reading as the configuration says, and then the others.

    Args:
        first_slot: The slot that guesses the token behind the anchor.
        shape: As in `Target`.
        dtype: The target's.
        longest: Tokens of the longest text that they are tried on.
    """
    yield Reading("", "as its configuration says", "", config)
    for step in (1, -1):
        taps = tuple(tap + step for tap in config.taps)
        if min(taps) >= 0 and max(taps) < config.num_target_layers:
            told = f"taps {list(taps)} in place of {list(config.taps)}"
            remedy = f"Write {list(taps)} as target_layer_ids into config.json; some formats count from 1."
            yield Reading("taps", told, remedy, replace(config, taps=taps))
    for slot in {0, 1, 2} - {first_slot}:
        told = f"slot {slot} guesses the token behind the anchor, in place of slot {first_slot}"
        remedy = (
            "Give the drafter the architecture, or the shift_label and sample_from_anchor, that it was trained with: "
            "slot 0 guesses in DSpark, slot 1 in DFlash."
        )
        yield Reading("shift", told, remedy, config, first_slot - slot)
    yield from _attention(config, longest)
    for theta in dict.fromkeys((shape.get("rope_theta", config.rope_theta), *THETAS)):
        if theta != config.rope_theta:
            told = f"rope_theta {theta:g} in place of {config.rope_theta:g}"
            remedy = f"Write {theta:g} as rope_theta into config.json."
            yield Reading("rope", told, remedy, replace(config, rope_theta=float(theta)))
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        told = f"the draft pass in float32 in place of {name}"
        remedy = f"Its numbers do not fit {name}; run the pair in bfloat16 or float32 (--dtype)."
        yield Reading("dtype", told, remedy, config, dtype=torch.float32)


def _attention(config: DraftConfig, longest: int) -> Iterator[Reading]:
    """Other windows and causalities."""
    windows = {layer.window for layer in config.layers} - {None}
    seen = {config.layers}
    for window in (None, *(each for each in WINDOWS if each < longest)):
        for causal in (False, True, None):
            if window is None and causal is None:
                continue
            # None is vLLM's rule where nothing else is said: sliding layers are causal, full ones are not. With a
            # window of their own, only the layers that slide keep one.
            slides = [layer.window is not None or not windows for layer in config.layers]
            layers = tuple(
                LayerAttention(slide if causal is None else causal, window if slide else None) for slide in slides
            )
            if layers in seen:
                continue
            seen.add(layers)
            same_windows = [layer.window for layer in layers] == [layer.window for layer in config.layers]
            where = "full attention" if window is None else f"a sliding window of {window} tokens"
            how = {True: "causal", False: "bidirectional", None: "causal where it slides"}[causal]
            remedy = "Write layer_types, sliding_window and is_causal into config.json as it was trained."
            fault = "causality" if same_windows else "window"
            yield Reading(fault, f"{where}, {how} inside a block", remedy, replace(config, layers=layers))
    for causal in (False, True):
        layers = tuple(replace(layer, causal=causal) for layer in config.layers)
        if layers not in seen:
            seen.add(layers)
            told = f"the same windows, {'causal' if causal else 'bidirectional'} inside a block"
            remedy = f"Write is_causal: {str(causal).lower()} into config.json."
            yield Reading("causality", told, remedy, replace(config, layers=layers))
