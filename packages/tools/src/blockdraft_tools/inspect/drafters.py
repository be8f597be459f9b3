"""Reports on drafters: conventions, the target that each needs, and checks against a given one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.drafters import entries
from blockdraft.formats import DrafterTarget, Layout, Trained
from blockdraft.formats.architectures import find_architecture
from blockdraft.formats.folder import blaming, open_drafter
from blockdraft.formats.gguf import GGUFFile
from blockdraft.formats.gguf.drafter import TOKENS_OF_TARGET, drafter_config, gguf_trained
from blockdraft.formats.gguf.kinds import kind_in
from blockdraft.formats.speculators_config import target_name_of
from blockdraft.targets import Description
from blockdraft_tools.inspect.report import (
    Check,
    Report,
    checks_of,
    layers_of,
    lines_of,
    same_mask,
    same_tokenizer,
    word_of,
)

HEAD_INPUT = "the input of the target's head"
# Fields of configurations by their names in reports.
SIZES = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "heads": "num_attention_heads"}
SIZES |= {"key_value_heads": "num_key_value_heads", "head_size": "head_dim", "context": "max_position_embeddings"}
OWN = ("qk_norm", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "normed_feedback", "shared_head")


@dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    """Content of a drafter's files.

    Attributes:
        path: Folder or file.
        layout: Name of the layout, or "gguf".
        architecture: Name of the architecture in config.json.
        config: Configuration of the network.
        layers_known: Whether the number of target layers in `config` is known.
        kinds: Number of values in the files, by type.
        bytes: Size of the files.
        kept: Size of the draft vocabulary.
        target_name: Name of the target in the files, if they have one.
        trained: How it was trained.
        words: The target's tokens, if the files hold them.
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
    """Report on a folder of one of the layouts. Raise a UsageError if it is incomplete or unsupported."""
    opened = open_drafter(path, layout.pickle)
    vocabulary = target.text.tokenizer.get_vocab() if target is not None and target.text.tokenizer else None
    with blaming(path / "config.json"):
        facts = DrafterTarget(vocabulary=vocabulary, num_layers=None if target is None else layers_of(target))
        config, layers_known = layout.config(raw, opened.tensors, facts)
        target_name = target_name_of(raw) or raw.get("base_model_name_or_path")
    shared = find_architecture(config)
    files = DrafterFiles(
        path=str(path),
        layout=name,
        architecture=shared.names[0]
        if shared
        else next(entry for entry in entries().values() if name in entry.layouts).architectures[0],
        config=config,
        layers_known=layers_known,
        kinds=opened.kinds,
        bytes=opened.bytes,
        kept=int(raw.get("draft_vocab_size") or config.vocab_size),
        target_name=target_name,
        trained=Trained.read(raw),
    )
    return _report(files, target)


def gguf_report(file: GGUFFile, target: Description | None) -> Report:
    """Report on a GGUF file. Raise a UsageError if it is incomplete or unsupported."""
    kind = kind_in(file)
    entered = file.metadata.get(f"{kind.architecture}.target_layers") or [0]
    known = file.metadata.get("blockdraft.num_target_layers") or (None if target is None else layers_of(target))
    config = drafter_config(file, known or max(entered) + 1)
    files = DrafterFiles(
        path=str(file.path),
        layout="gguf",
        architecture=kind.configs()[type(config)],
        config=config,
        layers_known=known is not None,
        kinds=file.kinds,
        bytes=file.bytes,
        kept=file.tensors["d2t"].shape[0] if "d2t" in file.tensors else config.vocab_size,
        target_name=None,
        trained=gguf_trained(file),
        words=file.metadata.get(TOKENS_OF_TARGET),
    )
    return _report(files, target)


def _report(files: DrafterFiles, target: Description | None) -> Report:
    config, shared = files.config, find_architecture(files.config)
    reads_head = tuple(config.target_layers) == (config.num_target_layers,)
    about: dict[str, Any] = {
        "architecture": files.architecture,
        "layers": config.num_hidden_layers if shared else getattr(config, "num_layers", 1),
        **{name: getattr(config, field) for name, field in SIZES.items() if hasattr(config, field)},
        "parameters": sum(count for kind, count in files.kinds.items() if kind not in ("I64", "BOOL")),
        "weights": dict(files.kinds),
        "bytes": files.bytes,
    }
    if shared:
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        about["parameters"] = sum(math.prod(shape) for shape in shared.shapes(config).values())
        about["key_value_bytes_per_token"] = {"float32": 4 * values, "bfloat16": 2 * values}
    if files.trained.qat_bits is not None:
        about["rounded_in_training"] = f"{files.trained.qat_bits} bits"
    checks: list[Check] = []
    if target is not None:
        target_layers = () if reads_head else config.target_layers
        *checks, last = checks_of(config, target_layers, files.layers_known, files.trained.target, target)
        if shared:
            checks += [same_tokenizer(files.words, target), same_mask(config, target)]
        elif files.words is not None:
            checks.append(same_tokenizer(files.words, target))
        checks.append(last)
    wants = {
        "name": files.target_name,
        "layers": config.num_target_layers if files.layers_known else None,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "fingerprint": files.trained.target,
    }
    return Report(
        path=files.path,
        what="drafter",
        layout=files.layout,
        about=about,
        wants=wants,
        conventions=_conventions(files, reads_head, target),
        fits=tuple(checks),
        starts=lines_of(config, files.layout, files.path, files.target_name, target),
        config=config,
    )


def _conventions(files: DrafterFiles, reads_head: bool, target: Description | None) -> dict[str, Any]:
    """Return the values that other readers may interpret differently."""
    config, shared = files.config, find_architecture(files.config)
    target_layers, entered = [*config.target_layers], [target_layer + 1 for target_layer in config.target_layers]
    vocabulary = {"target": config.vocab_size, "from_draft": files.kept}
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
            files.architecture: {name: getattr(config, name) for name in OWN if hasattr(config, name)},
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
        "mask_token": {"id": config.mask_token_id, "token": word_of(config.mask_token_id, files.words, target)},
        "vocabulary": vocabulary,
        "embedding_scale": config.input_embedding_scale,
        "logits_multiplier": config.output_multiplier,
        "logits_softcap": config.final_logit_softcapping,
        **({files.architecture: own} if own else {}),
    }
