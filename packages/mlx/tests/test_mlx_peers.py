"""Other programs for MLX generate the same tokens in the same steps with the bundled pair."""

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
    messages = [[{"role": "user", "content": text}] for text in chats(10)]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in messages]


@pytest.fixture(scope="module")
def ours(prompts: list[list[int]]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Tokens of each output and how many each step committed, by backend."""
    outputs = {}
    for backend in ("mlx", "native"):
        target = load_target(TARGET, dtype="float32", device="cpu", backend=backend)
        with Engine(target, load_drafter(DRAFTER, target=target), 1, Drafting(None)) as engine:
            completions = [engine.generate([prompt], SamplingParams(TOKENS))[0] for prompt in prompts]
        outputs[backend] = [(completion.token_ids, completion.stats.committed) for completion in completions]
    return outputs


@pytest.mark.parametrize("peer", PEERS)
def test_the_bundled_pair_takes_the_same_steps(
    peer: str, prompts: list[list[int]], ours: dict[str, list[tuple[list[int], list[int]]]]
) -> None:
    if importlib.util.find_spec(peer) is None:
        pytest.skip("make test-mlx installs it")
    assert ours["mlx"] == ours["native"]
    command = [sys.executable, Path(__file__).with_name("mlx_peers.py"), peer, TARGET, DRAFTER, str(TOKENS)]
    run = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout.splitlines()[-1])
    for [tokens, steps], [their_tokens, their_steps] in zip(ours["mlx"], theirs, strict=True):
        assert their_tokens[:TOKENS] == tokens  # their last block may exceed the limit
        assert their_steps[:-1] == steps[:-1] and len(their_steps) == len(steps)
        assert their_steps[-1] >= steps[-1]
    assert sum(len(steps) for _, steps in theirs) < 0.5 * sum(len(tokens) for tokens, _ in theirs)
