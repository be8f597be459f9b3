"""An error in one request ends that request, and the others have the tokens that they have alone."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from thinned import LONG
from torch import Tensor

from blockdraft.decode.proposal import Plan, Proposal, SparseDistribution, chain
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine
from blockdraft.engine.runner import Runner, token_logprobs
from blockdraft.errors import NumbersError, RequestError
from blockdraft.nn.cache import SequenceState
from blockdraft.targets import Target, TargetOutput, load_target
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[7, 60, 33, 12, 9], [5, 6], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
GREEDY = SamplingParams(40, ignore_eos=True)
Forward = Callable[..., TargetOutput]


@pytest.fixture(params=["compiled", pytest.param("off", marks=LONG), pytest.param("hf", marks=pytest.mark.slow)])
def target(tiny_target_dir: Path, request: pytest.FixtureRequest) -> Target:
    """A target for one test, since tests break it."""
    if request.param == "hf":
        return load_target(tiny_target_dir, backend="hf")
    return load_target(tiny_target_dir, backend="native", compile="on" if request.param == "compiled" else "off")


@pytest.fixture
def drafter(tiny_drafter_dir: Path, target: Target) -> Drafter:
    return load_drafter(tiny_drafter_dir, target=target)


def answers(engine: Engine) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]


def poison(target: Target, token: int) -> None:
    """Make the embedding of a token NaN, and so all logits of nodes that attend to it."""
    for name, weight in target.named_weights():
        if name == "model.embed_tokens.weight":
            compiled = getattr(target, "compiled", None)
            if compiled is None:
                weight[token] = torch.nan
            else:  # packed [blocks, in, lanes]
                stored = target.decoder.embedding.stored  # type: ignore[attr-defined]
                stored[token // stored.size(2), :, token % stored.size(2)] = torch.nan
            return
    raise AssertionError("no embedding")


def break_forward(target: Target, spoil: Callable[[int, Tensor, Any], None]) -> None:
    """Call `spoil(number of the forward, tokens, cache)` before each forward of this target; it may raise."""
    target.cache_bytes(1, 1)  # measured with a forward by targets of transformers
    forward, calls = target.forward, 0

    def broken(tokens: Tensor, parents: Tensor, cache: Any, *args: Any, **kwargs: Any) -> TargetOutput:
        nonlocal calls
        calls += 1
        spoil(calls, tokens, cache)
        return forward(tokens, parents, cache, *args, **kwargs)

    target.forward = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [0, 1, 2, 39])
def test_log_probabilities_for_which_there_is_no_memory_cost_nothing(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Not even where another request has ended in that step, and where the prompt was just read."""
    each = [GREEDY, replace(GREEDY, logprobs=2, prompt_logprobs=1 if step == 0 else None), GREEDY]
    with Engine(target, drafter, 3, Drafting(1)) as engine:
        expected = engine.generate(PROMPTS, each)
        calls, found = 0, token_logprobs

        def broken(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step + 1:
                raise MemoryError("full")
            return found(*arguments)

        monkeypatch.setattr("blockdraft.engine.runner.token_logprobs", broken)
        for one, other in zip(engine.generate(PROMPTS, each), expected, strict=True):
            assert one.checked().token_ids == other.token_ids
            assert (one.finish_reason, one.drafted) == (other.finish_reason, other.drafted)
            assert [each.token_id for each in one.logprobs or ()] == (one.token_ids if one.logprobs else [])
            assert len(one.prompt_logprobs or PROMPTS[1]) == len(PROMPTS[1])
        assert calls > step


@pytest.mark.parametrize(
    "drafting", [Drafting(1), Drafting(None), Drafting(tree_budget=6)], ids=["plain", "chain", "tree"]
)
def test_a_request_whose_numbers_break_ends_alone(target: Target, drafter: Drafter, drafting: Drafting) -> None:
    """Its prompt holds a token whose embedding is NaN. Rows beside it, and those on its slots later, are as they
    were."""
    engine = Engine(target, drafter, 3, drafting)
    expected = answers(engine)
    poison(target, 99)
    broken = engine.submit([3, 99, 4], GREEDY)
    beside = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    completion = broken.result()
    assert (completion.finish_reason, completion.token_ids) == ("error", [])
    assert completion.error is not None and "after token 0 of the answer are not finite" in completion.error
    with pytest.raises(FloatingPointError, match="not finite"):
        completion.checked()
    assert [request.result().token_ids for request in beside] == expected
    assert answers(engine) == expected  # on the slots that it left


class Guesser:
    """Draft tokens one token, at every slot, whatever the text."""

    path, target_layers, block_size, chooses_tree_size, chooses_length = None, (), 4, False, False

    def __init__(self, token: int, inner: Drafter) -> None:
        self.token, self.inner = token, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        draft_tokens = torch.full((len(anchor), plan.block_size - 1), self.token)
        tokens = torch.cat([anchor[:, None], draft_tokens], dim=1)
        return Proposal(tokens, torch.tensor([[-1, *[0] * (plan.block_size - 1)]] * len(anchor)))


def test_a_draft_token_that_breaks_the_numbers_hurts_no_one(target: Target) -> None:
    """It is never reached, though its keys and values lie beside those of other rows."""
    none = load_drafter("none", target=target)
    expected = answers(Engine(target, none))
    never = next(token for token in range(50, 200) if all(token not in answer for answer in expected))
    poison(target, never)
    drafter: Any = Guesser(never, none)
    assert answers(Engine(target, drafter, drafting=Drafting(4))) == expected
    engine = Engine(target, drafter, drafting=Drafting(4))
    scheduler = engine.scheduler
    scheduler.add([engine.request(prompt, GREEDY) for prompt in PROMPTS])
    for _ in range(3):
        scheduler.step()
        assert len(scheduler.running) == 3
        assert all(torch.isfinite(store).all() for store in scheduler.runner.cache.stores)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_forward_that_fails_for_one_request_ends_that_one(target: Target, drafter: Drafter, at: int) -> None:
    """At 1 while the prompts are read. From then on every forward with this request in it fails."""
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)
    row: list[int] = []

    def spoil(call: int, tokens: Tensor, cache: Any) -> None:
        if call == at:
            row[:] = [cache.starts[1]]
        if call >= at and row[0] in cache.starts:
            raise MemoryError("no room for this one")

    break_forward(target, spoil)
    first, broken, third = engine.generate(PROMPTS, GREEDY)
    assert [first.token_ids, third.token_ids] == [expected[0], expected[2]]
    assert broken.finish_reason == "error" and broken.error == "MemoryError: no room for this one"
    assert broken.token_ids == expected[1][: len(broken.token_ids)]
    with pytest.raises(RequestError, match="no room"):
        broken.checked()
    assert engine.scheduler.idle


def test_a_forward_that_fails_once_changes_nothing(
    target: Target, drafter: Drafter, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)

    def spoil(call: int, tokens: Tensor, cache: Any) -> None:
        if call in (1, 7):
            raise RuntimeError("a hiccup")

    break_forward(target, spoil)
    with caplog.at_level(logging.WARNING):
        assert answers(engine) == expected
    assert "fail like it: RuntimeError: a hiccup" in caplog.text


def test_a_prompt_that_could_not_be_read_is_not_tried_for_ever(target: Target, drafter: Drafter) -> None:
    """Its request has ended, though the third attempt would succeed."""

    def spoil(call: int, tokens: Tensor, cache: Any) -> None:
        if call <= 2:
            raise RuntimeError("not yet")

    break_forward(target, spoil)
    [completion] = Engine(target, drafter, drafting=Drafting(None)).generate(PROMPTS[:1], SamplingParams(1))
    assert (completion.finish_reason, completion.token_ids) == ("error", [])


def spoil_slots(cache: Any) -> None:
    """Write NaN behind the committed tokens of these rows."""
    for store in cache.stores:
        for row, length in zip(cache.starts, cache.lengths, strict=True):
            store[..., row + length : row + length + 8, :] = torch.nan


def test_a_forward_that_fails_half_way_leaves_nothing_behind(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)

    def spoil(call: int, tokens: Tensor, cache: Any) -> None:
        if call == 5:
            spoil_slots(cache)
            raise RuntimeError("half way")

    break_forward(target, spoil)
    scheduler, requests = engine.scheduler, [engine.request(prompt, GREEDY) for prompt in PROMPTS]
    scheduler.add(requests)
    for _ in range(1000):
        if scheduler.idle:
            break
        scheduler.step()
        assert all(torch.isfinite(store).all() for store in scheduler.runner.cache.stores)
    assert [request.token_ids for request in requests] == expected


def test_numbers_that_are_none_in_company_only_are_computed_again_for_each_alone(
    target: Target, drafter: Drafter
) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)
    forward, broken = target.forward, 0

    def shy(tokens: Tensor, *args: Any, **kwargs: Any) -> TargetOutput:
        nonlocal broken
        output = forward(tokens, *args, **kwargs)
        if len(tokens) == 1:
            return output
        broken += 1
        return TargetOutput(torch.full_like(output.logits, torch.nan), output.hidden_states)

    target.forward = shy  # type: ignore[method-assign]
    assert answers(engine) == expected
    assert broken > 10  # prompts and steps


def test_sampled_draft_tokens_without_numbers_end_no_request(target: Target, drafter: Drafter) -> None:
    warm = SamplingParams(30, 1.0, seed=3, ignore_eos=True)
    none = load_drafter("none", target=target)
    expected = [completion.token_ids for completion in Engine(target, none).generate(PROMPTS, warm)]
    never = next(token for token in range(50, 200) if all(token not in answer for answer in expected))
    poison(target, never)
    loaded_drafter: Any = Guesser(never, none)
    propose, dist = loaded_drafter.propose, SparseDistribution(torch.full((4, 1), never), torch.ones(4, 1))
    asked = 0

    def drawing(state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        nonlocal asked
        asked += 1
        tokens = propose(state, anchor, plan).tokens
        count = tokens.size(1)
        return replace(chain(tokens), q=(SparseDistribution(dist.ids[:count], dist.probs[:count]),) * len(anchor))

    loaded_drafter.propose = drawing
    engine = Engine(target, loaded_drafter, drafting=Drafting(4))
    completions = engine.generate(PROMPTS, warm)
    assert [(completion.finish_reason, completion.error) for completion in completions] == [("length", None)] * len(
        PROMPTS
    )
    assert asked > 3


def test_a_drafter_without_numbers_is_reported_once(
    target: Target, drafter: Drafter, caplog: pytest.LogCaptureFixture
) -> None:
    """It can sample no draft token in any step, and the answers are those of the target alone."""
    warm = SamplingParams(30, 1.0, seed=3, ignore_eos=True)
    none = load_drafter("none", target=target)
    expected = [completion.token_ids for completion in Engine(target, none).generate(PROMPTS, warm)]

    def spoiled(*args: Any) -> Any:
        hidden, logits = draft_tokens(*args)
        return hidden, logits.fill_(torch.nan)

    run: Any = drafter.runner  # type: ignore[attr-defined]
    draft_tokens, run.draft_tokens = run.draft_tokens, spoiled
    engine = Engine(target, drafter, drafting=Drafting(None, sampled=True))
    with caplog.at_level(logging.WARNING):
        assert [completion.token_ids for completion in engine.generate(PROMPTS, warm)] == expected
        assert [completion.token_ids for completion in engine.generate(PROMPTS, warm)] == expected
    assert len(caplog.messages) < 10 and len(set(caplog.messages)) == len(caplog.messages)
    assert all("without drafts, as are all that fail like it" in message for message in caplog.messages)


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_drafter_that_fails_costs_its_drafts_or_its_requests(target: Target, drafter: Drafter, method: str) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)
    inner, calls = getattr(drafter, method), 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 9):
            raise RuntimeError("the drafter is confused")
        return inner(*args)

    setattr(drafter, method, broken)
    assert answers(engine) == expected
    setattr(drafter, method, lambda *args: 1 / 0)
    found = engine.generate(PROMPTS, GREEDY)
    if method == "propose":  # the target goes on without drafts
        assert [completion.token_ids for completion in found] == expected
    else:
        error = "The drafter failed: ZeroDivisionError: division by zero"
        assert [completion.error for completion in found] == [error] * 3


class FailingAtTheEnd(NoDrafter):
    """Fails when a request ends: when its KV slots are shrunk, or when its output is kept."""

    def __init__(self, method: str) -> None:
        self.method = method

    def new_state(self, batch: int, capacity: int) -> SequenceState:
        method = self.method

        class State(SequenceState):
            def shrink(self, start: int, capacity: int) -> None:
                if method == "shrink":
                    raise RuntimeError("cannot shrink")
                super().shrink(start, capacity)

        return State(batch, capacity)

    def remember(self, state: Any, scope: str, tokens: Sequence[int]) -> None:
        if self.method == "remember":
            raise RuntimeError("cannot keep it")


@pytest.mark.parametrize("method", ["shrink", "remember"])
def test_an_error_at_the_end_of_a_request_ends_it(
    target: Target, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(Engine(target, load_drafter("none", target=target)))
    params = replace(GREEDY, lookup_scope="a client")
    with Engine(target, FailingAtTheEnd(method), 3, prefix_tokens=500) as engine, caplog.at_level(logging.WARNING):
        for _ in range(2):
            completions = [engine.submit(prompt, params).result(timeout=60) for prompt in PROMPTS]
            assert [completion.token_ids for completion in completions] == expected
            errors = {completion.error for completion in completions}
            assert errors == (
                {"The request could not be ended: RuntimeError: cannot shrink"} if method == "shrink" else {None}
            )
    assert ("The drafter cannot keep an output: RuntimeError: cannot keep it" in caplog.text) == (method == "remember")


@pytest.mark.parametrize("after", [0, 7])
def test_a_tokenizer_that_fails_ends_one_request(target: Target, drafter: Drafter, after: int) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)
    requests = [engine.request(prompt, replace(GREEDY, stop=["\0"])) for prompt in PROMPTS]
    read, calls = requests[1].text.read, 0

    def broken() -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise ValueError("what token is that?")
        read()

    requests[1].text.read = broken  # type: ignore[method-assign]
    engine.start(requests)
    first, second, third = [request.result() for request in requests]
    assert [first.token_ids, third.token_ids] == [expected[0], expected[2]]
    assert second.error == "The tokenizer failed: ValueError: what token is that?"
    assert second.token_ids == expected[1][: after + 1]


def test_a_listener_that_fails_ends_its_request(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)
    broken = engine.submit(PROMPTS[1], GREEDY, lambda chunk: 1 / 0)
    others = [engine.submit(PROMPTS[i], GREEDY) for i in (0, 2)]
    assert [request.result().token_ids for request in others] == [expected[0], expected[2]]
    assert broken.result().error == "The listener failed: ZeroDivisionError: division by zero"


def test_an_error_after_the_commit_is_undone(target: Target, drafter: Drafter) -> None:
    """Tokens that the request does not know of must not stay in its cache."""
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)
    requests = [engine.request(prompt, GREEDY) for prompt in PROMPTS]
    extend, calls = requests[1].extend, 0

    def broken(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls in (3, 6):
            raise RuntimeError("a hiccup")
        return extend(*args)

    requests[1].extend = broken  # type: ignore[method-assign]
    engine.start(requests)
    assert [request.result().token_ids for request in requests] == expected
    assert calls > 6


def test_an_interrupt_half_way_ends_the_rows_and_not_the_engine(target: Target, drafter: Drafter) -> None:
    """Between the commit and the bookkeeping: a row must not go on with tokens that its request does not know."""
    engine = Engine(target, drafter, drafting=Drafting(None))
    expected = answers(engine)
    scheduler = engine.scheduler
    requests = [engine.request(prompt, GREEDY) for prompt in PROMPTS]
    scheduler.add(requests)
    for _ in range(3):
        scheduler.step()
    requests[1].extend = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert scheduler.idle
    for request, answer in zip(requests, expected, strict=True):
        completion = request.result(0)
        assert completion.finish_reason == "error" and "KeyboardInterrupt" in str(completion.error)
        assert completion.token_ids == answer[: len(completion.token_ids)]
    assert answers(engine) == expected


def test_an_interrupted_forward_leaves_nothing_behind(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    scheduler = engine.scheduler
    scheduler.add([engine.request(prompt, GREEDY) for prompt in PROMPTS])
    for _ in range(3):
        scheduler.step()

    def spoil(call: int, tokens: Tensor, cache: Any) -> None:
        spoil_slots(cache)
        raise KeyboardInterrupt

    break_forward(target, spoil)
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert all(torch.isfinite(store).all() for store in scheduler.runner.cache.stores)
    assert scheduler.idle


def test_what_a_broken_request_held_is_not_remembered(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=500, drafting=Drafting(None))
    assert engine.submit(list(range(40)), GREEDY, lambda chunk: 1 / 0).result().failure is not None
    for remembered in (0, 39):
        completion = engine.submit(list(range(40)), GREEDY).result().checked()
        assert completion.stats.remembered == remembered


def test_what_a_drafter_could_not_observe_is_not_remembered(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(block_size=1), prefix_tokens=100)
    prompt = [7] * 30
    observe, calls = drafter.observe, list[int]()

    def fail_late(state: Any, tokens: Tensor, *more: Any) -> None:
        calls.append(tokens.size(1))
        if len(calls) == 2:  # after the prompt: what plain steps have committed
            raise ArithmeticError("no memory")
        observe(state, tokens, *more)

    drafter.observe = fail_late  # type: ignore[method-assign]
    [first] = engine.generate([prompt], GREEDY)
    assert calls[0] == 30 and len(calls) == 2 and "no memory" in str(first.error)
    [second], [plain] = engine.generate([prompt], GREEDY), Engine(target).generate([prompt], GREEDY)
    assert second.error is None and second.token_ids == plain.token_ids and second.stats.remembered == 0
    [third] = engine.generate([prompt], GREEDY)
    assert third.stats.remembered == len(prompt) - 1


def test_a_bug_of_ours_in_a_step_ends_the_requests_and_no_one_waits_for_ever(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    plan = engine.controller.plan
    engine.controller.plan = lambda requests: 1 / 0  # type: ignore[method-assign]
    for completion in engine.generate(PROMPTS, GREEDY):
        assert completion.error == "Decoding was ended by an error: ZeroDivisionError: division by zero"
    engine.controller.plan = plan  # type: ignore[method-assign]
    assert len(answers(engine)) == 3


def test_rows_of_sampled_draft_tokens_end_where_a_distribution_is_missing(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None, sampled=True))
    warm = SamplingParams(30, 1.0, seed=3, ignore_eos=True)
    poison(target, 99)
    broken, fine = engine.submit([3, 99, 4], warm), engine.submit(PROMPTS[0], warm)
    assert isinstance(broken.result().failure, NumbersError)
    assert len(fine.result().token_ids) in range(1, 31)


@pytest.mark.parametrize("beside", [0, 2])
def test_the_slots_of_a_broken_request_hold_no_nan(target: Target, drafter: Drafter, beside: int) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    poison(target, 99)
    assert engine.generate([[3, 99, 4], *PROMPTS[:beside]], GREEDY)[0].finish_reason == "error"
    runner: Runner = engine.scheduler.runner
    states: Sequence[Any] = (runner.cache, runner.state)
    assert all(torch.isfinite(store).all() for state in states for store in state.stores)
