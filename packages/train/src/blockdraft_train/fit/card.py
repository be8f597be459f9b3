"""Card of a fitted drafter: README.md in its folder, with a picture of its training."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError, counted
from blockdraft.folders import write_file
from blockdraft.formats import DrafterTarget, find_layout, read_config
from blockdraft.formats.base import layouts
from blockdraft.formats.gguf import is_gguf
from blockdraft.models import named_for_others
from blockdraft_tools.engines import OURS, starts
from blockdraft_tools.export import formats_for
from blockdraft_train.fit.facts import FitPlan
from blockdraft_train.fit.prompts import HELD_OUT
from blockdraft_train.fit.steps import Step, Where
from blockdraft_train.progress import run_folder

README, PICTURE = "README.md", "fit.png"
ZLAB, SPECULATORS = "zlab", "speculators"
METHODS = {
    "none": "plain decoding",
    "chain": "drafts of whole blocks",
    "chain:auto": 'drafts of adaptive length ("auto")',
}


def usage(where: Where, temperature: float = 0.0) -> list[str]:
    """Return command lines that answer with the drafter, measure it, and export it for other engines."""
    out, target = str(where.out), where.options()
    sampled = ["--temperature", f"{temperature:g}"] if temperature else []
    held_out = str(where.folder / HELD_OUT)
    lines = [
        shlex.join(["blockdraft", "generate", *target, "--drafter", out, *sampled, "PROMPT"]),
        shlex.join(["blockdraft", "bench", *target, "--drafter", out, "--prompts", held_out, *sampled]),
    ]
    exported = _exported(where.out, where.target)
    if exported is not None:
        model = replace(where, dtype=None, device=None, backend=None).options()
        export = ["blockdraft", "export", out, *model, "--format", exported, "--out", f"{out}-{exported}"]
        lines.append(shlex.join(export))
    return lines


def _exported(drafter: Path, target: str | None) -> str | None:
    """Return the speculators format that can describe the drafter; None if it is in one already, or none can.

    These formats cannot describe the last target layer, scaled embeddings and GGUF targets.
    """
    layout, config = _written(drafter)
    if layout.endswith(SPECULATORS):
        return None
    for name in formats_for(config):
        if name.endswith(SPECULATORS):
            with suppress(UsageError):
                find_layout(name).check(config, DrafterTarget(target))
                return name
    return None


def _written(drafter: Path) -> tuple[str, Any]:
    """Return layout and configuration of a trained drafter."""
    raw = read_config(drafter)
    layout = next(name for name, candidate in layouts().items() if candidate.recognises(raw))
    return layout, find_layout(layout).config(raw, {}, DrafterTarget(num_layers=raw.get("num_target_layers")))[0]


def _format(layout: str) -> str:
    if layout.endswith(SPECULATORS):
        return "the speculators format"
    return "z-lab's layout" if layout == ZLAB else "its own layout"


def engines(where: Where) -> dict[str, str]:
    """Return command lines that start the other engines which read the drafter's folder as it is."""
    has_name = where.target is not None and not is_gguf(where.target)
    layout, config = _written(where.out)
    if (
        layout.endswith(SPECULATORS)
        and read_config(where.out)["speculators_config"]["verifier"]["name_or_path"] is None
    ):
        return {}  # made for a GGUF file, and other engines take the target's name from the drafter
    target = named_for_others(str(where.target)) if has_name else "TARGET"
    lines = starts(config, layout, str(where.out), target)
    return {name: start.typed for name, start in lines.items() if start.line is not None and name != OURS}


def write_card(
    where: Where,
    plan: FitPlan,
    steps: Sequence[Step],
    taken: Mapping[str, float],
    sources: Sequence[str],
    survey: Sequence[str],
) -> dict[str, Any]:
    """Write README.md, and fit.png where matplotlib is installed.

    Returns:
        Figures by method, as `blockdraft bench` measured them.
    """
    bench = json.loads((where.folder / "bench" / "results.json").read_text(encoding="utf-8"))
    data = json.loads((where.folder / "data" / "data.json").read_text(encoding="utf-8"))
    log = (run_folder(where.out) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    taus = [(line["step"], line["tau"]) for line in map(json.loads, log) if line.get("tau") is not None]
    methods: dict[str, Any] = bench["methods"]
    recipe, name = plan.recipe, where.target or "the bundled target"
    layers = counted(recipe.get("layers", 1), "layer")
    local = where.target is None or Path(where.target).exists()
    machine = bench["hardware"]["gpu"] or bench["hardware"]["cpu"]
    text = [
        "---",
        *([] if local else [f"base_model: {named_for_others(str(where.target))}"]),
        "library_name: blockdraft",
        f"tags: [speculative-decoding, {plan.variant}]",
        "---",
        f"# A drafter for {name}",
        "",
        f"It drafts the next tokens of {name}, which then gives the same answers in fewer steps. Made by `blockdraft "
        f"fit`: {plan.variant} in {_format(_written(where.out)[0])}, {layers}, blocks of "
        f"{recipe['block_size']}, target layers {', '.join(map(str, recipe['target_layers']))}.",
        "",
        f"## Measured on {counted(plan.bench_prompts, 'prompt')} that it was not trained on",
        "",
        "| | tokens/s | speed-up | tau | same answers |",
        "|---|---|---|---|---|",
        *(_row(METHODS[method], figures) for method, figures in methods.items()),
        "",
        f"{'Sampled' if plan.temperature else 'Greedy'}, answers of up to {plan.bench_tokens} tokens, one at a time; "
        f"{bench['arguments']['running']}, "
        f"{machine}. tau is the number of tokens per target forward pass.{_left_out(methods['none'])}",
        *(["", f"![tau while it was trained, and speeds]({PICTURE})"] if _draw(where.out, taus, methods) else []),
        "",
        "## Use",
        "",
        "```",
        *usage(where, plan.temperature),
        *(f"{line}  # {engine}" for engine, line in engines(where).items()),
        "```",
        "",
        "## Training",
        "",
        f"From {data['counts']['documents']:,} responses of the target ({data['counts']['supervised']:,} tokens) to "
        f"prompts {'from ' + ', '.join(sources) if sources else 'that it wrote itself'}.",
        "",
        *(f"- {line}" for line in survey),
        "",
        "| step | seconds | expected |",
        "|---|---|---|",
        *(f"| {step.name} | {taken[step.name]:.0f} | {step.seconds:.0f} |" for step in steps),
        "",
        "```",
        *(step.line for step in steps),
        "```",
    ]
    write_file(where.out / README, ("\n".join(text) + "\n").encode())
    return methods


def _left_out(figures: Mapping[str, Any]) -> str:
    loops = figures["prompts"] - figures["timed_prompts"]
    if not loops:
        return ""
    return f" {loops} of the {figures['prompts']} answers are repetitive and count in the last column only."


def _row(name: str, figures: Mapping[str, Any]) -> str:
    """Return a line of the table, without figures if every answer is repetitive."""
    numbers = [(figures["tokens_per_second"], "{:.0f}"), (figures["speedup"], "{:.2f}"), (figures["tau"], "{:.2f}")]
    cells = ["-" if value is None else form.format(value) for value, form in numbers]
    return f"| {name} | {' | '.join(cells)} | {100 * figures['identical']:.0f} % |"


def _draw(folder: Path, taus: Sequence[tuple[int, float]], methods: Mapping[str, Any]) -> bool:
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(10, 4), dpi=120, layout="constrained")
    except ImportError:
        return False
    left, right = figure.subplots(1, 2)
    left.plot([step for step, _ in taus], [tau for _, tau in taus], marker="o")
    left.set(title="tau on held-out prompts", xlabel="Training step")
    left.grid(alpha=0.3)
    right.barh([METHODS[name] for name in methods], [figures["tokens_per_second"] or 0 for figures in methods.values()])
    right.invert_yaxis()
    right.set(title="Speed", xlabel="tokens/s")
    partial = folder / f".{PICTURE}.{os.getpid()}.tmp"
    figure.savefig(partial, format="png")
    partial.replace(folder / PICTURE)
    return True
