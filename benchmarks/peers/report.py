"""Results as a page with tables, as a picture and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.interleaving import groups
from benchmarks.harness.report import number, picture, table, write_files
from benchmarks.peers.measure import Difference, Figures
from benchmarks.peers.registry import Peer

NOTES = """\
tokens/s: tokens after those that came with the prompt, over the time from there to the last one; median of {repeats}
repeats (slowest to fastest). x {reference} and x ours plain: the ratio to {reference} and to our own plain decoding in
the same repeat, median; the former is engineering and drafting together, the latter drafting alone. tau: tokens per
forward of the target. first ms: from the question to its first token, median. s/answer: reading the prompt included.
same: prompts whose answers equal those of {reference} token by token.

Peers were interleaved prompt by prompt. All had the same weights, prompts (as token ids), dtype, number of threads,
stop tokens and limit of {max_new_tokens} new tokens, and decoded greedily, one prompt at a time. Prompts with a
repetitive output (a run of 8 tokens occurs 4 times or more) are left out: {repetitive} of {prompts}."""
LOADED = """\
start: until a peer can answer, its models being there in its own format. memory: the most that its process took while
it answered one prompt at a time, mapped files included."""
AT_ONCE = """ {at_once} at once: tokens of so many answers, asked for together, over the time of
all, reading the prompts included; median of {repeats} repeats."""
OUR_COLOUR, THEIR_COLOUR, FAINT = "#d9622b", "#4878a8", "#999999"


@dataclass(frozen=True)
class Results:
    """Content of peers.json.

    Attributes:
        settings: What was asked for.
        hardware: As `blockdraft bench` tells it.
        about: What each peer tells about itself.
        start_seconds: From starting each peer until it can answer, its models being there in its format.
        peak_bytes: Peak memory of each peer's process, mapped files included.
        at_once: Tokens per second of several prompts asked at once, by peer.
        missing: Why peers are missing.
        sets: Figures by set of prompts and peer.
        repetitive: Prompts left out, by set.
        differences: Where answers leave the reference.
    """

    settings: dict[str, Any]
    hardware: dict[str, Any]
    about: dict[str, dict[str, str]]
    start_seconds: dict[str, float]
    peak_bytes: dict[str, int]
    at_once: dict[str, float]
    missing: dict[str, str]
    sets: dict[str, dict[str, Figures]]
    repetitive: dict[str, int]
    differences: list[Difference]


def figures_table(
    peers: Sequence[Peer], figures: Mapping[str, Figures], missing: Mapping[str, str], reference: str
) -> str:
    """Return a table with a line for each peer; a missing one shows the reason."""
    speeds = ("tokens/s", "range", f"x {reference}", "x ours plain")
    header, lines = ("peer", "", *speeds, "tau", "first ms", "s/answer", "same"), []
    for peer in peers:
        one = figures.get(peer.name)
        if one is None:
            reason = missing.get(peer.name, "no repeat was completed")
            lines.append(
                (peer.name, f"missing: {' '.join(reason.replace('|', '/').split())}", *("",) * (len(header) - 2))
            )
            continue
        by_repeat = one.tokens_per_second_by_repeat
        ratios = (number(each, unknown="?") for each in (one.over_reference, one.over_plain))
        speeds = (f"{one.tokens_per_second:.1f}", f"{min(by_repeat):.1f}-{max(by_repeat):.1f}", *ratios)
        same = "all" if one.same == 1 else f"{100 * one.same:.1f} %"
        times = f"{1000 * one.first_token_seconds:.0f}", f"{one.seconds_per_answer:.3f}"
        lines.append((peer.name, peer.does, *speeds, f"{one.tau:.2f}", *times, same))
    return table(header, lines, left=2)


def loaded_table(peers: Sequence[Peer], results: Results) -> str:
    """Start, memory and speed of several prompts at once, a line for each peer that ran."""
    count = results.settings["at_once"]
    header = ["peer", "start s", "memory MB", *([f"{count} at once, tokens/s"] if count else [])]
    lines = []
    for name in (peer.name for peer in peers if peer.name in results.start_seconds):
        line = [name, f"{results.start_seconds[name]:.1f}", f"{results.peak_bytes[name] / 1e6:.0f}"]
        lines.append([*line, *([number(results.at_once.get(name), ".0f", unknown="not measured")] if count else [])])
    return table(header, lines, left=1)


def page(results: Results, peers: Sequence[Peer], command: str) -> str:
    """Return all results as Markdown."""
    settings, hardware = results.settings, results.hardware
    written = "Written by `make bench-peers` or `make bench-engines`."
    parts = ["# Decoding speed against other implementations", written, "![](peers.png)"]
    for name, figures in results.sets.items():
        timed = max((one.prompts for one in figures.values()), default=0)
        parts += [f"## {name}: {timed} prompts", figures_table(peers, figures, results.missing, settings["reference"])]
    counts = {"prompts": sum(settings["prompts"].values()), "repetitive": sum(results.repetitive.values())}
    parts += [NOTES.format(**settings | counts), "## Start and memory", loaded_table(peers, results)]
    parts += [LOADED + (AT_ONCE.format(**settings) if settings["at_once"] else ""), "## Where tokens differ"]
    lines = [
        (
            one.peer,
            f"{one.prompt_set} {one.index + 1}",
            str(one.place),
            *("end" if token is None else str(token) for token in (one.expected, one.found)),
            number(one.margin, ".2g"),
        )
        for one in results.differences
    ]
    header = ("peer", "prompt", "first at token", settings["reference"], "peer's", "margin of the logits")
    parts.append(table(header, lines, left=2) if lines else "Nowhere.")
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB"
    facts = [
        f"Date: {settings['date']}",
        f"Machine: {hardware['gpu'] or machine}",
        f"Device, dtype, threads: {settings['device']}, {settings['dtype']}, {settings['threads']}",
        f"Target: {settings['target_name']}",
        f"Drafter: {settings['drafter_name']}",
        f"Command: `{command}`",
    ]
    parts += ["## Conditions", "\n".join(f"- {fact}" for fact in facts)]
    told = {
        p.name: ", ".join(f"{k} {v}" for k, v in results.about[p.name].items())
        for p in peers
        if p.name in results.about
    }
    same = groups(told, lambda name: told[name])
    parts.append("\n".join(f"- {', '.join(names)}: {versions}" for versions, names in same.items()))
    return "\n\n".join(parts) + "\n"


def draw(results: Results, peers: Sequence[Peer], path: Path) -> None:
    """Draw bars of tokens per second, one panel for each set of prompts."""
    names, settings = [peer.name for peer in peers], results.settings
    size = (3.2 + 4.6 * len(results.sets), 1.1 + 0.34 * len(names))
    with picture(path, 1, len(results.sets), sharey=True, figsize=size, dpi=150) as (figure, panels):
        for axes, (title, figures) in zip(panels[0], results.sets.items(), strict=True):
            widest = max((max(one.tokens_per_second_by_repeat) for one in figures.values()), default=1.0)
            for place, peer in enumerate(peers):
                one = figures.get(peer.name)
                if one is None:
                    axes.text(0.01 * widest, place, "missing", va="center", fontsize=8, color=FAINT)
                    continue
                rate, by_repeat = one.tokens_per_second, one.tokens_per_second_by_repeat
                ends = [[rate - min(by_repeat)], [max(by_repeat) - rate]]
                colour, thin = OUR_COLOUR if peer.is_ours else THEIR_COLOUR, {"linewidth": 0.8, "ecolor": "black"}
                axes.barh(place, rate, 0.72, xerr=ends, color=colour, capsize=2, error_kw=thin)
                over = (number(each, unknown="?") for each in (one.over_reference, one.over_plain))
                label = f"{rate:.0f}  (x{', x'.join(over)})" + ("" if one.same == 1 else "  tokens differ")
                axes.text(max(by_repeat) + 0.02 * widest, place, label, va="center", fontsize=8)
            axes.set(title=title, xlabel=f"tokens/s  (x {settings['reference']}, x ours plain)", xlim=(0, 1.6 * widest))
            axes.set_yticks(range(len(names)), names)
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
        panels[0][0].set_ylim(len(names) - 0.4, -0.6)  # in the order of the table
        figure.suptitle(
            f"Greedy decoding, one prompt at a time. Target: {settings['target_name']}; {settings['dtype']}, "
            f"{settings['device']}, threads: {settings['threads']}",
            fontsize=10,
        )


def write(folder: Path, results: Results, peers: Sequence[Peer], command: str) -> list[Path]:
    """Write peers.json, peers.md and peers.png."""
    files = write_files(folder, {"peers.json": asdict(results), "peers.md": page(results, peers, command)})
    draw(results, peers, folder / "peers.png")
    return [*files, folder / "peers.png"]
