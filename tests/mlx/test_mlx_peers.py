"""Other programs for MLX as outside judges: on the bundled pair they say the same tokens in the same cycles."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pair_chats import PAIR, chats
from transformers import AutoTokenizer

pytest.importorskip("mlx_lm")

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.mlx

PEERS = ["dflash", "mlx_dspark", "dflash_mlx"]  # of mlx_peers.py
TARGET, DRAFTER, TOKENS = str(PAIR / "target"), str(PAIR / "drafter"), 40


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    every = [[{"role": "user", "content": text}] for text in chats(10)]
    return [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in every]


@pytest.fixture(scope="module")
def ours(prompts: list[list[int]]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Tokens and accepted draft tokens of each prompt, by backend."""
    found = {}
    for backend in ("mlx", "native"):
        target = load_target(TARGET, "float32", "cpu", backend=backend)
        with Engine(target, load_drafter(DRAFTER, target=target), 1, Drafting(None)) as engine:
            every = [engine.generate([each], SamplingParams(TOKENS))[0] for each in prompts]
        found[backend] = [(each.token_ids, each.stats.committed) for each in every]
    return found


@pytest.mark.parametrize("peer", PEERS)
def test_the_bundled_pair_takes_the_same_cycles(
    peer: str, prompts: list[list[int]], ours: dict[str, list[tuple[list[int], list[int]]]]
) -> None:
    if importlib.util.find_spec(peer) is None:
        pytest.skip("make test-mlx installs it")
    assert ours["mlx"] == ours["native"]
    command = [sys.executable, Path(__file__).with_name("mlx_peers.py"), peer, TARGET, DRAFTER, str(TOKENS)]
    run = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout.splitlines()[-1])
    for [tokens, cycles], [their_tokens, their_cycles] in zip(ours["mlx"], theirs, strict=True):
        assert their_tokens[:TOKENS] == tokens  # a last block may go on behind the end
        assert their_cycles[:-1] == cycles[:-1] and len(their_cycles) == len(cycles)
        assert their_cycles[-1] >= cycles[-1]
    assert sum(len(cycles) for _, cycles in theirs) < 0.5 * sum(len(tokens) for tokens, _ in theirs)
