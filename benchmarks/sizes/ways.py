"""Ways to decode that are compared: kinds of weights, ours and llama.cpp's, and how each of them drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.process import PeerProcess
from benchmarks.peers import environments

OURS, LLAMA = "ours", "llama.cpp"
PLAIN = "plain"
ADAPTERS = Path(environments.__file__).parent / "adapters"
# By kind: bits of a weight in memory (the checkpoints are in bfloat16, and stay so), and how it is loaded.
OUR_KINDS: dict[str, tuple[int, dict[str, str]]] = {
    "float32": (16, {"dtype": "float32"}),
    "bfloat16": (16, {"dtype": "bfloat16"}),
    "int8": (8, {"dtype": "float32", "quantize": "int8"}),
    "int4": (4, {"dtype": "float32", "quantize": "int4"}),
}
EXACT = "bf16"  # llama.cpp's kind that is not rounded
LLAMA_KINDS = {EXACT: 16, "Q8_0": 8, "Q4_0": 4, "Q4_K": 4}
BITS = {name: bits for name, (bits, _) in OUR_KINDS.items()} | LLAMA_KINDS
LLAMA_DRAFT_TOKENS = (3, 5)
Q4_K_ROW = 256  # weights; the length of a matrix's rows must be a multiple
MEMORY_MARGIN = 1.25  # scales, heads of 8 bits, caches and what a process takes anyway
TREE_BLOCK = 8  # how deep a tree of a fixed size may be


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        side: `OURS` or `LLAMA`.
        kind: Of weights, of `OUR_KINDS` or `LLAMA_KINDS`.
        method: "plain", "chain:N" with N guesses, "tree:N" with N guesses, "chain:auto" and "tree:auto" with as many as
            pay.
        drafter: Of llama.cpp's drafting ways, the kind of the drafter's weights; else empty.
    """

    side: str
    kind: str
    method: str
    drafter: str = ""

    @property
    def bits(self) -> int:
        return BITS[self.kind]

    @property
    def name(self) -> str:
        """Name of the way to draft."""
        return f"{self.method}, drafter {self.drafter}" if self.drafter else self.method

    @property
    def plain(self) -> Way:
        """Plain decoding with the same weights."""
        return Way(self.side, self.kind, PLAIN)

    @property
    def process(self) -> Way:
        """Stands for the process that decodes so: one serves all of our ways with a kind of weights."""
        return Way(OURS, self.kind, "") if self.side == OURS else self


def ways(
    kinds: list[str], methods: list[str], llama_kinds: list[str], llama_draft_tokens: Sequence[int] = LLAMA_DRAFT_TOKENS
) -> list[Way]:
    """All ways, most bits first. Raises ValueError for an unknown method."""
    for method in methods:
        drafting(method)
    found = [Way(OURS, kind, method) for kind in kinds for method in dict.fromkeys([PLAIN, *methods])]
    for kind in llama_kinds:
        found.append(Way(LLAMA, kind, PLAIN))
        drafters = dict.fromkeys([EXACT, kind])
        found += [
            Way(LLAMA, kind, f"chain:{draft_tokens}", each) for each in drafters for draft_tokens in llama_draft_tokens
        ]
    return sorted(found, key=lambda way: -way.bits)


def memory(processes: Iterable[Way], target: int, drafter: int) -> int:
    """About how many bytes these take while all are loaded.

    Args:
        target, drafter: Bytes of their checkpoints, in bfloat16.
    """

    def taken(process: Way) -> float:
        drafts = process.side == OURS or process.method != PLAIN
        own = drafter * BITS[process.drafter or process.kind] if drafts else 0
        return (target * process.bits + own) / 16

    return int(MEMORY_MARGIN * sum(map(taken, processes)))


def drafting(method: str) -> dict[str, Any]:
    """Options of our adapter for a method; raises ValueError for an unknown one."""
    if method == PLAIN:
        return {"drafter": "none"}
    name, _, draft_tokens = method.partition(":")
    if name not in ("chain", "tree") or not (draft_tokens == "auto" or draft_tokens.isdigit()):
        raise ValueError(f"Method {method!r} is unknown; there are plain, chain:N, chain:auto, tree:N and tree:auto.")
    if draft_tokens == "auto":
        return {"drafting": {"block_size" if name == "chain" else "tree_budget": "auto"}}
    if name == "chain":
        return {"drafting": {"block_size": int(draft_tokens) + 1}}  # the anchor counts
    return {"drafting": {"block_size": TREE_BLOCK, "tree_budget": int(draft_tokens)}}


def start(process: Way, served: list[Way], given: dict[str, Any], patience: float, log: Path) -> PeerProcess:
    """Load the models of a process.

    Args:
        process: Of `Way.process`.
        served: Our ways that it is to know.
        given: Settings of all peers; see the README of the peers.

    Raises:
        PeerError: It is missing; the message says why.
    """
    if process.side == OURS:
        adapter, settings = "ours.py", OUR_KINDS[process.kind][1]
        options: dict[str, Any] = {"compiled": True, "ways": {way.method: drafting(way.method) for way in served}}
    else:
        adapter, settings = "llama_cpp.py", {"dtype": "bfloat16", "cache_type": "f16"}  # float16 is its default
        options = {"weights": _rounding(process.kind)}
        if process.method != PLAIN:
            options |= {
                "speculator": "draft-dflash",
                "draft": "drafter",
                "draft_tokens": int(process.method.split(":")[1]),
            }
            options |= {"draft_weights": _rounding(process.drafter)}
    command = [sys.executable, str(ADAPTERS / adapter)]
    return PeerProcess(command, given | settings | {"options": options}, given["threads"], log, patience)


def _rounding(kind: str) -> str | None:
    return None if kind == EXACT else kind
