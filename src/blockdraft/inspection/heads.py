"""What can be said of a drafter that guesses a token at a time or by heads: EAGLE-3, MTP, Medusa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.inspection.base import Report
from blockdraft.inspection.fits import checks_of, same_tokenizer
from blockdraft.inspection.lines import lines_of
from blockdraft.targets import Description

# Fields of configurations, by what is said of them.
SIZES = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "heads": "num_attention_heads"}
SIZES |= {"key_value_heads": "num_key_value_heads", "head_size": "head_dim", "context": "max_position_embeddings"}
OWN = ("qk_norm", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "normed_feedback", "shared_head")
HEAD_INPUT = "what the target's head reads"


def head_report(
    path: str,
    layout: str,
    architecture: str,
    config: Any,
    layers_known: bool,
    kinds: Mapping[str, int],
    size: int,
    kept: int,
    wants: Mapping[str, Any],
    target: Description | None,
    words: list[str] | None = None,
) -> Report:
    """Args:
    architecture: What config.json calls it.
    kinds: Numbers that the file holds, by their type.
    size: Bytes of the file.
    kept: Tokens that it can guess.
    words: The target's tokens, where the file holds them.
    """
    guesses = config.num_heads if hasattr(config, "num_heads") else config.block_size - 1
    of_head = config.taps == (config.num_target_layers,)
    about = {
        "architecture": architecture,
        "layers": getattr(config, "num_layers", 1),
        **{name: getattr(config, field) for name, field in SIZES.items() if hasattr(config, field)},
        "parameters": sum(count for kind, count in kinds.items() if kind not in ("I64", "BOOL")),
        "weights": dict(kinds),
        "bytes": size,
    }
    taps, entered = [*config.taps], [tap + 1 for tap in config.taps]
    conventions = {
        "block_size": guesses + 1,
        "guesses": guesses,
        "taps": HEAD_INPUT
        if of_head
        else {"blockdraft": taps, "eagle3": taps, "eagle3_speculators": entered, "llama_cpp": entered},
        **(
            {"rope": {"theta": config.rope_theta, "scaling": config.rope_scaling}}
            if hasattr(config, "rope_theta")
            else {}
        ),
        "vocabulary": {"target": config.vocab_size, "guessed": kept},
        architecture: {name: getattr(config, name) for name in OWN if hasattr(config, name)},
    }
    checks = checks_of(config, () if of_head else taps, layers_known, wants["fingerprint"], target) if target else []
    if target is not None and words is not None:
        checks.insert(-1, same_tokenizer(words, target))
    return Report(
        path,
        "drafter",
        layout,
        about,
        {
            "name": wants["name"],
            "layers": config.num_target_layers if layers_known else None,
            "hidden_size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "fingerprint": wants["fingerprint"],
        },
        conventions,
        tuple(checks),
        lines_of(config, layout, path, wants["name"], target),
        config,
    )
