"""How near projections of `blockdraft radar` come to speeds that others published.

Prints hits and misses, and writes accuracy.md. With --fit, the constants of the classes of devices
(packages/radar/src/blockdraft_radar/constants.toml) are first fitted on the half of the figures that does not judge.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.command import Parser
from benchmarks.harness.report import write_files
from benchmarks.radar.accuracy import ASKED, fit, page, percent, shares, verdicts
from benchmarks.radar.published import published

from blockdraft_radar.step import CONSTANTS, Constants, constants


def constants_toml(head: str, fitted: Mapping[str, Constants]) -> str:
    """Return the text of a file of constants, below its former comment."""
    lines = [line for line in head.splitlines() if line.startswith("#")]
    for kind, constant in fitted.items():
        lines += ["", f"[{kind}]"]
        for name, value in vars(constant).items():
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, prog="make bench-radar")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR", help="folder of the page")
    parser.add_argument("--fit", action="store_true", help="fit the constants first, and write them")
    options = parser.parse_args(arguments)
    if options.fit:
        print("Fitting constants, which takes minutes ...", flush=True)
        text = constants_toml(CONSTANTS.read_text(encoding="utf-8"), fit())
        write_files(CONSTANTS.parent, {CONSTANTS.name: text})
        constants.cache_clear()
    results = list(verdicts(published()))
    for verdict in results:
        measured, what, value = verdict.figure
        mark = "near" if verdict.near else "in" if verdict.inside else "OUT"
        print(
            f"{mark:4} {measured.device:20} {measured.model:28} {measured.weights:7} batch {measured.batch:<3}"
            f"{what:8} {value:9.1f} {verdict.projected.mid:9.1f} {verdict.off:+.0%}"
        )
    judged = [verdict for verdict in results if not verdict.figure.measured.fitted]
    for name, share in shares(judged).items():
        print(f"{name}: {percent(share)} of {len(judged)} figures that judge ({percent(ASKED[name])} asked for)")
    print(f"Written: {write_files(options.out, {'accuracy.md': page()})[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
