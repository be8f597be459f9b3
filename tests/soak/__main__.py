"""Long runs under load and faults: `python tests/soak [engine|server|faults] --minutes 60`.

engine  One engine with cancelled requests, and parts that fail at random (`engine_soak.py`).
server  `blockdraft serve` under load: its memory over time, and every response compared (`server_soak.py`).
faults  `blockdraft serve` while clients vanish, read slowly or send garbage, the engine fails, the queue is full, and
        the server is terminated (`server_faults.py`).

Writes soak.json, soak.md and soak.png to --out. The status is 1 if a response is wrong or another check fails.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.harness.command import ROOT, Parser, in_words, report_failures
from benchmarks.harness.report import write_files


def main() -> int:
    parser = Parser(__doc__, out=ROOT / "build" / "soak")
    parser.add_argument("what", nargs="?", choices=("engine", "server", "faults"), default="engine")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=16, help="at a time (16)")
    parser.add_argument("--share", type=float, default=0.002, help="of an engine's calls that fail (0.002)")
    parser.add_argument("--tree-budget", default="16", help='of an engine: a number, or "auto" (16)')
    args = parser.parse()
    args.out.mkdir(parents=True, exist_ok=True)
    with in_words(resumes=False):
        if args.what == "faults":
            import server_faults

            return report_failures(server_faults.run(args.out))
        if args.what == "server":
            from server_soak import soak as soak_server

            summary, samples, failures = soak_server(args.minutes, args.requests, args.out)
        else:
            from engine_soak import soak as soak_engine

            budget = args.tree_budget if args.tree_budget == "auto" else int(args.tree_budget)
            summary, samples, failures = soak_engine(args.minutes, args.requests, args.share, tree_budget=budget)
    from soak_report import picture_of, summary_table

    found = {"summary": summary, "failures": failures, "samples": [asdict(sample) for sample in samples]}
    write_files(args.out, {"soak.json": found, "soak.md": summary_table(summary)})
    if len(samples) > 2:
        picture_of(samples, args.out / "soak.png")
    print(summary_table(summary))
    return report_failures(failures)


if __name__ == "__main__":
    sys.exit(main())
