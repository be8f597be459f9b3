"""What the answers of a trial say: whether what is on trial pays.

Speed-up is tau / R, where R follows from the weights that a cycle reads (`benchmarks/rivals/model.py`); no clock is
read. The base and each variant of what is on trial is judged by its own best way to draft: the one with the highest
speed-up on the mean of all seeds, sets and temperatures. A variant pays where its speed-up is more than `PAYS` times
that of the base for each seed, on each set, at each temperature; with fewer than two sets nothing pays.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from benchmarks.rivals.kinds import Weights
from benchmarks.rivals.model import by_weights, straight
from benchmarks.rivals.rows import Answers
from blockdraft.data.folder import write_file

PAYS = 1.03  # times the speed-up of the base
Case: TypeAlias = tuple[int, str, float]  # seed, set, temperature


@dataclass(frozen=True)
class Best:
    """A contender in its best way, by case."""

    name: str
    way: str
    tau: dict[Case, float]
    passes: dict[Case, float]
    ratio: dict[Case, float]
    speedup: dict[Case, float]


def best(name: str, rows: Sequence[Answers], weights: Weights, target_weights: int, cost_of_16: float) -> Best:
    """The way with the highest speed-up on the mean."""
    by_way: dict[str, list[Answers]] = defaultdict(list)
    for row in rows:
        if row.kind == name:
            by_way[row.way].append(row)
    found = []
    for way, each in by_way.items():
        of = {(row.seed, row.set, row.temperature): row for row in each}
        tau = {case: row.tau for case, row in of.items()}
        passes = {case: sum(row.passes_by_tokens.values()) for case, row in of.items()}
        curve = straight(cost_of_16)
        ratio = {case: by_weights(row, weights, target_weights, curve).ratio for case, row in of.items()}
        found.append(Best(name, way, tau, passes, ratio, {case: tau[case] / ratio[case] for case in of}))
    return max(found, key=lambda one: mean(one.speedup.values()))


def against(one: Best, base: Best) -> dict[Case, float]:
    """Speed-up over that of the base, of the cases that both have."""
    return {case: one.speedup[case] / base.speedup[case] for case in sorted(one.speedup.keys() & base.speedup.keys())}


def pays(ratios: dict[Case, float]) -> bool:
    return len({name for _, name, _ in ratios}) > 1 and min(ratios.values()) > PAYS


def write(
    out: Path,
    rows: Sequence[Answers],
    bases: Collection[str],
    weights: Weights,
    target_weights: int,
    costs: Sequence[float],
) -> None:
    """Write results.json and results.md, and print the latter. Raises ValueError where a contender changes tokens."""
    if changed := sorted({f"{row.kind} {row.way}" for row in rows if row.same < 1}):
        raise ValueError(f"These change tokens, so their speed says nothing: {', '.join(changed)}.")
    names = list(dict.fromkeys(row.kind for row in rows))
    [base] = [name for name in names if name in bases]
    found: list[dict[str, Any]] = []
    parts, verdicts = [_about(rows)], []
    for cost in costs:
        bests = {name: best(name, rows, weights, target_weights, cost) for name in names}
        ratios = {name: against(bests[name], bests[base]) for name in names}
        paying = [name for name in names if name != base and pays(ratios[name])]
        verdicts.append(f"where 16 tokens cost {cost:g}: {', '.join(paying) + ' pays' if paying else 'nothing pays'}")
        parts.append(f"## Where a forward of 16 tokens costs {cost:g}\n\n{_table(bests, ratios, base)}")
        found += [_figures(bests[name], ratios[name], cost, name in paying) for name in names]
    parts.append(f"**Verdict** (more than {PAYS:g} times the base in every case): {'; '.join(verdicts)}.")
    page = "\n\n".join(parts) + "\n"
    write_file(out / "results.json", (json.dumps(found, indent=2) + "\n").encode())
    write_file(out / "results.md", page.encode())
    print(page)


def _about(rows: Sequence[Answers]) -> str:
    cases = {(row.seed, row.set, row.temperature) for row in rows}
    sets, seeds = (", ".join(map(str, sorted({case[at] for case in cases}))) for at in (1, 0))
    return f"Seeds {seeds}; sets {sets}. Figures are medians of the seeds, with each seed's in brackets."


def _table(bests: dict[str, Best], ratios: dict[str, dict[Case, float]], base: str) -> str:
    lines = ["| | best way | set, temperature | tau | passes a cycle | R | speed-up | over the base |"]
    lines.append("|---" * 8 + "|")
    for name, one in bests.items():
        for group in dict.fromkeys(case[1:] for case in sorted(one.tau)):
            cases = [case for case in sorted(one.tau) if case[1:] == group]
            cells = [_cell([of[case] for case in cases]) for of in (one.tau, one.passes, one.ratio, one.speedup)]
            over = "" if name == base else _cell([ratios[name][case] for case in cases if case in ratios[name]], 3)
            lines.append(f"| {name} | {one.way} | {group[0]}, {group[1]:g} | {' | '.join(cells)} | {over} |")
    return "\n".join(lines)


def _cell(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return ""
    each = ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{median(values):.{digits}f} ({each})"


def _figures(one: Best, ratios: dict[Case, float], cost: float, pay: bool) -> dict[str, Any]:
    cases = [
        {"seed": case[0], "set": case[1], "temperature": case[2], "tau": one.tau[case], "passes": one.passes[case]}
        | {"R": one.ratio[case], "speedup": one.speedup[case], "over_base": ratios.get(case)}
        for case in sorted(one.tau)
    ]
    middle = median(ratios.values()) if ratios else None
    return {"name": one.name, "way": one.way, "cost_of_16": cost, "pays": pay, "over_base": middle, "cases": cases}
