"""Behaviour of the compiled draft pass alone; test_draft_pass.py compares it with torch's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.drafters import load_drafter
from blockdraft.errors import UsageError
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.targets import load_target

TOKENS = torch.empty(0)  # which the context of these networks does not depend on


@pytest.fixture(params=["tiny_drafter_dir", "tiny_dflash2_dir"])
def run(tiny_target_dir: Path, request: pytest.FixtureRequest) -> CompiledDraftRunner:
    target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    drafter: Any = load_drafter(request.getfixturevalue(request.param), target=target)
    assert isinstance(drafter.runner, CompiledDraftRunner) and drafter.compile_reason is None
    return drafter.runner


def test_threads_may_call_at_once_and_get_the_bits_they_get_alone(
    run: CompiledDraftRunner, constants: Callable[..., None]
) -> None:
    constants("blockdraft.kernels.cpu.compiled_decoder", FIRST_POSITIONS=8)
    texts = torch.randn(6, 200, 64)

    def answer(number: int) -> list[torch.Tensor]:
        state, actual, at = run.new_state(1, 256), [], 0
        while at + 3 * (number + 1) < 200:
            run.observe(state, TOKENS, texts[number : number + 1, at : at + 3 * (number + 1)])
            state.commit([range(3 * (number + 1))])
            at = state.lengths[0]
            tokens = torch.full((1, 8), 3 + number)
            actual += [*run.draft_tokens(state, tokens, 1), run.block_pass(state, torch.ones(1, 2 + number, 32))]
        return actual

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(answer, range(6)))
    for number, actual in enumerate(together):
        assert all(map(torch.equal, actual, answer(number)))


def test_calls_without_tokens_or_sequences_do_nothing(run: CompiledDraftRunner) -> None:
    state = run.new_state(2, 16)
    run.observe(state, TOKENS, torch.randn(2, 5, 64))
    state.commit([range(5)] * 2)
    before = run.block_pass(state, torch.ones(2, 3, 32))
    run.observe(state, TOKENS, torch.randn(2, 0, 64))
    assert torch.equal(run.block_pass(state, torch.ones(2, 3, 32)), before)
    state = state.of([])
    run.observe(state, TOKENS, torch.randn(0, 3, 64))
    run.observe(state, TOKENS, torch.randn(0, 0, 64))
    hidden, logits = run.draft_tokens(state, torch.zeros(0, 4, dtype=torch.int64), 1)
    assert hidden.shape == (0, 3, 32) and logits.shape == (0, 3, 265)


def test_tokens_must_be_known(run: CompiledDraftRunner) -> None:
    for wrong in (-1, 265):
        with pytest.raises(UsageError, match=f"Token id {wrong} is none of the 265"):
            run.draft_tokens(run.new_state(1, 16), torch.tensor([[0, wrong]]), 1)


def test_calls_stay_within_the_workspace_that_they_ask_for(run: CompiledDraftRunner) -> None:
    for count in (1, 9, 40):
        needed = run.workspace_bytes(2, count, count + 12) // 4
        memory = torch.full((needed + 64,), 7.5)
        run.workspace = memory[:needed]
        state = run.new_state(2, 64)
        run.observe(state, TOKENS, torch.randn(2, count, 64))
        state.commit([range(12 if count > 12 else count)] * 2)
        run.draft_tokens(state, torch.zeros(2, count, dtype=torch.int64), 0)
        assert (memory[needed:] == 7.5).all() and run.workspace.data_ptr() == memory.data_ptr()
