"""The process of `benchmarks.against` that runs in either tree and speaks the protocol of the peers.

It uses only names that both trees have: `load_target`, `load_drafter`, `Engine`, `Drafting`, `SamplingParams`,
`generate`, and of completions `token_ids` and `stats.committed`.
"""

import json
import logging
import sys
import time
from typing import Any

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target

METHODS = {
    "plain": ("plain", Drafting(block_size=None)),
    "chain": ("drafted", Drafting(block_size=None)),
    "tree": ("drafted", Drafting(tree_budget=16)),
}
ATTEMPTS, PAUSE_SECONDS = 40, 3.0  # the compiler may still be running


class Warnings(logging.Handler):
    """Collects warnings of blockdraft, such as that a drafter runs uncompiled."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Timed:
    """Wraps a method and adds up its time."""

    def __init__(self, method: Any) -> None:
        self.method, self.seconds, self.calls = method, 0.0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self.method(*args, **kwargs)
        finally:
            self.seconds, self.calls = self.seconds + time.perf_counter() - began, self.calls + 1


def load(target: str | None, drafter: str | None, backend: str, **how: Any) -> tuple[Any, dict[str, Any]]:
    """Load a target and its drafters. Raises a RuntimeError if the pair should run compiled and does not.

    Args:
        how: Further options of `load_target`.
    """
    warnings = Warnings()
    logging.getLogger("blockdraft").addHandler(warnings)
    for _ in range(ATTEMPTS):
        warnings.lines.clear()
        compile = "on" if backend == "native" else "auto"
        model = load_target(target, backend=backend, device="cpu", compile=compile, **how)
        drafters = {
            "plain": load_drafter("none", target=model),
            "drafted": load_drafter(drafter, target=model),
        }
        if not warnings.lines:
            break
        time.sleep(PAUSE_SECONDS)
    if warnings.lines:
        raise RuntimeError(f"not measured, since {warnings.lines[0]}")
    if backend == "native" and "compiled" not in model.running:
        raise RuntimeError(f"not measured, since the target runs {model.running}")
    return model, drafters


def main() -> None:
    target, drafters = load(**json.loads(sys.argv[1]))
    forward = target.forward = Timed(target.forward)
    engines: dict[tuple[str, int], Any] = {}
    print(json.dumps({"ready": {"running": target.running}}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)["measure"]
        cell = asked["method"], asked["rows"]
        if cell not in engines:
            name, drafting = METHODS[asked["method"]]
            engines[cell] = Engine(target, drafters[name], asked["rows"], drafting)
        forward.seconds, forward.calls = 0.0, 0
        began = time.perf_counter()
        completions = engines[cell].generate(asked["prompts"], SamplingParams(asked["tokens"]))
        seconds = time.perf_counter() - began
        # Sequences of a batch share forward passes, so count these and not the steps of each sequence.
        host = (seconds - forward.seconds) / forward.calls if forward.calls else None
        answer = {
            "seconds": seconds,
            "host_seconds_per_forward": host,
            "answers": [completion.token_ids for completion in completions],
            "steps": sum(len(completion.stats.committed) for completion in completions),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
