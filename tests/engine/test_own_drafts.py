"""Draft tokens that requests provide themselves: predictions, and tokens that a grammar forces.

They change the speed and no token, with any drafter, next to other requests, greedy and sampled.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from exact_distribution import LENGTH, NOISE, PROMPT, ROWS, V, surprise, write_model
from thinned import LONG
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from blockdraft.decode.merging import put_first
from blockdraft.decode.prediction import Prediction
from blockdraft.decode.proposal import Proposal, SparseDistribution, chain
from blockdraft.drafters import load_drafter
from blockdraft.engine import Completion, Engine
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, Grammar, RequestDrafting, SamplingParams

PROMPTS = [[(11 * i * i + row) % 70 + 4 for i in range(20 + row)] for row in range(4)]
LENGTH_OF_ANSWERS = 100
OBJECT = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"first_property": {"enum": ["a", "b"]}, "second_property": {"type": "boolean"}},
            "required": ["first_property", "second_property"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    params = SamplingParams(LENGTH_OF_ANSWERS, ignore_eos=True)
    return [completion.token_ids for completion in Engine(target).generate(PROMPTS, params)]


def changed(tokens: Sequence[int]) -> list[int]:
    """Replace, remove and insert a few tokens."""
    return [*tokens[:30], 5, *tokens[31:50], *tokens[53:75], 9, 8, 7, *tokens[75:]]


def follow(prediction: Prediction, output: Sequence[int], most: int = 16) -> list[int]:
    """Decode an output that is known, and return the tokens of each step."""
    done, steps = 1, list[int]()
    while done < len(output):
        prediction.follow(output[prediction.length : done])
        draft, acceptance_probs = prediction.draft(most)
        assert len(acceptance_probs) == len(draft)
        assert len(draft) <= most
        accepted = next(
            (i for i, pair in enumerate(zip(draft, output[done:], strict=False)) if pair[0] != pair[1]),
            min(len(draft), len(output) - done),
        )
        steps.append(min(accepted + 1, len(output) - done))
        done += accepted + 1
    return steps


def test_a_prediction_is_followed_and_found_again_after_changes() -> None:
    random = Random(0)
    text = [random.randrange(200) for _ in range(400)]
    assert follow(Prediction(text), text) == [17] * 23 + [8]
    edits = {
        "replaced": [*text[:100], 900, *text[101:]],
        "inserted": [*text[:100], *range(900, 905), *text[100:]],
        "removed": [*text[:100], *text[110:]],
        "moved": [*text[:100], *text[200:260], *text[100:200], *text[260:]],
        "at the start": [900, 901, *text],
    }
    for name, output in edits.items():
        steps = follow(Prediction(text), output)
        assert len(output) / len(steps) > 8, name


def test_a_wrong_prediction_costs_little() -> None:
    random = Random(1)
    text, output = ([random.randrange(50) for _ in range(300)] for _ in range(2))
    prediction, drafted = Prediction(text), 0
    for end in range(1, len(output)):
        prediction.follow(output[end - 1 : end])
        drafted += sum(prob > 0.5 for prob in prediction.draft(16)[1])
    assert drafted < len(output) / 4
    for output in ([1, 2], [1, 2, 3, 4, 5]):
        prediction = Prediction([1, 2])
        prediction.follow(output)
        assert prediction.draft(16) == ([], [])


def test_a_name_that_was_replaced_once_is_replaced_further_on() -> None:
    random = Random(2)
    text = [random.randrange(500) for _ in range(600)]
    for place in range(40, 600, 40):
        text[place : place + 2] = 901, 902
    output = [token for token in text for token in ([903] if token == 901 else [904, 905] if token == 902 else [token])]
    assert len(follow(Prediction(text), output)) < len(output) / 17 + 8  # as if there were one difference
    mixed = [903 if token == 901 and place < 300 else token for place, token in enumerate(text)]
    assert len(follow(Prediction(text), mixed)) < len(mixed) / 17 + 14  # replaced at first, then not any more


def test_replacements_do_not_make_a_prediction_much_longer() -> None:
    marker = 0
    text = [1000 + place if place % 40 else marker for place in range(2000)]
    prediction = Prediction(text)
    for edit in range(30):
        rest = prediction.tokens[prediction.position :]
        if marker not in rest:
            break
        place = rest.index(marker)
        marker = 10_000 + 10 * edit
        prediction.follow([*rest[:place], *range(marker, marker + 8), *rest[place + 1 : place + 4]])
    assert 2000 < len(prediction.tokens) <= 4000


def test_a_prediction_that_repeats_itself_is_found_again_nearby() -> None:
    line = [10, 11, 12, 13]
    text = [token for number in range(40) for token in (*line, 100 + number)]
    output = [*text[:97], 999, *text[98:]]  # in a line that is like all the others
    assert len(output) / len(follow(Prediction(text), output)) > 10


@pytest.mark.parametrize(
    ("kind", "drafting"),
    [
        ("none", Drafting()),
        ("lookup", Drafting(17)),
        ("lookup", Drafting(tree_budget=16)),
        ("dflash", Drafting(None)),
        ("dflash", Drafting(tree_budget=12)),
        ("dflash", Drafting()),
        ("hybrid", Drafting()),
        pytest.param("hybrid", Drafting(tree_budget="auto"), marks=pytest.mark.slow),
    ],
)
def test_answers_with_predictions_are_those_of_plain_decoding(
    target: Target, tiny_drafter_dir: Path, plain: list[list[int]], kind: str, drafting: Drafting
) -> None:
    """Alone, and in a batch with requests without a prediction and with other predictions."""
    name = {"dflash": str(tiny_drafter_dir), "hybrid": f"lookup+{tiny_drafter_dir}"}.get(kind, kind)
    predictions: list[Sequence[int]] = [plain[0], (), changed(plain[2]), plain[0]]
    params = [SamplingParams(LENGTH_OF_ANSWERS, ignore_eos=True, prediction=tokens) for tokens in predictions]
    with Engine(target, load_drafter(name, target=target), drafting=drafting) as engine:
        [alone] = engine.generate(PROMPTS[2:3], params[2])
        batch = engine.generate(PROMPTS, params)
    assert alone.token_ids == plain[2] and alone.tau > 5
    assert [completion.token_ids for completion in batch] == plain
    assert batch[0].tau > 3 and batch[0].stats.rejected_prediction == 0
    assert batch[1].stats.accepted_prediction == batch[1].stats.rejected_prediction == 0
    assert batch[2].stats.accepted_prediction > 50


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_answers_with_predictions_are_those_of_plain_decoding(target: Target, temperature: float) -> None:
    params = [SamplingParams(60, temperature, seed=seed, ignore_eos=True) for seed in range(4)]
    expected = [completion.token_ids for completion in Engine(target).generate(PROMPTS, params)]
    predicted = [replace(p, prediction=changed(tokens)) for p, tokens in zip(params, expected, strict=True)]
    for name in ("none", "lookup"):
        with Engine(target, load_drafter(name, target=target)) as engine:
            found = engine.generate(PROMPTS, predicted)
        assert [completion.token_ids for completion in found] == expected
        assert sum(completion.stats.accepted_prediction for completion in found) > 100


@pytest.mark.parametrize("budget", [0, 12])
def test_predictions_of_others_do_not_change_sampled_draft_tokens(
    target: Target, tiny_drafter_dir: Path, plain: list[list[int]], budget: int
) -> None:
    """A number of draft tokens that depends on other requests would change the distribution."""
    name = f"lookup+{tiny_drafter_dir}" if budget else tiny_drafter_dir
    drafting = Drafting(None, budget, sampled=True)
    params = [SamplingParams(60, 0.5, seed=i, ignore_eos=True, prediction=plain[i]) for i in range(4)]
    wrong = [replace(p, prediction=[99, *range(100, 170)]) for p in params[1:]]
    with Engine(target, load_drafter(name, target=target), drafting=drafting) as engine:
        alone = engine.generate(PROMPTS[:1], params[:1])[0].token_ids
        for others in (params[1:], wrong):
            assert engine.generate(PROMPTS, [params[0], *others])[0].token_ids == alone


@pytest.mark.slow
@pytest.mark.parametrize(("others", "budget"), [pytest.param("", 0, marks=LONG), ("lookup+", 12)])
def test_sampled_draft_tokens_beside_predictions_have_the_distribution_of_the_target(
    tmp_path: Path, others: str, budget: int
) -> None:
    target = load_target(write_model(tmp_path / "target", 2))
    drafter = load_drafter(f"{others}{write_model(tmp_path / 'drafter', 3)}", target=target)
    engine = Engine(target, drafter, max_batch_size=500, drafting=Drafting(None, budget, sampled=True))
    params = [
        SamplingParams(LENGTH, 1.0, seed=seed, ignore_eos=True, prediction=[seed % V, seed // V % V, 1])
        for seed in range(ROWS)
    ]
    completions = engine.generate([PROMPT] * ROWS, params)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "target").eval()
    assert abs(surprise([tuple(completion.token_ids) for completion in completions], model)) < NOISE
    assert sum(completion.stats.accepted_prediction for completion in completions) > ROWS / 10
    assert sum(completion.stats.rejected_prediction for completion in completions) > ROWS / 10


def test_counts_of_a_prediction_are_its_own(target: Target, plain: list[list[int]]) -> None:
    params = SamplingParams(LENGTH_OF_ANSWERS, ignore_eos=True, prediction=plain[0])
    with Engine(target) as engine:
        [completion] = engine.generate(PROMPTS[:1], params)
        [wrong] = engine.generate(PROMPTS[:1], replace(params, prediction=[plain[0][0], *[99] * 50]))
    stats = completion.stats
    assert stats.accepted_prediction == sum(stats.committed) - len(stats.committed) == sum(completion.drafted)
    assert wrong.stats.accepted_prediction == 0 < wrong.stats.rejected_prediction < 50
    assert wrong.token_ids == plain[0]


def test_a_prediction_is_drafted_beside_a_request_that_ends_soon(target: Target, plain: list[list[int]]) -> None:
    """All have as many nodes as the longest, and the KV slots of the short one are few."""
    params = [SamplingParams(8, ignore_eos=True), SamplingParams(60, ignore_eos=True, prediction=plain[1])]
    with Engine(target) as engine:
        short, long = engine.generate(PROMPTS[:2], params)
    assert [short.token_ids, long.token_ids] == [plain[0][:8], plain[1][:60]]
    assert min(long.stats.drafted[:3]) > 0


def test_tokens_that_a_grammar_forces_are_not_counted_as_predicted(target: Target) -> None:
    params = SamplingParams(120, grammar=OBJECT, prediction=[99, 98])
    with Engine(target) as engine:
        completions = engine.generate(PROMPTS, params)
    for completion in completions:
        assert sum(completion.drafted) > 0 == completion.stats.accepted_prediction


def test_a_prediction_behind_the_end_of_an_answer_is_not_accepted(target: Target, plain: list[list[int]]) -> None:
    params = SamplingParams(LENGTH_OF_ANSWERS, ignore_eos=True, prediction=plain[0])
    assert target.tokenizer is not None
    stop = target.tokenizer.decode(plain[0][:30])[-8:]
    with Engine(target) as engine:
        [completion] = engine.generate(PROMPTS[:1], replace(params, stop=(stop,)))
    assert completion.finish_reason == "stop" and len(completion.token_ids) < LENGTH_OF_ANSWERS - 20
    assert 0 < completion.stats.accepted_prediction == sum(completion.drafted) < len(completion.token_ids)
    assert completion.stats.rejected_prediction > 0


@pytest.mark.parametrize(("comma", "colon"), [(",", ":"), (",\n ", ": "), (", ", ": ")])
def test_separators_are_drafted_as_they_came_before(target: Target, comma: str, colon: str) -> None:
    names = ("alpha", "beta", "gamma", "delta")
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": list(names)}
    grammar = AnswerGrammar(Grammar("json_schema", json.dumps(schema)), target)
    assert target.tokenizer is not None
    text = "{" + comma.join(f'"{name}"{colon}1' for name in names[:3]) + comma
    assert all(map(grammar.advance, target.tokenizer.encode(text, add_special_tokens=False)))
    tokens, acceptance_probs = grammar.draft(64)
    assert target.tokenizer.decode(tokens) == f'"delta"{colon}'
    assert len(acceptance_probs) == len(tokens) and acceptance_probs == sorted(acceptance_probs, reverse=True)
    assert grammar.draft(2) == (tokens[:2], acceptance_probs[:2])


def test_behind_a_prediction_a_grammar_drafts(target: Target) -> None:
    assert target.tokenizer is not None
    start = target.tokenizer.encode('{"a": 1, "b": 1,', add_special_tokens=False)
    schema = {"type": "object", "properties": dict.fromkeys("abc", {"type": "integer"}), "required": [*"abc"]}
    params = SamplingParams(120, grammar=Grammar("json_schema", json.dumps(schema)), prediction=start)
    with Engine(target) as engine:
        request = engine.request([5], params)
        assert request.own_draft(64)[0] == start and request.grammar is not None
        request.extend(start, [False] * len(start))
        assert target.tokenizer.decode(request.own_draft(64)[0]) == ' "c": '


def test_tokens_that_the_target_lacks_are_not_drafted(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Of a tokenizer with more tokens than the model has."""
    config = AutoConfig.from_pretrained(tiny_target_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    config.vocab_size = len(tokenizer)
    tokenizer.add_tokens(["first", "second"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    params = SamplingParams(60, ignore_eos=True)
    with Engine(target) as engine:
        [expected] = engine.generate(PROMPTS[:1], params)
        text = "first second " * 2 + target.tokenizer.decode(expected.token_ids)
        [completion] = engine.generate(PROMPTS[:1], replace(params, prediction=text))
    assert completion.error is None and completion.token_ids == expected.token_ids
    assert max(completion.stats.drafted) > 0
    grammar = AnswerGrammar(Grammar("regex", "a first b"), target)
    assert target.tokenizer.decode(grammar.forced_tokens()) == "a "


def test_a_prediction_that_is_no_unicode_is_refused(target: Target) -> None:
    with pytest.raises(UsageError, match="prediction holds a lone surrogate at character 1"):
        Engine(target).submit(PROMPTS[0], SamplingParams(9, prediction="a\ud800"))


def test_a_text_is_a_prediction_too(target: Target) -> None:
    params = SamplingParams(60)
    with Engine(target) as engine:
        [expected] = engine.generate(["Name the days."], params)
        [completion] = engine.generate(["Name the days."], replace(params, prediction=expected.text))
    assert completion.token_ids == expected.token_ids


def test_no_more_of_a_prediction_is_encoded_than_the_context_may_hold(target: Target) -> None:
    params = SamplingParams(20)
    with Engine(target) as engine:
        [expected] = engine.generate(["Name the days."], params)
        long = expected.text + "word " * 2_000_000
        began = time.thread_time()
        [completion] = engine.generate(["Name the days."], replace(params, prediction=long))
    assert completion.token_ids == expected.token_ids and completion.stats.accepted_prediction > 0
    assert time.thread_time() - began < 1  # the whole text takes seconds to encode


def test_a_request_that_may_not_draft_does_not(target: Target, plain: list[list[int]]) -> None:
    params = SamplingParams(LENGTH_OF_ANSWERS, ignore_eos=True, prediction=plain[0])

    for name in ("none", "lookup"):
        with Engine(target, load_drafter(name, target=target), drafting=Drafting(None)) as engine:
            for limits, most in (
                (RequestDrafting(enabled=False), 0),
                (RequestDrafting(block_size=4), 3),
                (RequestDrafting(tree_budget=5), LENGTH_OF_ANSWERS),  # of no effect without trees
            ):
                completion = engine.submit(PROMPTS[0], params, drafting=limits).result()
                assert completion.token_ids == plain[0]
                assert max(completion.stats.drafted) == most or 16 < max(completion.stats.drafted) < most
    with Engine(target, load_drafter("lookup", target=target), drafting=Drafting(tree_budget=40)) as engine:
        completion = engine.submit(PROMPTS[0], params, drafting=RequestDrafting(tree_budget=5)).result()
    assert completion.token_ids == plain[0] and max(completion.stats.drafted) == 5


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ([5, -1], r"prediction\[1\] must be at least 0, got -1"),
        ([5, "a"], r"prediction\[1\] must be a whole number, got 'a'"),
        (b"x", "prediction must be a text or a list, got b'x'"),
        (7, "prediction must be a text or a list, got 7"),
        ([10**6], "prediction names the token 1000000, outside the target's vocabulary"),
    ],
)
def test_a_bad_prediction_is_refused(target: Target, prediction: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Engine(target).submit(PROMPTS[0], SamplingParams(prediction=prediction))


def test_a_failed_step_is_repeated_without_them(target: Target, plain: list[list[int]]) -> None:
    """Memory may run out in a large forward only."""

    class Small(type(target)):  # type: ignore[misc]
        def forward(self, tokens: torch.Tensor, *args: Any, **more: Any) -> Any:
            if tokens.size(1) not in (1, len(PROMPTS[0])):
                raise MemoryError("no room for draft tokens")
            return super().forward(tokens, *args, **more)

    small = load_target(target.path)
    small.__class__ = Small
    params = SamplingParams(20, ignore_eos=True, prediction=plain[0])
    with Engine(small) as engine:
        [completion] = engine.generate(PROMPTS[:1], params)
    assert completion.error is None and completion.token_ids == plain[0][:20]


class TestPutFirst:
    """Chains of draft tokens before those of a proposal."""

    def test_a_chain_keeps_what_the_drafter_adds_behind_the_same_tokens(self) -> None:
        proposal = chain(torch.tensor([[9, 1, 2, 3], [9, 4, 5, 6], [9, 7, 8, 7]]))
        found = put_first([[1, 2], [5], []], proposal, 0)
        assert found.tokens.tolist() == [[9, 1, 2, 3], [9, 5, 0, 0], [9, 7, 8, 7]]
        assert found.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1], [-1, 0, 1, 2]]

    def test_without_a_budget_a_tree_keeps_what_is_behind_the_same_tokens(self) -> None:
        proposal = Proposal(torch.tensor([[9, 4, 1, 2, 3, 5, 6, 7]]), torch.tensor([[-1, 0, 0, 2, 3, 3, 1, 5]]))
        found = put_first([[1, 2]], proposal, 0)
        assert found.tokens.tolist() == [[9, 1, 2, 3, 5, 7]]
        assert found.parents.tolist() == [[-1, 0, 1, 2, 2, 4]]
        assert put_first([[1, 3]], proposal, 0).tokens.tolist() == [[9, 1, 3]]

    def test_a_tree_keeps_what_the_budget_holds(self) -> None:
        proposal = chain(torch.tensor([[9, 1, 2, 3]]))
        found = put_first([[1, 5]], proposal, 3)
        assert found.tokens.tolist() == [[9, 1, 5, 2]] and found.parents.tolist() == [[-1, 0, 1, 1]]
        assert put_first([[1, 5]], proposal, 4).tokens.tolist() == [[9, 1, 5, 2, 3]]
        assert put_first([[1, 5, 6, 7]], proposal, 2).tokens.tolist() == [[9, 1, 5, 6, 7]]

    def test_sampled_draft_tokens_are_dropped_whatever_they_are(self) -> None:
        q = SparseDistribution(torch.tensor([[1], [2], [3]]), torch.ones(3, 1))
        proposal = replace(chain(torch.tensor([[9, 1, 2], [9, 1, 2]])), q=(q, q))
        found = put_first([[1], []], proposal, 0)
        assert found.tokens.tolist() == [[9, 1, 0], [9, 1, 2]] and found.q == (None, q)
        assert put_first([[1], [2]], proposal, 0).q is None


@pytest.mark.parametrize(("tree_budget", "expected"), [("auto", 0), (6, 6), (0, 0)])
def test_only_trees_of_fixed_size_grow_beside_own_drafts(
    target: Target,
    tiny_drafter_dir: Path,
    tree_budget: Any,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    constants: Callable[..., None],
) -> None:
    budgets = set[int]()

    def recorded(own: Any, proposal: Proposal, budget: int) -> Proposal:
        budgets.add(budget)
        return put_first(own, proposal, budget)

    monkeypatch.setattr("blockdraft.engine.runner.put_first", recorded)
    constants("blockdraft.engine.adaptive.policy", MARGIN=0.0)  # so that drafting never pauses
    drafter = load_drafter(tiny_drafter_dir, target=target)
    with Engine(target, drafter, drafting=Drafting(tree_budget=tree_budget)) as engine:
        engine.generate(PROMPTS[:1], SamplingParams(60, grammar=OBJECT))
    assert budgets == {expected}


def texts(completions: Sequence[Completion]) -> list[str]:
    return [completion.text for completion in completions]


@pytest.mark.parametrize(
    "shape", [{}, {"temperature": 1.0, "seed": 3}, {"prediction": '{"first_property": "b", "second_property": true}'}]
)
def test_tokens_that_a_grammar_forces_are_drafted(
    target: Target, tiny_drafter_dir: Path, shape: dict[str, Any]
) -> None:
    params = SamplingParams(120, grammar=OBJECT, **shape)
    off = RequestDrafting(enabled=False)
    with Engine(target) as engine:
        expected = [engine.submit(prompt, params, drafting=off).result() for prompt in PROMPTS]
        forced = engine.generate(PROMPTS, params)
    assert max(max(completion.stats.drafted) for completion in expected) == 0
    assert all(json.loads(completion.text) for completion in expected if completion.finish_reason == "stop")
    assert [completion.token_ids for completion in forced] == [completion.token_ids for completion in expected]
    assert sum(len(c.stats.committed) for c in forced) < 0.8 * sum(len(c.stats.committed) for c in expected)
    for name, drafting in (("lookup", Drafting()), (tiny_drafter_dir, Drafting(None)), ("lookup", Drafting(None, 9))):
        with Engine(target, load_drafter(name, target=target), drafting=drafting) as engine:
            assert texts(engine.generate(PROMPTS, params)) == texts(expected)
