"""Our engine and llama.cpp, asked the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.harness.process import PeerProcess
from benchmarks.peers import environments
from benchmarks.peers.adapters.llama_cpp import PROGRAM

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_tools.export import ExportedGGUF

TOKENS = 64


def need(program: Path, name: str) -> None:
    if not program.exists():
        why = environments.why_missing(name) or "not there"
        pytest.skip(f"llama.cpp's {program.name} is missing ({why}); run make test-llamacpp")


class Ours:
    """What our engine makes of prompts: the tokens, and how many each step commits."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], target: Path, drafter: Path | str, tokens: int = TOKENS, **how: Any
    ) -> None:
        loaded = load_target(target, dtype="float32", device="cpu")
        params = SamplingParams(tokens, temperature=0, **how)
        with Engine(loaded, load_drafter(drafter, target=loaded), 8, drafting=Drafting(block_size=None)) as engine:
            done = engine.generate([[*prompt] for prompt in prompts], params)
        self.tokens = [list(one.token_ids) for one in done]
        self.committed = [one.stats.committed for one in done]

    @property
    def tau(self) -> float:
        return sum(map(sum, self.committed)) / sum(map(len, self.committed))


def peer(
    target: Path,
    log: Path,
    drafter: Path | None = None,
    speculator: str = "draft-dflash",
    draft_tokens: int = 15,
    flash_attention: bool = True,
) -> PeerProcess:
    need(PROGRAM, "llama_cpp")
    given: dict[str, Any] = {"model": str(target), "threads": 1, "max_length": 1024, "type": "f32"}
    given["flash_attention"] = flash_attention
    if drafter is not None:
        given |= {"speculator": speculator, "draft": str(drafter), "draft_tokens": draft_tokens}
    elif speculator == "draft-mtp":  # the head in the target's file
        given |= {"speculator": speculator, "draft": None, "draft_tokens": draft_tokens}
    return PeerProcess([str(PROGRAM)], given, 1, log, 120)


def accepts_alike(
    done: ExportedGGUF, target: Path, drafter: Path, kind: str, draft_tokens: int, log: Path, share: float = 0.9
) -> None:
    """Check that llama.cpp says the same as our engine, and mostly in as many steps.

    Args:
        target, drafter: What the files were made of.
        kind, draft_tokens: As in `peer`.
        share: Of the prompts, those that must take as many steps.
    """
    draws = torch.Generator().manual_seed(5)
    asked = torch.randint(5, 200, (16, 40), generator=draws).tolist()
    ours = Ours(asked, target, drafter, 48, ignore_eos=True)
    steps = []
    with peer(done.target, log, done.drafter, kind, draft_tokens) as theirs:
        for prompt, tokens in zip(asked, ours.tokens, strict=True):
            answer = theirs.ask("decode", {"prompt": prompt, "max_new_tokens": 48, "stops": []})
            assert answer["tokens"] == tokens
            steps.append(answer["steps"])
    own = [*map(len, ours.committed)]
    assert len({*own}) > 3  # so that equal counts mean something
    assert sum(a == b for a, b in zip(steps, own, strict=True)) >= share * len(own), (steps, own)
