"""Answers under a grammar: they follow it, drafting changes none of their tokens, and their distribution is p,
masked."""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from copies import copy_with
from exact_distribution import LENGTH, NOISE, PROMPT, V, write_model
from test_engine import Oracle
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from blockdraft.decode.distributions import Distributions
from blockdraft.drafters import load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine
from blockdraft.engine.grammar import AnswerGrammar, compile_schema
from blockdraft.errors import NumbersError, UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, Grammar, RequestDrafting, SamplingParams

PROMPTS = [[68, 69, 70], [80, 71, 72, 73], [90], [75, 76, 77, 78, 79]]
LETTERS = Grammar("regex", "[a-f]{4,12}(the|in){2}[0-9]{1,3}")
PERSON = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["cat", "dog", "thing"]},
                "size": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["kind", "size"],
            "additionalProperties": False,
        }
    ),
)
LIST = Grammar("lark", 'start: item ("," item)* "."\nitem: /[a-c]+/')


def closed(*patterns: str) -> dict[str, Any]:
    """Return a schema with a property and patterns, which allows no other names."""
    named = {"a": {"type": "integer"}, "b/c": {"type": "integer"}}
    schema = {"type": "object", "properties": named, "required": ["a"], "additionalProperties": False}
    return schema | {"patternProperties": dict.fromkeys(patterns, {"type": "integer"})}


SHAPES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {20: 5.0}},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "top_p": 0.9, "frequency_penalty": 0.5},
]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def params(grammar: Grammar | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 120, "grammar": grammar, **fields})


def follows(grammar: Grammar, text: str) -> bool:
    if grammar == LETTERS:
        return re.fullmatch(grammar.text, text) is not None
    if grammar == LIST:
        return re.fullmatch(r"[a-c]+(,[a-c]+)*\.", text) is not None
    found = json.loads(text)
    return set(found) == {"kind", "size"} and found["kind"] in ("cat", "dog", "thing") and found["size"] <= 99


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "shape"),
    [
        pytest.param(grammar, shape, marks=() if (kind + way) % 3 == 0 else pytest.mark.long)
        for kind, grammar in enumerate([LETTERS, PERSON, LIST])
        for way, shape in enumerate(SHAPES)
    ],
)
def test_drafting_changes_no_token(target: Target, tiny_drafter_dir: Path, grammar: Grammar, shape: Any) -> None:
    """In batches of random draft tokens, beside a row without a grammar; and where most draft tokens are right, in
    chains and trees."""
    each = [params(grammar, **shape), params(None, ignore_eos=True), params(PERSON), params(grammar, logprobs=2)]
    expected = Engine(target).generate(PROMPTS, each)
    for one, own in zip(expected, each, strict=True):
        if own.grammar is not None and one.finish_reason == "stop":
            assert follows(own.grammar, one.text) and one.token_ids[-1] in target.eos_token_ids
    assert expected[3].finish_reason == "stop" or grammar == LIST
    random = load_drafter(tiny_drafter_dir, target=target)
    for drafting in (Drafting(None), Drafting(tree_budget=10), Drafting("auto"), Drafting(tree_budget="auto")):
        with Engine(target, random, drafting=drafting) as engine:
            assert [c.token_ids for c in engine.generate(PROMPTS, each)] == [c.token_ids for c in expected]
    for fork, drafting in ((False, Drafting(None)), (True, Drafting(tree_budget=14))):
        for wrong_after in (99, 2):
            oracle = Oracle(expected[0].token_ids, wrong_after, fork)
            with Engine(target, oracle, drafting=drafting) as engine:
                [found] = engine.generate(PROMPTS[:1], each[0])
            assert (found.token_ids, found.finish_reason) == (expected[0].token_ids, expected[0].finish_reason)
            assert found.tau > (4 if wrong_after == 99 else 1.5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_draft_tokens_follow_it_too(target: Target, tiny_drafter_dir: Path, temperature: float) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    with Engine(target, drafter, drafting=Drafting(None, sampled=True)) as engine:
        each = [params(LETTERS, temperature=temperature, seed=seed) for seed in range(12)]
        for one in engine.generate([PROMPTS[seed % 4] for seed in range(12)], each):
            assert one.finish_reason == "stop" and follows(LETTERS, one.text)


class NotTwice:
    """No token may follow itself. `broken` forgets the draft tokens on the path."""

    def __init__(self, broken: bool = False) -> None:
        self.last, self.broken = -1, broken

    def advance(self, token: int) -> bool:
        self.last = token
        return True

    def draft(self, most: int) -> tuple[list[int], list[float]]:
        return [], []

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        allowed = self.after(tokens)
        return allowed is not None and bool(allowed[token])

    def after(self, tokens: Sequence[int]) -> Tensor | None:
        allowed = torch.ones(V, dtype=torch.bool)
        last = tokens[-1] if tokens and not self.broken else self.last
        if last >= 0:
            allowed[last] = False
        return allowed

    def dead_end(self) -> str | None:
        return None


def surprise(folder: Path, drafting: Drafting, rows: int, rules: Callable[[], NotTwice]) -> float:
    """As in test_sampled_distribution, with the distribution that is masked and normalised; infinite where there is
    what cannot be."""
    target = load_target(write_model(folder / "target", 2))
    drafter = load_drafter(write_model(folder / "drafter", 3), target=target)
    with Engine(target, drafter, max_batch_size=500, drafting=drafting) as engine:
        requests = [
            engine.request(PROMPT, SamplingParams(LENGTH, 1.0, seed=seed, ignore_eos=True)) for seed in range(rows)
        ]
        for request in requests:
            request.grammar = rules()  # type: ignore[assignment]
        engine.start(requests)
        outputs = [tuple(request.result().checked().token_ids) for request in requests]
    model = LlamaForCausalLM.from_pretrained(folder / "target").eval()
    every = [each for each in product(range(V), repeat=LENGTH) if each[0] != each[1] != each[2]]
    texts = torch.tensor([[*PROMPT, *each] for each in every])
    with torch.no_grad():
        logits = model(texts).logits[:, len(PROMPT) - 1 : -1].double()
    for at in range(1, LENGTH):
        logits[:, at].scatter_(1, texts[:, len(PROMPT) + at - 1, None], -torch.inf)
    shares = logits.softmax(-1).gather(2, texts[:, len(PROMPT) :, None]).prod(dim=1)[:, 0].tolist()
    assert sum(shares) == pytest.approx(1)
    found, freedom = Counter(outputs), len(every) - 1
    if not set(found) <= set(every):
        return math.inf
    expected = [share * rows for share in shares]
    chi_square = sum((found[each] - count) ** 2 / count for each, count in zip(every, expected, strict=True))
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [Drafting(None, sampled=True), Drafting(None)], ids=["sampled", "chosen"])
def test_answers_have_the_masked_distribution(tmp_path: Path, drafting: Drafting) -> None:
    assert abs(surprise(tmp_path, drafting, 2000, NotTwice)) < NOISE


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [Drafting(None, sampled=True), Drafting(None)], ids=["sampled", "chosen"])
def test_a_mask_that_forgets_the_path_is_noticed(tmp_path: Path, drafting: Drafting) -> None:
    assert surprise(tmp_path, drafting, 400, lambda: NotTwice(broken=True)) == math.inf


@pytest.mark.slow
def test_a_distribution_that_is_not_normalised_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unnormalised(self: Distributions, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        probs = self._logits[list(rows), list(nodes)].softmax(-1)
        for m, at in enumerate(zip(rows, nodes, strict=True)):
            probs[m, ~self._allowed_at(*at)] = 0.0  # type: ignore[operator]
        return probs

    monkeypatch.setattr(Distributions, "probs", unnormalised)
    assert surprise(tmp_path, Drafting(None, sampled=True), 2000, NotTwice) > 2 * NOISE


def test_a_complete_grammar_lets_the_end_follow_alone(target: Target) -> None:
    state = AnswerGrammar(Grammar("regex", "ab|ac"), target)
    a, b, c = (target.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")  # type: ignore[union-attr]
    ends = sorted(target.eos_token_ids)

    def after(*tokens: int) -> list[int] | None:
        allowed = state.after(tokens)
        return None if allowed is None else allowed.nonzero().flatten().tolist()

    assert (after(), after(a), after(a, b), after(a, c)) == ([a], [b, c], ends, ends)
    assert after(a, a) is None and after(b) is None and after(a, a, b) is None
    assert after(a, b, ends[0]) == after(a, b, ends[0], c) == ends
    assert state.advance(a) and after() == [b, c] and after(b) == ends
    assert after(a) is None and after(c) == ends  # draft tokens leave no trace
    assert state.advance(b) and after() == ends and state.dead_end() is None


def test_a_token_is_allowed_where_the_mask_allows_it(target: Target) -> None:
    schema = {"type": "object", "properties": {"a b": {"type": "integer"}, "c": {"enum": ["x", "yz"]}}}
    choose = random.Random(0)
    grammars = [
        Grammar("json_schema", json.dumps(schema)),
        Grammar("json_object"),
        Grammar("regex", "(a|b)+c[0-9]{3}( f| ba)*"),
        Grammar("lark", 'start: (few ";")+\nfew[max_tokens=1]: /[a-z]+/'),
    ]
    for grammar in grammars:
        state = AnswerGrammar(grammar, target)
        for _ in range(12):
            mask = state.after([])
            assert mask is not None
            allowed = mask.nonzero().flatten().tolist()
            tokens = {*choose.sample(range(len(mask)), 40), *allowed[:20], *target.eos_token_ids}
            assert [state.allows([], token) for token in tokens] == [bool(mask[token]) for token in tokens]
            following = choose.choice(allowed)
            mask = state.after([following])
            assert [state.allows([following], token) for token in tokens] == [
                mask is not None and bool(mask[token]) for token in tokens
            ]
            if following in target.eos_token_ids:
                break
            assert state.advance(following)


@pytest.mark.parametrize("vocab_size", [300, 265, 200])
def test_only_tokens_of_both_target_and_tokenizer_are_possible(
    tmp_path: Path, tiny_target_dir: Path, vocab_size: int
) -> None:
    """The rows of the head beyond the tokenizer's tokens, which an untrained model finds as likely as any."""
    config = Qwen3Config.from_pretrained(tiny_target_dir, vocab_size=vocab_size)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    for file in tiny_target_dir.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    target = load_target(tmp_path)
    with Engine(target) as engine:
        each = [params(Grammar("regex", "[a-f&-0]{20}"), temperature=5.0, seed=seed) for seed in range(4)]
        for one in engine.generate(PROMPTS, each):
            assert one.finish_reason == "stop" and len(one.text) == 20 and max(one.token_ids) < 265


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", "{"), "not valid JSON"),
        (Grammar("json_schema", "[]"), "schema must be an object or true, got \\[]"),
        (Grammar("json_schema", '{"type": "objec"}'), '"type" at # must be one of "null".*, got "objec"'),
        (Grammar("json_schema", '{"items": {"minLength": -1}}'), '"minLength" at #/items must be a whole number'),
        (Grammar("json_schema", '{"properties": {"a b": 5}}'), '"properties" at # must be an object of names and'),
        (Grammar("json_schema", '{"$ref": 5}'), '"\\$ref" at # must be a text, got 5'),
        (Grammar("json_schema", '{"const": 1e400}'), "infinite or NaN, which JSON lacks"),
        (Grammar("json_schema", '{"const": NaN}'), "infinite or NaN, which JSON lacks"),
        (Grammar("json_schema", "false"), "false allows no value"),
        (Grammar("json_schema", '{"not": {}}'), 'no grammar expresses "not" as the schema has it; leave it out'),
        (Grammar("json_schema", '{"uniqueItems": true, "format": "path"}'), 'no grammar expresses "uniqueItems"'),
        (Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), 'replace "oneOf" by "anyOf"'),
        (Grammar("json_schema", '{"enum": []}'), 'no value fits "enum" at #'),
        (
            Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}'),
            'no value fits "type", "minimum", "maximum" at #; change them',
        ),
        (Grammar("json_schema", '{"type": "string", "pattern": "a", "format": "date"}'), '"pattern", "format" at #'),
        (Grammar("json_schema", '{"$ref": "#/$defs/f", "$defs": {"f": false}}'), "never ends"),
        (
            Grammar("json_schema", json.dumps({"items": closed("^a$")})),
            "match only names in properties; leave them out",
        ),
        (Grammar("json_schema", json.dumps(closed("^a$", "^b/c$"))), "match only names in properties"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1/schema"}'), "points to nothing"),
        (Grammar("json_schema", '{"type": "array", "items": ' * 300 + "{}" + "}" * 300), "recursion limit"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", r"[^\x00-\U0010FFFF]"), "no text fits it"),
        (Grammar("lark", "nope"), "Expected"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(target: Target, grammar: Grammar, message: str) -> None:
    with Engine(target) as engine, pytest.raises(UsageError, match=f"kind {grammar.kind} is refused: .*{message}") as e:
        engine.submit([5], params(grammar))
    assert len(str(e.value)) < 500


@pytest.mark.parametrize("patterns", [["^a"], ["^[ab]$"], ["^a$", "^ab$"]])
def test_patterns_that_match_other_names_are_followed(target: Target, patterns: list[str]) -> None:
    grammar = Grammar("json_schema", json.dumps(closed(*patterns)))
    with Engine(target) as engine:
        for completion in engine.generate([[5]] * 4, [params(grammar, temperature=3.0, seed=s) for s in range(4)]):
            assert completion.checked().text.startswith("{")


def test_unknown_formats_say_nothing(target: Target) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"], "format": "path"}}, "required": ["a"]}
    text = json.dumps(schema | {"additionalProperties": False})
    with Engine(target) as engine:
        [found] = engine.generate([[5]], params(Grammar("json_schema", text)))
    assert json.loads(found.text) == {"a": "x"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "minItems": 1.0, "maxItems": 1.0, "items": {"enum": [1]}}, "[1]"),
        ({"type": "object", "minProperties": 1.0, "properties": {"minItems": {"enum": ["x"]}}}, '{"minItems": "x"}'),
        ({"$id": "http://a/", "allOf": [{"$id": "b", "$defs": {"c": {"enum": ["x"]}}, "$ref": "#/$defs/c"}]}, '"x"'),
    ],
)
def test_schemas_as_other_programs_write_them(schema: Any, text: str) -> None:
    schema = schema | ({"additionalProperties": False} if "properties" in schema else {})
    library = pytest.importorskip("llguidance")
    matcher = library.LLMatcher(library.LLTokenizer("byte"), compile_schema(json.dumps(schema)), log_level=0)
    assert matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.slow
def test_a_huge_schema_is_refused_or_followed(target: Target) -> None:
    many = {str(i): {"type": "string", "pattern": f"a{{{i}}}"} for i in range(500)}
    with Engine(target) as engine:
        schema = json.dumps({"type": "object", "properties": many, "required": [*many]})
        [found] = engine.generate([[5]], params(Grammar("json_schema", schema), max_new_tokens=9))
        assert found.finish_reason == "length" and found.text.startswith("{")
        with pytest.raises(UsageError, match="exceeds the limits of the grammar's parser; make it smaller"):
            engine.submit(
                [5], params(Grammar("json_schema", json.dumps({"enum": [str(i) * 40 for i in range(60000)]})))
            )


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("eos_token_ids", frozenset({300}), "has no end token"),
        ("tokenizer", SimpleNamespace(chat_template=None), "fast tokenizer"),
        ("tokenizer", None, "no tokenizer"),
    ],
)
def test_targets_that_cannot_end_or_have_no_tokens_are_refused(
    tiny_target_dir: Path, attribute: str, value: Any, message: str
) -> None:
    target = load_target(tiny_target_dir)
    setattr(target, attribute, value)
    with pytest.raises(UsageError, match=message):
        Engine(target).submit([5], params(LETTERS))


def test_without_llguidance_the_message_says_what_to_install(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with Engine(target) as engine:
        with pytest.raises(UsageError, match=r"blockdraft\[server\]"):
            engine.submit([5], params(LETTERS))
        assert engine.generate([[5]], SamplingParams(2))[0].finish_reason != "error"


def test_a_grammar_goes_before_bias_and_other_ends(target: Target) -> None:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    digits = {tokenizer.convert_tokens_to_ids(d): -100.0 for d in "0123456789"}
    number, ends = Grammar("regex", "[0-9]{5}"), dict.fromkeys(target.eos_token_ids, 100.0)
    with Engine(target) as engine:
        [biased] = engine.generate([[5]], params(number, logit_bias=digits | ends))
        assert re.fullmatch("[0-9]{5}", biased.text) and biased.finish_reason == "stop"
        [stopped] = engine.generate([[5]], params(number, stop=[biased.text[2]], logit_bias=digits))
        assert stopped.text == biased.text[: biased.text.index(biased.text[2])] and stopped.finish_reason == "stop"
        [short] = engine.generate([[5]], params(number, max_new_tokens=3, logit_bias=digits))
        assert (short.text, short.finish_reason) == (biased.text[:3], "length")
    with pytest.raises(UsageError, match="ignore_eos"):
        params(number, ignore_eos=True)


@pytest.mark.parametrize("drafts", [False, True])
def test_where_no_allowed_token_has_a_finite_logit_the_request_alone_fails(
    target: Target, tiny_drafter_dir: Path, drafts: bool
) -> None:
    assert target.tokenizer is not None
    b = target.tokenizer.convert_tokens_to_ids("b")
    forward = target.forward

    def without_b(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits[..., b] = -torch.inf
        return type(output)(output.logits, output.hidden_states)

    target = copy_with(target, forward=without_b)
    drafter = load_drafter(tiny_drafter_dir, target=target) if drafts else NoDrafter()
    with Engine(target, drafter, drafting=Drafting(None)) as engine:
        each = [params(Grammar("regex", "[cd]{3}ab")), params(None, ignore_eos=True), params(LETTERS)]
        failed, free, other = engine.generate(PROMPTS[:3], each)
    assert isinstance(failed.failure, NumbersError) and "that the grammar allows" in str(failed.failure)
    assert re.fullmatch("[cd]{3}a", failed.text)
    assert len(free.token_ids) == 120 and follows(LETTERS, other.text) and "b" not in other.text


def test_a_dead_end_is_reported_as_such(target: Target) -> None:
    class DeadEnd(NotTwice):
        def after(self, tokens: Sequence[int]) -> Tensor | None:
            return None if self.last >= 0 else torch.arange(target.vocab_size) == 9

        def dead_end(self) -> str | None:
            return "for some reason"

    with Engine(target) as engine:
        request = engine.request([5], SamplingParams(4))
        request.grammar = DeadEnd()  # type: ignore[assignment]
        engine.start([request])
        found = request.result()
    assert found.token_ids == [9]
    assert isinstance(found.failure, UsageError)  # who asks wrote the grammar
    told = "The grammar allows no token after token 1 of the answer: for some reason. A simpler grammar may do."
    assert found.error == told


def test_cancelled_in_the_middle_it_leaves_the_others_alone(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    endless = Grammar("regex", "(ab)*c")
    bias = {target.tokenizer.convert_tokens_to_ids("c"): -100.0}  # type: ignore[union-attr]
    [expected] = Engine(target).generate(PROMPTS[:1], params(PERSON))
    with Engine(target, drafter, drafting=Drafting(None)) as engine:
        request = engine.submit(PROMPTS[1], params(endless, max_new_tokens=150, logit_bias=bias))
        request.listener = lambda chunk: request.cancel() if len(request.token_ids) > 5 else None
        other = engine.submit(PROMPTS[0], params(PERSON)).result()
        cancelled = request.result()
    assert cancelled.finish_reason == "cancelled" and cancelled.text.startswith("abab")
    assert other.token_ids == expected.token_ids


def test_bounds_of_drafting_and_a_grammar_go_together(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    [expected] = Engine(target).generate(PROMPTS[:1], params(PERSON))
    with Engine(target, drafter, drafting=Drafting(tree_budget=8)) as engine:
        for bounds in (RequestDrafting(enabled=False), RequestDrafting(tree_budget=2)):
            assert engine.submit(PROMPTS[0], params(PERSON), drafting=bounds).result().token_ids == expected.token_ids


def test_the_tokenizer_is_read_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("llguidance.hf.from_tokenizer", lambda *args: calls.append(args))
    AnswerGrammar(PERSON, target)
    AnswerGrammar(Grammar("json_object"), target)
    assert not calls


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("yaml", "x", "kind must be 'json_schema', .*, got 'yaml'"),
        ("regex", "", "of kind regex needs a text"),
        ("json_object", "{}", "takes no text"),
        ("regex", 5, "text must be a text, got 5"),
    ],
)
def test_bad_grammars(kind: Any, text: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Grammar(kind, text)
    with pytest.raises(UsageError, match="must be an instance of Grammar"):
        SamplingParams(grammar="[a-z]")  # type: ignore[arg-type]
