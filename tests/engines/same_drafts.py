"""What our engine makes of prompts, for comparison with engines of others, and where these are installed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import encode
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets import load_target, load_target_text
from blockdraft.types import Drafting, SamplingParams

ROOT = Path(__file__).parents[2]
TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, and the drafts that it took."""

    tokens: list[int]
    drafts: int


def environment(name: str) -> Path:
    """An environment that `make test-vllm` or `make test-openvino` sets up; `BLOCKDRAFT_NAME` names another."""
    folder = Path(os.environ.get(f"BLOCKDRAFT_{name.upper()}", ROOT / f".venv-{name}"))
    if not (folder / ".installed").exists():
        pytest.skip(f"{folder} is not there; run make test-vllm or make test-openvino")
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prompts(target: Path) -> list[list[int]]:
    """The bundled questions as the target's chats."""
    text = load_target_text(target)
    lines = (ROOT / "benchmarks/peers/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [encode(json.loads(line)["prompt"], text) for line in lines]


def ours(
    asked: Sequence[Sequence[int]], target: Path, drafter: Path, dtype: str = "float32", cut_last: bool = True
) -> list[Answer]:
    """What our engine makes of the prompts, in blocks of full length.

    Args:
        cut_last: Whether the last blocks before the limit of an answer are as short as what is left of it, as our
            engine has them; a drafter that looks at all of its block draft tokens otherwise in a shorter one. Otherwise
            they are whole, as vLLM's are.
    """
    loaded = load_target(target, dtype=dtype, device="cpu", backend="native", compile="off")
    drafter_here = load_drafter(drafter, target=loaded)
    params = SamplingParams(TOKENS if cut_last else TOKENS + drafter_here.block_size, temperature=0)
    with Engine(loaded, drafter_here, drafting=Drafting(block_size=None)) as engine:
        done = [engine.generate([[*prompt]], params)[0] for prompt in asked]
    return [Answer(one.token_ids[:TOKENS], _steps(one.stats.committed)) for one in done]


def _steps(committed: Sequence[int]) -> int:
    """Number of steps until an answer has `TOKENS` tokens, of which the first takes none, or ends."""
    lengths = list(accumulate(committed, initial=1))
    return sum(length < TOKENS for length in lengths[:-1])


def first_norm_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the context's keys of all layers the first layer's norm, as vLLM 0.32 does on CPUs (benchmarks/upstream)."""
    begin = TorchDraftRunner.__init__

    def begin_alike(self: TorchDraftRunner, *given: object, **named: object) -> None:
        begin(self, *given, **named)  # type: ignore[arg-type]
        self._key_scales = self._key_scales[:1].expand_as(self._key_scales)

    monkeypatch.setattr(TorchDraftRunner, "__init__", torch.no_grad()(begin_alike))
