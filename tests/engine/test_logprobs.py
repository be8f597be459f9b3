"""Logprobs against transformers, with all ways to draft and in batches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_trees import Oracle
from thinned import thinned
from transformers import AutoModelForCausalLM

from blockdraft.drafters import load_drafter
from blockdraft.engine import Completion, Engine
from blockdraft.engine.runner import token_logprobs
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, RequestDrafting, SamplingParams, TokenLogprob

PROMPTS = [[5, 9, 17, 4], [8, 8, 30], [40, 3, 22, 19, 7, 6, 5]]
SHAPED = {"logit_bias": {7: 3.0}, "presence_penalty": 1.0, "top_k": 5, "repetition_penalty": 1.2}


@pytest.fixture(scope="module", params=["native", pytest.param("hf", marks=pytest.mark.slow)])
def target(tiny_target_dir: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(tiny_target_dir, backend=request.param)


@pytest.fixture(scope="module")
def reference(tiny_target_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir).eval()


def expected(reference: torch.nn.Module, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = reference(torch.tensor([text])).logits[0].log_softmax(-1)
    return found


def check(found: list[TokenLogprob | None], tokens: list[int], dists: torch.Tensor, count: int) -> None:
    assert len(found) == len(tokens) == len(dists)
    for one, token, dist in zip(found, tokens, dists, strict=True):
        assert one is not None and one.token_id == token
        assert one.logprob == pytest.approx(float(dist[token]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(dist.topk(count).values.tolist(), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx([float(dist[i]) for i, _ in one.top], abs=1e-4)


@pytest.mark.parametrize(
    ("drafting", "temperature"),
    thinned(
        [Drafting(None), Drafting(tree_budget=12), Drafting(None, sampled=True), Drafting("auto")], [0.0, 1.0], keep=2
    ),
)
def test_logprobs_are_those_of_transformers(
    target: Target, reference: torch.nn.Module, tiny_drafter_dir: Path, drafting: Drafting, temperature: float
) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    fields = SHAPED if temperature else {}
    params = [
        SamplingParams(20, temperature, seed=i, ignore_eos=True, logprobs=logprobs, prompt_logprobs=prompt, **fields)  # type: ignore[arg-type]
        for i, (logprobs, prompt) in enumerate([(3, None), (None, 2), (0, 20)])
    ]
    with Engine(target, drafter, drafting=drafting) as engine:
        found = engine.generate(PROMPTS, params)
    for prompt, each, one in zip(PROMPTS, params, found, strict=True):
        dists = expected(reference, prompt + one.token_ids)
        if each.logprobs is None:
            assert one.logprobs is None
        else:
            assert one.logprobs is not None
            check(one.logprobs, one.token_ids, dists[len(prompt) - 1 : -1], each.logprobs)  # type: ignore[arg-type]
        if each.prompt_logprobs is None:
            assert one.prompt_logprobs is None
        else:
            assert one.prompt_logprobs is not None and one.prompt_logprobs[0] is None
            check(one.prompt_logprobs[1:], prompt[1:], dists[: len(prompt) - 1], each.prompt_logprobs)


def test_accepted_draft_tokens_have_theirs_and_an_end_cuts_them(target: Target, reference: torch.nn.Module) -> None:
    """The oracle's draft tokens are all accepted; the stop token lies in the middle of a path."""
    [plain] = Engine(target).generate(PROMPTS[:1], SamplingParams(20, ignore_eos=True))
    stop = next(token for at, token in enumerate(plain.token_ids) if at > 6 and token not in plain.token_ids[:at])
    params = SamplingParams(20, ignore_eos=True, logprobs=2, stop_token_ids=[stop])  # type: ignore[arg-type]
    with Engine(target, Oracle(target, 0), drafting=Drafting(tree_budget=12)) as engine:  # type: ignore[arg-type]
        chunks = list(engine.stream(PROMPTS[0], params))
    assert max(len(chunk.token_ids) for chunk in chunks) > 2
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert all(len(chunk.logprobs or ()) == len(chunk.token_ids) for chunk in chunks)
    dists = expected(reference, PROMPTS[0] + tokens)[len(PROMPTS[0]) - 1 : -1]
    check([one for chunk in chunks for one in chunk.logprobs or ()], tokens, dists, 2)


@pytest.mark.parametrize("prefill_tokens", [1, 3, 256])
def test_a_prompt_is_read_whole_in_parts_beside_others(
    target: Target, reference: torch.nn.Module, prefill_tokens: int
) -> None:
    """A kept prefix, or one that another sequence holds, is scored too."""
    prompt = [7 + i % 50 for i in range(40)]
    with Engine(target, prefix_tokens=200, prefill_tokens=prefill_tokens) as engine:
        before = engine.generate([prompt], SamplingParams(4, ignore_eos=True))[0]
        requests = [
            engine.submit(prompt, SamplingParams(4, ignore_eos=True, prompt_logprobs=count))
            for count in (None, 2, None)
        ]
        found: list[Completion] = [each.result().checked() for each in requests]
        assert found[1].prompt_logprobs is not None and found[1].stats.remembered == 0 < found[0].stats.remembered
        check(found[1].prompt_logprobs[1:], prompt[1:], expected(reference, prompt)[:-1], 2)
        assert {tuple(each.token_ids) for each in found} == {tuple(before.token_ids)}


def test_a_request_that_is_done_again_alone_has_each_logprob_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target)
    forward, failed = target.forward, []

    def failing(*args: object, **kwargs: object) -> object:
        if len(failed) < 2:
            failed.append(1)
            raise ValueError("once")
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward", failing)
    params = SamplingParams(3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    first, second = (engine.submit(PROMPTS[0], params).result() for _ in range(2))
    assert first.finish_reason == "error" and second.prompt_logprobs is not None
    assert len(second.prompt_logprobs) == len(PROMPTS[0]) and len(second.logprobs or ()) == 3
    engine.close()


def test_logprobs_of_a_request_without_draft_tokens_beside_others(target: Target) -> None:
    params = SamplingParams(12, ignore_eos=True, logprobs=1)
    off = RequestDrafting(enabled=False)
    with Engine(target, Oracle(target, 3), drafting=Drafting(tree_budget=12)) as engine:  # type: ignore[arg-type]
        requests = [engine.submit(p, params, drafting=d) for p, d in zip(PROMPTS, (None, off, None), strict=True)]
        assert [len(each.result().logprobs or ()) for each in requests] == [12] * 3


def test_of_equal_tokens_the_lower_comes_first_and_there_are_no_more_than_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -torch.inf]])
    [one] = token_logprobs(logits, [3], 20)
    assert [token for token, _ in one.top] == [1, 2, 0, 3]
    assert one.logprob == -torch.inf and one.top[-1] == (3, -torch.inf)
    assert token_logprobs(logits, [1], 0) == [TokenLogprob(1, one.top[0][1])]


def test_long_texts_are_scored_in_parts(constants: Callable[..., None]) -> None:
    logits = torch.randn(7, 11)
    whole = token_logprobs(logits, list(range(7)), 2)
    constants("blockdraft.engine.runner", PART=30)
    assert token_logprobs(logits, list(range(7)), 2) == whole
