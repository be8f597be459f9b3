"""Reports on any folder or file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdraft.drafters import TINY_DRAFTER, bundled_for, drafter_files, drafter_path, entries
from blockdraft.errors import UsageError
from blockdraft.formats import layout_of, layouts, read_config
from blockdraft.formats.folder import open_folder
from blockdraft.formats.gguf import gguf_outline, is_gguf, open_gguf
from blockdraft.formats.gguf.drafter import is_drafter
from blockdraft.formats.starting import Start
from blockdraft.models import located
from blockdraft.targets import BUNDLED, Description, describe_target, has_head
from blockdraft.text_files import read_json
from blockdraft_tools.inspect.drafters import gguf_report, layout_report
from blockdraft_tools.inspect.report import Report

ADAPTER = "adapter_config.json"
HELD_BY_TARGETS = "mtp"  # the drafter that the file of a target may hold
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # fields of models published with an MTP head


def inspect(path: str | Path, target: str | Path | None = None, revision: str | None = None) -> Report:
    """Report on a checkpoint.

    Args:
        path: A folder, a GGUF file, a hub name (of a drafter if a target is given, else of a target), "bundled" for
            the drafter that is bundled for the target (by default the tiny one).
        target: Target to check a drafter against: a folder, hub name, GGUF file, or "bundled".
        revision: Revision of a hub name.

    Raises:
        UsageError: The checkpoint is missing, of an unknown kind, or cannot be read.
    """
    place = drafter_files(path, target) if str(path) == "bundled" else Path(located(path))
    if target is None and place == TINY_DRAFTER:
        target = BUNDLED
    if target is not None:
        place = drafter_path(place)  # a hub name that is checked against a target is a drafter's
        target = located(target)
        _check_target(Path(target))
    given = None if target is None else describe_target(target, revision)
    if is_gguf(place):
        if is_drafter(file := open_gguf(place)):
            return gguf_report(file, given)
        return _target(place, describe_target(place), given)
    if not place.exists():
        return _target(path, describe_target(path, revision), given)
    if not place.is_dir():
        raise UsageError(f"{place} is neither a folder nor a GGUF file (.gguf); give the folder that it lies in.")
    if (place / ADAPTER).is_file():
        return _adapter(place, given)
    if not (place / "config.json").is_file():
        raise UsageError(f"{place} holds no checkpoint: there is no config.json and no {ADAPTER}{_instead(place)}.")
    raw = read_config(place)
    if (layout := layout_of(raw)) is not None:
        name = next(name for name, known in layouts().items() if known is layout)
        return layout_report(place, name, layout, raw, given)
    if (report := _own_report(place, raw)) is not None:
        if given is not None:
            raise UsageError(
                f"{place} is a {report.what}, which fits any target with the same tokens; leave --target out."
            )
        return report
    return _target(place, describe_target(place), given)


def _check_target(place: Path) -> None:
    """Raise a UsageError if a target's path holds something else."""
    raw = read_config(place) if (place / "config.json").is_file() else None
    kinds = {
        "a drafter": layout_of(raw) is not None
        or (place.is_file() and is_gguf(place) and is_drafter(gguf_outline(place))),
        "an adapter": raw is None and (place / ADAPTER).is_file(),
    }
    if (report := _own_report(place, raw)) is not None:
        kinds[f"a {report.what}"] = True
    for kind, is_kind in kinds.items():
        if is_kind:
            raise UsageError(f"target is {place}, which is {kind}; give a causal language model.")


def _own_report(place: Path, raw: Any) -> Report | None:
    """Return the report of the kind of drafter that claims a folder and describes it itself, or None."""
    if not isinstance(raw, Mapping):
        return None
    reports = (spec.inspect(place, raw) for spec in entries().values() if spec.inspect and spec.claims(raw))
    return next(reports, None)


def _instead(place: Path) -> str:
    """Return a hint at a checkpoint inside the folder; empty if there is none."""
    files = sorted(filter(is_gguf, place.glob("*")))
    if files:
        return f"; give one of its files, such as {files[0]}"
    inside = sorted(place.glob("*/config.json")) + sorted(place.glob(f"*/{ADAPTER}"))
    return f"; did you mean {inside[0].parent}?" if inside else ""


def _target(path: str | Path, described: Description, given: Description | None) -> Report:
    if given is not None:
        raise UsageError(f"{path} is a target itself; leave --target out, or give a drafter to compare with it.")
    config, name = described.config, str(path)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    few, architectures = described.few_bits or {}, getattr(config, "architectures", None)
    listed = architectures if isinstance(architectures, list) else []
    about: dict[str, Any] = {
        "architecture": listed[0] if listed and isinstance(listed[0], str) else config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "key_value_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "vocabulary": config.vocab_size,
        "context": described.text.max_context,
        "rope": dict(rope),
        "tied_head": bool(getattr(config, "tie_word_embeddings", False)),
        "quantized": {key: few[key] for key in ("quant_method", "bits", "group_size", "format") if key in few} or None,
        "weights": described.weights.kinds,
        "bytes": described.weights.bytes,
        "chat_template": bool(described.text.tokenizer is not None and described.text.tokenizer.chat_template),
        "tokenizer": None if described.text.tokenizer is None else len(described.text.tokenizer),
        "runs": "native" if described.reason is None else f"hf: {described.reason}",
        "fingerprint": described.fingerprint(),
    }
    if described.text.tokenizer_reason is not None:
        about["tokenizer_reason"] = described.text.tokenizer_reason
    if described.wanted is not None:
        wanted = described.wanted
        values = sum(
            wanted.stored_per_head * heads * size * len(layers) for (heads, size), layers in wanted.memories.items()
        )
        inputs = 4 * wanted.convolved_layers * wanted.hidden_size  # of short convolutions, in float32
        about |= {
            "parameters": sum(math.prod(shape) for shape in wanted.tensor_shapes().values()),
            "key_value_bytes_per_token": {"float32": 4 * values + inputs, "bfloat16": 2 * values + inputs},
        }
        if wanted.experts is not None:
            about["experts"] = {"per_layer": wanted.experts.count, "per_token": wanted.experts.chosen}
    in_file = is_gguf(path) and has_head(gguf_outline(path))
    about["mtp_head"] = in_file or any(getattr(config, key, 0) for key in MTP_LAYERS)
    drafter = ["--drafter", HELD_BY_TARGETS] if in_file and not bundled_for(path) else []
    ours = {"blockdraft": Start(shlex.join(["blockdraft", "chat", "--target", name, *drafter]))}
    if is_gguf(path):
        llama_cpp = Start(shlex.join(["llama-server", "-m", name]))
        return Report(name, "target", "gguf", about, starts={**ours, "llama.cpp": llama_cpp})
    served = {"vLLM": ["vllm", "serve", name], "SGLang": ["python", "-m", "sglang.launch_server", "--model-path", name]}
    lines = {engine: Start(shlex.join(line)) for engine, line in served.items()}
    remedy = shlex.join(["blockdraft", "export", "DRAFTER", "--target", name, "--format", "gguf", "--out", "DIR"])
    lines["llama.cpp"] = Start(None, "it reads GGUF files", remedy)
    return Report(name, "target", "transformers", about, starts={**ours, **lines})


def _adapter(place: Path, given: Description | None) -> Report:
    try:
        raw = read_json(place / ADAPTER)
        kind, modules = raw["peft_type"], raw.get("target_modules") or []
        modules = [modules] if isinstance(modules, str) else sorted(map(str, modules))  # a string is a pattern
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{place / ADAPTER} does not describe an adapter ({error!r}); copy it again.") from error
    opened = open_folder(place)
    base = raw.get("base_model_name_or_path")
    about = {
        "architecture": kind,
        "rank": raw.get("r"),
        "alpha": raw.get("lora_alpha"),
        "modules": modules,
        "parameters": sum(opened.kinds.values()),
        "bytes": opened.bytes,
    }
    target = str(base or "TARGET") if given is None else given.path
    line = ["blockdraft", "chat", "--target", target, "--adapter", str(place), "--drafter", "none"]
    return Report(str(place), "adapter", "peft", about, {"name": base}, starts={"blockdraft": Start(shlex.join(line))})
