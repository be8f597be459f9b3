"""Reports on drafters: their conventions, the target that each needs, and checks against a given one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.drafters import entries
from blockdraft.errors import UsageError
from blockdraft.formats import Layout, Trained
from blockdraft.formats.architectures import find_architecture
from blockdraft.formats.folder import blaming, open_folder, weight_files
from blockdraft.formats.gguf import GGUFFile
from blockdraft.formats.gguf.drafter import drafter_config, gguf_trained
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.formats.speculators_config import target_said
from blockdraft.targets import Description
from blockdraft.tools.inspect.report import (
    Check,
    Report,
    checks_of,
    layers_of,
    lines_of,
    same_mask,
    same_tokenizer,
    word_of,
)

TOKENS = "tokenizer.ggml.tokens"
HEAD_INPUT = "what the target's head reads"
# Fields of configurations, by their names in reports.
SIZES = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "heads": "num_attention_heads"}
SIZES |= {"key_value_heads": "num_key_value_heads", "head_size": "head_dim", "context": "max_position_embeddings"}
OWN = ("qk_norm", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "normed_feedback", "shared_head")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Content of a drafter's files.

    Attributes:
        path: Folder or file.
        layout: Name of the layout, or "gguf".
        architecture: Name of the architecture in config.json.
        config: Configuration of the network.
        layers_known: Whether the number of target layers in `config` is known.
        kinds: Number of values in the files, by their type.
        bytes: Size of the files.
        kept: Number of tokens that it can guess.
        target_name: Name of the target in the files; None if they have none.
        trained: How it was trained.
        words: The target's tokens; None if the files do not hold them.
    """

    path: str
    layout: str
    architecture: str
    config: Any
    layers_known: bool
    kinds: Mapping[str, int]
    bytes: int
    kept: int
    target_name: str | None
    trained: Trained
    words: list[str] | None = None


def layout_report(path: Path, name: str, layout: Layout, raw: Mapping[str, Any], target: Description | None) -> Report:
    """Report on a folder of one of the layouts. Raises a UsageError if it is incomplete or needs something
    unsupported."""
    files = weight_files(path, layout.pickle)
    if not files:
        raise UsageError(f"{path} has no weights (*.safetensors) beside config.json; copy them there.")
    vocabulary = target.text.tokenizer.get_vocab() if target is not None and target.text.tokenizer else None
    with blaming(path):
        tensors = open_folder(path, layout.pickle)
    with blaming(path / "config.json"):
        config, layers_known = layout.config(raw, tensors, vocabulary, None if target is None else layers_of(target))
        target_name = target_said(raw) or raw.get("base_model_name_or_path")
    shared = find_architecture(config)
    found = Found(
        path=str(path),
        layout=name,
        architecture=shared.names[0]
        if shared
        else next(entry for entry in entries().values() if name in entry.layouts).architectures[0],
        config=config,
        layers_known=layers_known,
        kinds=_kinds(tensors.values()),
        bytes=sum(file.stat().st_size for file in files),
        kept=int(raw.get("draft_vocab_size") or config.vocab_size),
        target_name=target_name,
        trained=Trained.read(raw),
    )
    return _report(found, target)


def gguf_report(file: GGUFFile, target: Description | None) -> Report:
    """Report on a GGUF file. Raises a UsageError if it lacks a value or needs something unsupported."""
    kind = kind_in(file)
    entered = file.metadata.get(f"{kind.architecture}.target_layers") or [0]
    known = file.metadata.get("blockdraft.num_target_layers") or (None if target is None else layers_of(target))
    config = drafter_config(file, known or max(entered) + 1)
    found = Found(
        path=str(file.path),
        layout="gguf",
        architecture=kind.configs()[type(config)],
        config=config,
        layers_known=known is not None,
        kinds=_kinds(file.tensors.values()),
        bytes=sum(part.stat().st_size for part in file.parts),
        kept=file.tensors["d2t"].shape[0] if "d2t" in file.tensors else config.vocab_size,
        target_name=None,
        trained=gguf_trained(file),
        words=file.metadata[TOKENS],
    )
    return _report(found, target)


def _kinds(tensors: Iterable[Any]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for tensor in tensors:
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + math.prod(tensor.shape)
    return kinds


def _report(found: Found, target: Description | None) -> Report:
    config, shared = found.config, find_architecture(found.config)
    reads_head = tuple(config.target_layers) == (config.num_target_layers,)
    about: dict[str, Any] = {
        "architecture": found.architecture,
        "layers": config.num_hidden_layers if shared else getattr(config, "num_layers", 1),
        **{name: getattr(config, field) for name, field in SIZES.items() if hasattr(config, field)},
        "parameters": sum(count for kind, count in found.kinds.items() if kind not in ("I64", "BOOL")),
        "weights": dict(found.kinds),
        "bytes": found.bytes,
    }
    if shared:
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        about["parameters"] = sum(math.prod(shape) for shape in shared.shapes(config).values())
        about["key_value_bytes_per_token"] = {"float32": 4 * values, "bfloat16": 2 * values}
    if found.trained.qat_bits is not None:
        about["rounded_in_training"] = f"{found.trained.qat_bits} bits"
    checks: list[Check] = []
    if target is not None:
        target_layers = () if reads_head else config.target_layers
        *checks, last = checks_of(config, target_layers, found.layers_known, found.trained.target, target)
        if shared:
            checks += [same_tokenizer(found.words, target), same_mask(config, target)]
        elif found.words is not None:
            checks.append(same_tokenizer(found.words, target))
        checks.append(last)
    wants = {
        "name": found.target_name,
        "layers": config.num_target_layers if found.layers_known else None,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "fingerprint": found.trained.target,
    }
    return Report(
        path=found.path,
        what="drafter",
        layout=found.layout,
        about=about,
        wants=wants,
        conventions=_conventions(found, reads_head, target),
        fits=tuple(checks),
        starts=lines_of(config, found.layout, found.path, found.target_name, target),
        config=config,
    )


def _conventions(found: Found, reads_head: bool, target: Description | None) -> dict[str, Any]:
    """Values that other readers may understand differently."""
    config, shared = found.config, find_architecture(found.config)
    target_layers, entered = [*config.target_layers], [target_layer + 1 for target_layer in config.target_layers]
    vocabulary = {"target": config.vocab_size, "from_draft": found.kept}
    rope = {"theta": config.rope_theta, "scaling": config.rope_scaling} if hasattr(config, "rope_theta") else None
    if shared is None:
        draft_tokens = config.num_heads if hasattr(config, "num_heads") else config.block_size - 1
        numbered = {
            "blockdraft": target_layers,
            "eagle3": target_layers,
            "eagle3_speculators": entered,
            "llama_cpp": entered,
        }
        return {
            "block_size": draft_tokens + 1,
            "draft_tokens": draft_tokens,
            "target_layers": HEAD_INPUT if reads_head else numbered,
            **({} if rope is None else {"rope": rope}),
            "vocabulary": vocabulary,
            found.architecture: {name: getattr(config, name) for name in OWN if hasattr(config, name)},
        }
    own = {name: getattr(config, name) for name in sorted(shared.own_keys())}
    return {
        "block_size": config.block_size,
        "draft_tokens": shared.draft_tokens(config),
        "target_layers": {
            "blockdraft": target_layers,
            "zlab": target_layers,
            "vllm_sglang": entered,
            "speculators": entered,
            "llama_cpp": entered,
        },
        "layers": [{"causal_in_block": layer.causal, "window": layer.window} for layer in config.layers],
        "rope": rope,
        "mask_token": {"id": config.mask_token_id, "token": word_of(config.mask_token_id, found.words, target)},
        "vocabulary": vocabulary,
        "embedding_scale": config.input_embedding_scale,
        "logits_multiplier": config.output_multiplier,
        "logits_softcap": config.final_logit_softcapping,
        **({found.architecture: own} if own else {}),
    }
