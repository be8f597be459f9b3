"""Continuous batching: who runs, who waits, who leaves, and that no one notices the others."""

from pathlib import Path

import pytest
import torch

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Engine, Request, Scheduler
from blockdraft.targets import Target, TargetOutput, load_target
from blockdraft.types import SamplingParams

PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 43, 44, 45, 46, 47, 48], [20, 21, 22], [50, 60, 70, 80], [33] * 12]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(scope="module", params=["dflash", "none"])
def drafter(request: pytest.FixtureRequest, tiny_drafter_dir: Path, target: Target) -> Drafter:
    return load_drafter("none" if request.param == "none" else tiny_drafter_dir, target=target)


def greedy(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(count, ignore_eos=True, **fields)  # type: ignore[arg-type]


def run(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.step()


def alone(target: Target, drafter: Drafter, prompt: list[int], params: SamplingParams) -> list[int]:
    return Engine(target, drafter).generate([prompt], params)[0].token_ids


def test_requests_join_and_leave_between_cycles(target: Target, drafter: Drafter) -> None:
    params = [greedy(40), greedy(9), SamplingParams(25, 0.8, seed=3), greedy(60), SamplingParams(33, 1.0, seed=4)]
    scheduler = Scheduler(Engine(target, drafter, max_batch_size=3))
    requests: list[Request] = []
    together: set[int] = set()
    for prompt, param in zip(PROMPTS, params, strict=False):
        requests.append(scheduler.submit(prompt, param))
        for _ in range(3):  # so the next one arrives while this one runs
            scheduler.step()
            together.add(len(scheduler.running))
    run(scheduler)
    assert 3 in together and max(together) == 3
    for request, prompt, param in zip(requests, PROMPTS, params, strict=False):
        assert request.token_ids == alone(target, drafter, prompt, param)


def test_the_first_to_come_is_the_first_to_run(target: Target, drafter: Drafter) -> None:
    scheduler = Scheduler(Engine(target, drafter, max_batch_size=2))
    requests = [scheduler.submit(prompt, greedy(20)) for prompt in PROMPTS[:4]]
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (requests[:2], requests[2:])


def test_a_request_waits_for_memory(target: Target, drafter: Drafter) -> None:
    probe = Engine(target, drafter)
    small, large = (probe.request(PROMPTS[0], greedy(count)) for count in (10, 100))
    engine = Engine(target, drafter, memory_limit=probe.memory_bytes([large, large]))
    scheduler = Scheduler(engine)
    requests = [scheduler.submit(PROMPTS[0], params) for params in (greedy(100), greedy(10), greedy(10), greedy(10))]
    scheduler.step()
    assert scheduler.running == requests[:2]  # each row of the batch takes as much as its longest one
    most = 0
    while not scheduler.idle:
        scheduler.step()
        most = max(most, engine.memory_bytes(scheduler.running) if scheduler.running else 0)
    assert most <= probe.memory_bytes([large, large])
    assert [len(request.token_ids) for request in requests] == [100, 10, 10, 10]
    with pytest.raises(ValueError, match=r"up to 2\d\d tokens take"):
        Scheduler(Engine(target, drafter, memory_limit=probe.memory_bytes([small]))).submit(PROMPTS[0], greedy(200))


@pytest.mark.parametrize("cycles", [0, 1, 4])
def test_a_cancelled_request_frees_its_row_at_the_next_step(target: Target, drafter: Drafter, cycles: int) -> None:
    scheduler = Scheduler(Engine(target, drafter, max_batch_size=2))
    requests = [scheduler.submit(prompt, greedy(50)) for prompt in PROMPTS[:3]]
    for _ in range(cycles):
        scheduler.step()
    requests[0].cancel()
    before = list(requests[0].token_ids)
    scheduler.step()
    assert requests[0] not in scheduler.running + scheduler.waiting
    assert (requests[0].finish_reason, requests[0].token_ids) == ("cancelled", before)
    assert requests[2] in scheduler.running
    run(scheduler)
    for i in (1, 2):
        assert requests[i].token_ids == alone(target, drafter, PROMPTS[i], greedy(50))


@pytest.mark.parametrize("after", [0, 5])
def test_broken_numbers_end_one_request_only(
    target: Target, drafter: Drafter, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = type(target).forward, 0

    def sabotaged(self: Target, *args: object, **kwargs: object) -> TargetOutput:
        nonlocal calls
        output = forward(self, *args, **kwargs)  # type: ignore[arg-type]
        calls += 1
        if calls == 1 + after:
            logits = output.logits.clone()
            logits[1, 0, 3] = torch.nan
            return TargetOutput(logits, output.features)
        return output

    expected = [alone(target, drafter, prompt, greedy(50)) for prompt in PROMPTS[:3]]
    monkeypatch.setattr(type(target), "forward", sabotaged)
    first, broken, third = Engine(target, drafter).generate(PROMPTS[:3], greedy(50))
    assert [first.token_ids, third.token_ids] == [expected[0], expected[2]]
    assert broken.finish_reason == "error"
    assert broken.error is not None and "not finite" in broken.error
    assert broken.token_ids == expected[1][: len(broken.token_ids)]
    with pytest.raises(FloatingPointError, match="not finite"):
        broken.checked()
    assert first.checked() is first


def test_a_stop_string_inside_an_accepted_path_is_exact(target: Target, drafter: Drafter) -> None:
    [whole] = Engine(target, drafter).generate([PROMPTS[0]], greedy(60))
    assert target.tokenizer is not None
    middle = whole.text[len(whole.text) // 2 :][:3]
    at = whole.text.index(middle)
    [cut] = Engine(target, drafter).generate([PROMPTS[0]], greedy(60, stop=(middle, "never said")))
    assert (cut.text, cut.finish_reason) == (whole.text[:at], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    decode = target.tokenizer.decode
    assert middle in decode(cut.token_ids) and middle not in decode(cut.token_ids[:-1])
    chunks = list(Engine(target, drafter).stream(PROMPTS[0], greedy(60, stop=(middle,))))
    assert "".join(chunk.text for chunk in chunks) == cut.text


# Prefix reuse.


@pytest.mark.parametrize("shared", [1, 4, 30])
def test_a_known_beginning_is_not_read_again(target: Target, drafter: Drafter, shared: int) -> None:
    """The next turn of a chat: the same tokens and the same acceptance as without the memory."""
    engine = Engine(target, drafter, prefix_tokens=500)
    [first] = engine.generate([PROMPTS[0]], greedy(40))
    turn = (PROMPTS[0] + first.token_ids)[:shared] + [31, 17, 55]
    seen = spy_on_forwards(engine)
    [again] = engine.generate([turn], greedy(40))
    assert seen[0] == len(turn) - shared
    [fresh] = Engine(target, drafter).generate([turn], greedy(40))
    assert again.token_ids == fresh.token_ids
    assert again.stats.committed == fresh.stats.committed


def test_prefix_hits_of_different_lengths_share_a_batch(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=500)
    known = engine.generate(PROMPTS[:3], greedy(20))
    turns = [PROMPTS[i] + known[i].token_ids[: 7 * i] + [31, 17] for i in range(3)] + [[64, 65]]
    together = engine.generate(turns, greedy(30))
    for turn, completion in zip(turns, together, strict=True):
        [fresh] = Engine(target, drafter).generate([turn], greedy(30))
        assert completion.token_ids == fresh.token_ids
        assert completion.stats.committed == fresh.stats.committed


def test_a_prompt_that_is_known_as_a_whole_still_yields_logits(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=500)
    first, again = (engine.generate([PROMPTS[2]], greedy(30))[0] for _ in range(2))
    assert again.token_ids == first.token_ids


def test_the_memory_of_prefixes_is_bounded(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=60)
    for prompt in PROMPTS:
        engine.generate([prompt], greedy(20))
    kept = [prefix.tokens for prefix in engine.prefixes._prefixes]
    assert 0 < sum(map(len, kept)) <= 60
    assert kept[-1][: len(PROMPTS[-1])] == PROMPTS[-1]  # the latest one stays


def spy_on_forwards(engine: Engine) -> list[int]:
    """Nodes of each forward of the engine's target from now on."""
    seen: list[int] = []
    forward = engine.target.forward

    class Spy:
        def __getattr__(self, name: str) -> object:
            return getattr(target, name)

        def forward(self, tokens: torch.Tensor, *args: object, **kwargs: object) -> TargetOutput:
            seen.append(tokens.size(1))
            return forward(tokens, *args, **kwargs)  # type: ignore[arg-type]

    target = engine.target
    engine.target = Spy()  # type: ignore[assignment]
    return seen
