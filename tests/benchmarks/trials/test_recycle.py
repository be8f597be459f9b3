"""Guesses from what the target said after rejected guesses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.trials.overheard import Heard, Overheard, Rejected, rejected
from benchmarks.trials.recycle import Memory, RecycleDrafter, beside, read
from benchmarks.trials.trial import CountedDFlash
from blockdraft.drafters.dflash import load
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine
from blockdraft.proposal import Plan, chain
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, compile="off")


def laws(*said: int) -> Tensor:
    """Logits after each node that name one token, and the next id as the second likeliest."""
    logits = torch.zeros(1, len(said), 50)
    for node, token in enumerate(said):
        logits[0, node, token], logits[0, node, token + 1] = 9.0, 8.0
    return logits


TREE = torch.tensor([[5, 10, 20, 11, 21, 12]]), torch.tensor([[-1, 0, 0, 1, 3, 4]])
HEARD = Heard([7], *TREE, laws(10, 30, 31, 32, 33, 34))


def test_what_was_rejected_is_the_likeliest_path_behind_what_was_committed() -> None:
    found = rejected(HEARD, 0, [5])
    assert found.guesses == [10, 11, 21, 12]
    assert [[token for token, _ in after[:2]] for after in found.after] == [[30, 31], [32, 33], [33, 34], [34, 35]]
    assert found.after[0][0][1] == pytest.approx(float(HEARD.logits[0, 1].softmax(dim=-1)[30]))
    assert rejected(HEARD, 0, [5, 10]).guesses == [11, 21, 12]
    assert rejected(HEARD, 0, [5, 20]).guesses == []  # nothing stood behind it
    for other in ([6], [5, 13]):  # of another cycle
        assert rejected(HEARD, 0, other) == Rejected([], [])


def test_readings() -> None:
    after = [[(30, 0.9)], [(31, 0.8)], [(32, 0.7)]]
    left = Rejected([10, 11, 12], after)
    assert read(left, "swapped", 99) == after
    assert read(left, "skipped", 99) == [[(10, 1.0)], *after]
    assert read(left, "early", 11) == after[1:] and read(left, "early", 12) == after[2:]
    assert read(left, "early", 10) == read(left, "early", 99) == []  # the first was rejected, or b is none of them
    for name in ("swapped", "skipped", "early"):
        assert read(Rejected([], []), name, 10) == []


def test_a_reading_is_trusted_as_far_as_it_came_true() -> None:
    memory = Memory()
    begin = memory.trust(1)
    assert begin == memory.trust(5) > memory.trust(0)
    for _ in range(60):
        memory.foretold = [(1, 0.8), (2, 0.5), (3, 0.5)]
        memory.learn([1, 9, 3])  # what follows the second says nothing, since that was wrong
    assert memory.trust(0) > 0.95 and memory.trust(1) < 0.1 * begin
    trusted = memory.true[0] / memory.promised[0]
    assert 1.1 < trusted < 1.3 and memory.trust(0) == 1  # it promised less than came true


def test_a_cycle_is_read_for_the_next(target: Target) -> None:
    """By the drafter's own protocol: forward, observe, propose."""
    heard: Any = Overheard(target)
    drafter = RecycleDrafter(heard, "swapped", 8)
    state, cache = drafter.new_state(1, 64), target.new_cache(1, 64)
    prompt, guesses = torch.tensor([[5, 9, 30, 8]]), torch.tensor([[40, 41, 42, 43, 44]])
    heard.forward(prompt, chain(prompt).parents, cache, (), torch.tensor([3]))
    assert heard.last is None
    cache.commit([range(4)])
    drafter.observe(state, prompt, None, [4])
    params = [SamplingParams()]
    assert drafter.propose(state, torch.tensor([40]), Plan(8, params)).tokens.tolist() == [[40]]
    output = heard.forward(guesses, chain(guesses).parents, cache)
    drafter.observe(state, guesses[:, :2], None, [2])  # one guess stood
    tokens = drafter.propose(state, torch.tensor([77]), Plan(8, params)).tokens
    assert tokens[0].tolist() == [77, *output.logits[0, 2:].argmax(dim=-1).tolist()]
    assert drafter.propose(state, torch.tensor([77]), Plan(3, params)).tokens.size(1) == 3
    tree = drafter.propose(state, torch.tensor([77]), Plan(8, params, 12))
    assert (
        tree.tokens.size(1) == 13
        and tree.chances is not None
        and list(tree.chances[0]) == sorted(tree.chances[0])[::-1]
    )
    top = output.logits[0, 2].softmax(dim=-1).max()
    assert tree.chances[0][0] <= float(top)
    drafter.observe(state, torch.tensor([[77]]), None, [1])  # a cycle that the target was not heard in
    assert drafter.propose(state, torch.tensor([78]), Plan(8, params)).tokens.tolist() == [[78]]


@pytest.mark.parametrize(("budget", "readings"), [(0, ["swapped"]), (12, ["swapped", "skipped", "early"])])
def test_decoding_says_what_plain_decoding_says(
    budget: int, readings: list[str], target: Target, tiny_drafter_dir: Path
) -> None:
    prompts = [[5 + i, 9, 90 - i] for i in range(4)]
    params = [SamplingParams(24, 0.0 if i % 2 else 0.4, seed=i) for i in range(4)]
    plain = Engine(target, NoDrafter()).generate(prompts, params)
    dflash = load(tiny_drafter_dir, target, CountedDFlash)
    assert isinstance(dflash, CountedDFlash)
    listening, drafter = beside(target, dflash, readings)
    drafted = Engine(listening, drafter, 3, Drafting(8, budget)).generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert drafter.counted is dflash.counted and set(drafter.counted) <= set(range(2, 9)) and drafter.counted
