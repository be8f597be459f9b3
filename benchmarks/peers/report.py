"""The results as a page with tables, as a picture and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Difference, Figures
from benchmarks.peers.registry import Peer

NOTES = """\
tokens/s: tokens after those that came with the prompt, over the time from there to the last one; median of {repeats}
repeats (slowest to fastest). x transformers and x ours plain: the ratio to `generate` and to our own plain decoding in
the same repeat, median; the former is engineering and drafting together, the latter drafting alone. tau: tokens per
forward of the target. s/answer: reading the prompt included. same: prompts whose answers equal those of `generate`
token by token; a speed counts only where that is all of them.

Peers took turns prompt by prompt. All had the same weights, prompts (as token ids), dtype, number of threads, stop
tokens and limit of {max_new_tokens} new tokens, and decoded greedily, one prompt at a time. Prompts whose answer loops
(a run of 8 tokens occurs 4 times or more) are left out: {looping} of {prompts}."""
OUR_COLOUR, THEIR_COLOUR, FAINT = "#d9622b", "#4878a8", "#999999"


@dataclass(frozen=True)
class Results:
    """What peers.json holds.

    Attributes:
        settings: What was asked for.
        hardware: As `blockdraft bench` tells it.
        about: What each peer tells about itself, or why it is missing.
        sets: Figures by set of prompts and peer.
        looping: Prompts left out, by set.
        differences: Where answers leave the reference.
    """

    settings: dict[str, Any]
    hardware: dict[str, Any]
    about: dict[str, dict[str, str]]
    missing: dict[str, str]
    sets: dict[str, dict[str, Figures]]
    looping: dict[str, int]
    differences: list[Difference]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def table(peers: Sequence[Peer], figures: Mapping[str, Figures], missing: Mapping[str, str]) -> str:
    """A Markdown table with a row for each peer; one that is missing has its reason there."""
    header = ("peer", "", "tokens/s", "range", "x transformers", "x ours plain", "tau", "s/answer", "same")
    rows = [header, tuple("---" if i < 2 else "---:" for i in range(len(header)))]
    for peer in peers:
        one = figures.get(peer.name)
        if one is None:
            reason = missing.get(peer.name, "no repeat was completed")
            rows.append((peer.name, f"missing: {_cell(reason)}", *("",) * 7))
            continue
        by_repeat = one.tokens_per_second_by_repeat
        rows.append(
            (
                peer.name,
                peer.does,
                f"{one.tokens_per_second:.1f}",
                f"{min(by_repeat):.1f}-{max(by_repeat):.1f}",
                _number(one.over_reference),
                _number(one.over_plain),
                f"{one.tau:.2f}",
                f"{one.seconds_per_answer:.3f}",
                "all" if one.same == 1 else f"{100 * one.same:.1f} %",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(results: Results, peers: Sequence[Peer], command: str) -> str:
    """The whole page, as Markdown."""
    settings, hardware = results.settings, results.hardware
    parts = ["# Decoding speed against other implementations", "Written by `make bench-peers`.", "![](peers.png)"]
    for name, figures in results.sets.items():
        timed = max((one.prompts for one in figures.values()), default=0)
        parts += [f"## {name}: {timed} prompts", table(peers, figures, results.missing)]
    prompts = sum(settings["prompts"].values())
    parts.append(NOTES.format(**settings | {"prompts": prompts, "looping": sum(results.looping.values())}))
    parts.append("## Where tokens differ")
    parts.append(_differences(results.differences) if results.differences else "Nowhere.")
    memory = hardware["memory_bytes"] / 2**30
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {memory:.0f} GiB"
    facts = [
        f"Machine: {hardware['gpu'] or machine}",
        f"Device, dtype, threads: {settings['device']}, {settings['dtype']}, {settings['threads']}",
        f"Target: {settings['target_name']}",
        f"Drafter: {settings['drafter_name']}",
        f"Command: `{command}`",
    ]
    parts += ["## Conditions", "\n".join(f"- {fact}" for fact in facts)]
    versions = {
        peer.name: ", ".join(f"{key} {value}" for key, value in results.about[peer.name].items())
        for peer in peers
        if peer.name in results.about
    }
    grouped: dict[str, list[str]] = {}
    for name, told in versions.items():
        grouped.setdefault(told, []).append(name)
    parts.append("\n".join(f"- {', '.join(names)}: {told}" for told, names in grouped.items()))
    return "\n\n".join(parts) + "\n"


def _differences(found: Sequence[Difference]) -> str:
    header = ("peer", "prompt", "first at token", "`generate`", "peer's", "margin of the logits")
    rows = [header, ("---", "---", *("---:",) * 4)]
    for one in found:
        tokens = ("end" if token is None else str(token) for token in (one.expected, one.found))
        margin = "" if one.margin is None else f"{one.margin:.2g}"
        rows.append((one.peer, f"{one.prompt_set} {one.index + 1}", str(one.place), *tokens, margin))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def picture(results: Results, peers: Sequence[Peer]) -> bytes:
    """Bars of tokens per second, one panel for each set of prompts, as PNG."""
    names = [peer.name for peer in peers]
    size = (3.2 + 4.6 * len(results.sets), 1.1 + 0.34 * len(names))
    figure = import_module("matplotlib.figure").Figure(figsize=size, dpi=150, layout="constrained")
    panels = figure.subplots(1, len(results.sets), sharey=True, squeeze=False)[0]
    for axes, (title, figures) in zip(panels, results.sets.items(), strict=True):
        widest = max((max(one.tokens_per_second_by_repeat) for one in figures.values()), default=1.0)
        for row, peer in enumerate(peers):
            one = figures.get(peer.name)
            if one is None:
                axes.text(0.01 * widest, row, "missing", va="center", fontsize=8, color=FAINT)
                continue
            rate, by_repeat = one.tokens_per_second, one.tokens_per_second_by_repeat
            spread = [[rate - min(by_repeat)], [max(by_repeat) - rate]]
            colour = OUR_COLOUR if peer.is_ours else THEIR_COLOUR
            thin = {"linewidth": 0.8, "ecolor": "black"}
            axes.barh(row, rate, 0.72, xerr=spread, color=colour, capsize=2, error_kw=thin)
            label = f"{rate:.0f}  (x{_number(one.over_reference)}, x{_number(one.over_plain)})"
            label += "" if one.same == 1 else "  tokens differ"
            axes.text(max(by_repeat) + 0.02 * widest, row, label, va="center", fontsize=8)
        axes.set(title=title, xlabel="tokens/s  (x transformers generate, x ours plain)", xlim=(0, 1.45 * widest))
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    panels[0].set_ylim(len(names) - 0.4, -0.6)  # in the order of the table
    settings = results.settings
    figure.suptitle(
        f"Greedy decoding, one prompt at a time. Target: {settings['target_name']}; {settings['dtype']}, "
        f"{settings['device']}, threads: {settings['threads']}",
        fontsize=10,
    )
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def write(folder: Path, results: Results, peers: Sequence[Peer], command: str) -> list[Path]:
    """Write peers.md, peers.png and peers.json; each is complete or as it was before."""
    files = {
        "peers.json": results.as_json().encode(),
        "peers.md": page(results, peers, command).encode(),
        "peers.png": picture(results, peers),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        unfinished = folder / f"{name}.tmp"
        unfinished.write_bytes(content)
        unfinished.replace(folder / name)
    return [folder / name for name in files]


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
