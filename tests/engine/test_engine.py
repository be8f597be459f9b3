"""Decoding with any drafter equals plain decoding, whatever it drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with
from thinned import LONG
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, chain
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine, Request
from blockdraft.engine.request import RunningSequence
from blockdraft.engine.runner import Runner
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.targets.hf import HFTarget
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[5, 9, 17, 4], [8, 8, 30], [40, 3, 22, 19, 7, 6, 5]]


@pytest.fixture(scope="module", params=["native", pytest.param("hf", marks=LONG)])
def target(tiny_target_dir: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(tiny_target_dir, backend=request.param)


@pytest.fixture(scope="module")
def random_drafter(tiny_drafter_dir: Path, target: Target) -> DFlashDrafter:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    assert isinstance(drafter, DFlashDrafter)
    return drafter


class Oracle(NoDrafter):
    """Knows the answers of single-row decoding; `wrong_after` lets it err at that draft token. With `fork` it proposes
    a tree whose first branch is wrong."""

    block_size = 8

    def __init__(self, answer: Sequence[int], wrong_after: int = 99, fork: bool = False) -> None:
        self.answer, self.wrong_after, self.fork = list(answer), wrong_after, fork
        self.seen: list[int] = []

    def propose(self, state: object, anchor: Tensor, plan: Plan) -> Proposal:
        done = len(self.seen) - self.prompt_length + 1
        draft_tokens = self.answer[done : done + plan.block_size - 1]
        draft_tokens = [g if i < self.wrong_after else (g + 1) % 50 for i, g in enumerate(draft_tokens)]
        if not self.fork or not draft_tokens:
            return chain(torch.tensor([[int(anchor), *draft_tokens]]))
        wrong = [(g + 1) % 50 for g in draft_tokens]
        tokens = torch.tensor([[int(anchor), *wrong, *draft_tokens]])
        right = [0, *range(len(draft_tokens) + 1, 2 * len(draft_tokens))]
        return Proposal(tokens, torch.tensor([[-1, *range(len(draft_tokens)), *right]]))

    def observe(self, state: object, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        if not self.seen:
            self.prompt_length = lengths[0]
        self.seen += tokens[0, : lengths[0]].tolist()


def plain(target: Target, prompt: list[int], **fields: object) -> list[int]:
    return Engine(target, NoDrafter()).generate([prompt], SamplingParams(**fields))[0].token_ids  # type: ignore[arg-type]


def read(target: Target, drafter: Drafter, *requests: Request) -> tuple[Runner, list[RunningSequence]]:
    """A runner with rows of these requests, whose prompts it has read together."""
    runner = Runner(target, drafter, 512 * len(requests))
    rows = [RunningSequence(request, 512 * place, 512) for place, request in enumerate(requests)]
    for row in rows:
        runner.open(row.start, row.capacity)
    runner.prefill(rows, [len(request.prompt) for request in requests])
    return runner, rows


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_greedy_equals_transformers_generate(target: Target, prompt: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(target.path)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
    assert plain(target, prompt, max_new_tokens=40) == expected.tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("block_size", [None, 1, 2, 5])
def test_random_drafter_changes_nothing(
    target: Target, random_drafter: DFlashDrafter, prompt: list[int], block_size: int | None
) -> None:
    engine = Engine(target, random_drafter, drafting=Drafting(block_size))
    [completion] = engine.generate([prompt], SamplingParams(60, ignore_eos=True))
    assert completion.token_ids == plain(target, prompt, max_new_tokens=60, ignore_eos=True)
    assert sum(completion.stats.committed) == 59


@pytest.mark.parametrize("wrong_after", [99, 0, 1, 3])
@pytest.mark.parametrize("fork", [False, True])
def test_oracle_is_accepted_up_to_its_error(target: Target, wrong_after: int, fork: bool) -> None:
    answer = plain(target, PROMPTS[0], max_new_tokens=41, ignore_eos=True)
    oracle = Oracle(answer, wrong_after, fork)
    [completion] = Engine(target, oracle, drafting=Drafting(None)).generate(
        [PROMPTS[0]], SamplingParams(41, ignore_eos=True)
    )
    assert completion.token_ids == answer
    assert completion.stats.committed[0] == min(wrong_after, 7) + 1
    assert completion.tau == pytest.approx(40 / len(completion.stats.committed))
    assert oracle.seen == PROMPTS[0] + answer[:-1]  # observed all that was committed, once, in order


@pytest.mark.parametrize("params", [SamplingParams(50, 0.8, seed=3), SamplingParams(50, 1.0, 20, 0.9, seed=4)])
def test_sampled_tokens_depend_on_the_seed_alone(
    target: Target, random_drafter: DFlashDrafter, params: SamplingParams
) -> None:
    engine = Engine(target, random_drafter, drafting=Drafting(None))
    [drafted], [again] = engine.generate([PROMPTS[0]], params), engine.generate([PROMPTS[0]], params)
    [undrafted] = Engine(target, NoDrafter()).generate([PROMPTS[0]], params)
    assert drafted.token_ids == again.token_ids == undrafted.token_ids
    [other] = engine.generate([PROMPTS[0]], SamplingParams(50, params.temperature, seed=99))
    assert other.token_ids != drafted.token_ids


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_length_is_exact_and_a_stop_token_ends(target: Target, random_drafter: DFlashDrafter, count: int) -> None:
    engine = Engine(target, random_drafter, drafting=Drafting(None))
    [cut] = engine.generate([PROMPTS[0]], SamplingParams(count, ignore_eos=True))
    assert (len(cut.token_ids), cut.finish_reason) == (count, "length")
    stop = cut.token_ids[-1]
    [stopped] = engine.generate([PROMPTS[0]], SamplingParams(30, stop_token_ids=(stop,), ignore_eos=True))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == cut.token_ids[: cut.token_ids.index(stop) + 1]


def test_the_targets_own_stop_tokens_may_be_ignored(target: Target) -> None:
    answer = plain(target, PROMPTS[0], max_new_tokens=20, ignore_eos=True)
    target = copy_with(target, eos_token_ids=frozenset(answer[3:4]))
    assert plain(target, PROMPTS[0], max_new_tokens=20) == answer[: answer.index(answer[3]) + 1]
    assert plain(target, PROMPTS[0], max_new_tokens=20, ignore_eos=True) == answer


def test_stop_inside_an_accepted_run_drops_what_follows(target: Target) -> None:
    answer = plain(target, PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    first_new = next(i for i in range(3, 30) if answer[i] not in answer[:i])
    params = SamplingParams(30, stop_token_ids=(answer[first_new],), ignore_eos=True)
    [completion] = Engine(target, Oracle(answer), drafting=Drafting(None)).generate([PROMPTS[0]], params)
    assert completion.token_ids == answer[: first_new + 1]
    assert len(completion.drafted) == len(completion.token_ids)


def test_stream_joins_to_the_completion(target: Target, random_drafter: DFlashDrafter) -> None:
    engine, params = (
        Engine(target, random_drafter, drafting=Drafting(None)),
        SamplingParams(60, 1.0, seed=5, ignore_eos=True),
    )
    [completion] = engine.generate(["grüße \U0001f600"], params)
    chunks = list(engine.stream("grüße \U0001f600", params))
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert len(chunks) == 1 + len(completion.stats.committed)  # the prompt's, and one a step
    assert all(chunk.drafted == (*[True] * (len(chunk.token_ids) - 1), False) for chunk in chunks[:-1])


def test_statistics_add_up(target: Target, random_drafter: DFlashDrafter) -> None:
    answer = plain(target, PROMPTS[0], max_new_tokens=41, ignore_eos=True)
    [completion] = Engine(target, Oracle(answer, 3), drafting=Drafting(None)).generate(
        [PROMPTS[0]], SamplingParams(41, ignore_eos=True)
    )
    stats = completion.stats
    assert stats.tau == pytest.approx(1 + sum(stats.acceptance_by_position))
    assert stats.acceptance_by_position[:4] == [1.0, 1.0, 1.0, 0.0]
    assert stats.total_seconds >= stats.draft_seconds + stats.verify_seconds > 0
    assert stats.tokens_per_second == pytest.approx(40 / stats.total_seconds)


def test_forward_after_commit_leaves_the_caches_as_from_scratch(target: Target, random_drafter: DFlashDrafter) -> None:
    """After decoding, target and drafter know just the committed tokens: the next draft equals one from scratch."""
    engine = Engine(target, random_drafter, drafting=Drafting(None))
    request = engine.request(PROMPTS[0], SamplingParams(40, ignore_eos=True))
    old = read(target, random_drafter, request)
    for _ in range(6):
        old[0].step(old[1], ChainPlan(8, [request.params]))
    fresh_request = engine.request(PROMPTS[0] + request.token_ids[:-1], SamplingParams(2))
    new = read(target, random_drafter, fresh_request)
    assert fresh_request.token_ids == request.token_ids[-1:]
    states = [runner.state.of([row.start]) for runner, [row] in (old, new)]
    assert [runner.committed_length(row.start) for runner, [row] in (old, new)] == [s.lengths[0] for s in states]
    assert states[0].lengths == states[1].lengths
    block = torch.tensor([[request.token_ids[-1], *[random_drafter.config.mask_token_id] * 7]])
    drafts = [random_drafter.draft_logits(state, block) for state in states]
    torch.testing.assert_close(*drafts, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([1] * 256, {}, "prompt has 256 tokens and the target's context 256"),
        ([1] * 200, {"max_new_tokens": 100}, "ask for at most 56"),
        ([1, 9999], {}, "Token id 9999"),
    ],
)
def test_bad_requests_are_refused(
    target: Target, random_drafter: DFlashDrafter, prompt: str | list[int], fields: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(target, random_drafter, drafting=Drafting(None)).generate([prompt], SamplingParams(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("most_kept", [512, 3])
def test_what_earlier_steps_left_to_do_does_not_count_as_this_ones_time(
    target: Target,
    random_drafter: DFlashDrafter,
    constants: Callable[..., None],
    clock: list[float],
    most_kept: int,
) -> None:
    constants("blockdraft.engine.runner", MAX_PENDING_STEPS=most_kept)
    request = Engine(target, random_drafter, drafting=Drafting(None)).request(
        PROMPTS[0], SamplingParams(30, ignore_eos=True)
    )
    late: list[int] = []
    observe = random_drafter.observe

    def slow(state: Any, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        if tokens.size(1) == 3:  # the pause
            late.append(tokens.size(1))
            clock[0] += 1000.0
        observe(state, tokens, hidden_states, lengths)

    runner, rows = read(target, copy_with(random_drafter, observe=slow), request)
    plans = [ChainPlan(size, [request.params]) for size in (1, 1, 1, 8)]  # a pause, and a draft after it
    outcomes = [runner.step(rows, plan) for plan in plans]
    assert len(late) == 1 and [outcome.seconds for outcome in outcomes] == [0.0] * 4
    assert sorted(outcome.catch_up_seconds for outcome in outcomes) == [0.0, 0.0, 0.0, 1000.0]
    assert request.stats.total_seconds == 1000.0  # includes the pause


def test_what_a_proposal_took_to_catch_up_does_not_count_as_the_steps_time(
    target: Target, random_drafter: DFlashDrafter, clock: list[float]
) -> None:
    request = Engine(target, random_drafter, drafting=Drafting(None)).request(PROMPTS[0], SamplingParams(30))
    propose = random_drafter.propose

    def late(*given: Any) -> Proposal:
        clock[0] += 1000.0
        return replace(propose(*given), catch_up_seconds=700.0)

    runner, rows = read(target, copy_with(random_drafter, propose=late), request)
    outcome = runner.step(rows, ChainPlan(8, [request.params]))
    assert (outcome.seconds, outcome.catch_up_seconds) == (300.0, 700.0)


@pytest.mark.parametrize("params", [SamplingParams(60, ignore_eos=True), SamplingParams(60, 0.9, seed=2)])
@pytest.mark.parametrize("tree_budget", [0, 12])
def test_a_draft_window_changes_draft_tokens_and_no_token(
    target: Target, random_drafter: DFlashDrafter, params: SamplingParams, tree_budget: int
) -> None:
    from_draft: list[list[int]] = []
    answers = []
    for window in (None, 3):
        engine = Engine(target, random_drafter, drafting=Drafting(None, tree_budget, draft_window=window))
        answers.append([c.token_ids for c in engine.generate(PROMPTS, params)])
        request = engine.request(PROMPTS[2], params)
        runner, [row] = read(target, random_drafter, request)
        plan = engine.controller.plan([request])
        state = runner.state.of([row.start])
        from_draft.append(random_drafter.propose(state, torch.tensor([9]), plan).tokens[0].tolist())
    plain = Engine(target, NoDrafter()).generate(PROMPTS, params)
    assert answers[0] == answers[1] == [c.token_ids for c in plain]
    assert from_draft[0] != from_draft[1]


def test_a_target_without_tokenizer_takes_token_ids_only() -> None:
    config = Qwen3Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)  # fmt: skip
    target = HFTarget(Qwen3ForCausalLM(config))
    engine = Engine(target, NoDrafter())
    [completion] = engine.generate([[1, 2, 3]], SamplingParams(5))
    assert len(completion.token_ids) == 5 and completion.text == ""
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.generate(["hello"])


def test_without_a_drafter_it_decodes_plainly(target: Target) -> None:
    params = SamplingParams(max_new_tokens=9)
    plain = [Engine(target).generate(["hello"], params), Engine(target, None).generate(["hello"], params)]
    plain.append(Engine(target, load_drafter("none", target=target)).generate(["hello"], params))
    assert len({tuple(completion.token_ids) for [completion] in plain}) == 1
    assert {completion.tau for [completion] in plain} == {1.0}


def test_a_drafters_name_is_no_drafter(target: Target) -> None:
    with pytest.raises(UsageError, match="drafter must come from load_drafter, .*; got 'none'"):
        Engine(target, "none")  # type: ignore[arg-type]


def test_stored_costs_are_read_before_the_first_step(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Any]()
    monkeypatch.setattr("blockdraft.engine.engine.load_for", lambda *pair: read.append(pair))  # nothing is stored
    drafter = load_drafter("lookup", target=target)
    assert Engine(target, drafter, drafting=Drafting("auto")).scheduler is not None
    assert len(read) == 1
