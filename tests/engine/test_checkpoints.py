"""Prefixes of sequences with recurrent states: shared between requests, kept between turns, and stored on disk."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "targets"))
from tiny_families import write_model

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine, scheduler
from blockdraft.engine.scheduler import LAST_TOKENS
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

GREEDY = SamplingParams(12, ignore_eos=True)
SYSTEM = [(7 * i * i + 3) % 250 + 4 for i in range(70)]
DRAFTERS = pytest.mark.parametrize("drafter", ["none", "lookup"])


@pytest.fixture(scope="module", params=["qwen3_5_text", "nemotron_h"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_model(request.param, tmp_path_factory.mktemp("model"))
    loaded = load_target(folder, dtype="float32", device="cpu", compile="on")
    assert not loaded.can_truncate and loaded.keeps_checkpoints
    return loaded


def engine(target: Target, drafter: str = "none", **more: Any) -> Engine:
    settings = {"max_batch_size": 2, "prefix_tokens": 600, "prefill_tokens": 32} | more
    return Engine(
        target, load_drafter(drafter, target=target), drafting=Drafting(4) if drafter != "none" else None, **settings
    )


def alone(target: Target, prompt: list[int]) -> list[int]:
    [answer] = Engine(target, load_drafter("none", target=target)).generate([prompt], GREEDY)
    return answer.token_ids


@DRAFTERS
def test_the_next_turn_reads_what_is_new(target: Target, drafter: str) -> None:
    first = [*SYSTEM, 30, 31, 32]
    with engine(target, drafter) as running:
        [answer] = running.generate([first], GREEDY)
        assert answer.token_ids == alone(target, first) and answer.stats.remembered == 0
        changed = [*first[:-5], 50, 51, 52]  # such as another way to begin an answer
        [other] = running.generate([changed], GREEDY)
        assert other.stats.remembered == len(first) - LAST_TOKENS
        assert other.token_ids == alone(target, changed)
        whole = [*first, *answer.token_ids, 40, 41, 42]
        [second] = running.generate([whole], GREEDY)
        # All but the last token of an answer has been read, and perhaps a draft of it.
        assert len(first) + len(answer.token_ids) - 1 <= second.stats.remembered <= len(whole) - 3
        assert second.token_ids == alone(target, whole)
        [third] = running.generate([[*whole, 60]], GREEDY)
        assert third.stats.remembered >= len(whole) and third.token_ids == alone(target, [*whole, 60])


@DRAFTERS
def test_requests_that_run_together_share_what_one_has_read(target: Target, drafter: str) -> None:
    prompts = [[*SYSTEM, 30 + i, 31, 32 + i] for i in range(4)]
    with engine(target, drafter) as running:
        answers = running.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == [alone(target, prompt) for prompt in prompts]
    assert sum(answer.stats.remembered > 0 for answer in answers) >= 2


def test_a_request_that_needs_all_slots_goes_on_at_a_checkpoint(target: Target) -> None:
    first = [*SYSTEM, 30, 31, 32]
    with engine(target, cache_tokens=len(first) + 24) as running:
        [answer] = running.generate([first], GREEDY)
        changed = [*first[:-5], 50, 51, 52, 53]
        [other] = running.generate([changed], GREEDY)
        assert other.stats.remembered == len(first) - LAST_TOKENS
        assert other.token_ids == alone(target, changed)
        assert running.generate([first], GREEDY)[0].token_ids == answer.token_ids


def test_instructions_are_stored_on_disk(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    prompts = [[*SYSTEM, 30 + i, 31, 32 + i] for i in range(3)]
    for number, prompt in enumerate(prompts):
        with engine(target, stored_prefix_tokens=48) as running:
            if number == 0:  # stored once two have come
                running.submit([*SYSTEM, 9, 9], GREEDY, instruction_tokens=len(SYSTEM)).result()
            done = running.submit(prompt, GREEDY, instruction_tokens=len(SYSTEM)).result().checked()
            assert done.token_ids == alone(target, prompt)
            assert done.stats.remembered == len(SYSTEM)
        assert len(list(tmp_path.glob("prefixes/*.prefix"))) == 1


def test_a_stored_prefix_is_loaded_whole_or_not(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    with engine(target, stored_prefix_tokens=48) as running:
        for _ in range(2):
            running.submit([*SYSTEM, 9], GREEDY, instruction_tokens=len(SYSTEM)).result().checked()
    shorter = [*SYSTEM[:-1], 5, 6]
    with caplog.at_level(logging.WARNING), engine(target, stored_prefix_tokens=48) as running:
        [answer] = running.generate([shorter], GREEDY)
    assert answer.token_ids == alone(target, shorter) and answer.stats.remembered == 0 and not caplog.records


def test_a_checkpoint_that_cannot_be_stored_is_tried_once(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    constants: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    constants(scheduler, ALONE_SECONDS=1e9)  # reads, and so checkpoints, depend on no speed
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    (tmp_path / "prefixes").write_text("not a folder")
    with caplog.at_level(logging.WARNING), engine(target, stored_prefix_tokens=48) as running:
        for time in range(4):  # the last checkpoint before it is at 56 tokens
            running.submit([*SYSTEM, 9 + time, 8], GREEDY, instruction_tokens=len(SYSTEM) + 1).result().checked()
    assert caplog.text.count("cannot be stored") == 1


def test_an_answer_that_ends_within_an_accepted_draft_is_kept_up_to_a_checkpoint(target: Target) -> None:
    first = [*SYSTEM, 30, 31, 32]
    whole = alone(target, first)
    place = next(i for i in range(2, len(whole)) if whole[i] not in whole[:i])
    stopped = replace(GREEDY, stop_token_ids=(whole[place],), prediction=whole)
    with engine(target, "lookup") as running:
        [answer] = running.generate([first], stopped)
        assert answer.token_ids == whole[: place + 1] and max(answer.stats.committed) > 1
        [again] = running.generate([[*first, *answer.token_ids, 40]], GREEDY)
        assert again.token_ids == alone(target, [*first, *answer.token_ids, 40])
        assert again.stats.remembered >= len(first) - LAST_TOKENS
