"""Random cases: requests, and the engine that gets them. A seed always makes the same case."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fuzz_models import (
    DRAFTERS,
    FEW_BITS,
    LATER,
    NEWEST,
    WAYS,
    fits_few_bits,
    has_tokenizer,
    is_hybrid,
    is_latent,
    target_fields,
)

from blockdraft import Drafting, Grammar, RequestDrafting, SamplingParams

CASES_PER_MODEL = 20
LONGEST_PROMPT, LONGEST_ANSWER = 200, 48
BLOCK_SIZES = {"draft_lm": 8, "lookup": 32, "none": 1}  # of the others the folder says
STOPS = ("e", "a", "th", "\n", "ü", " ", "zz")
# Of characters whose tokens are no end tokens.
GRAMMARS = ("[a-f]{2,9}(the|in)*[0-9]{1,3}", "(ab|[x-z]+)*7", "[A-Z0-9a-z]+", "the[a-z]{40}")


@dataclass
class Ask:
    """One request.

    Attributes:
        prompt: Token ids, which follow prompt and completion of `turn_of`.
        turn_of: The request that this one continues, or None.
        after: The request that must have ended before this one is submitted, or None.
        cancel: Whether it is cancelled, some time after it is submitted.
        stream: Whether it is read as a stream, where nothing else is under way.
        bounds: Its draft limits.
        predicted: Share of the tokens of its output that its prediction has; None is no prediction.
        urgent: Whether it goes before others.
        instructions: Leading tokens of its prompt that may be stored.
    """

    prompt: list[int]
    params: SamplingParams
    turn_of: int | None = None
    after: int | None = None
    cancel: bool = False
    stream: bool = False
    bounds: RequestDrafting | None = None
    predicted: float | None = None
    urgent: bool = False
    instructions: int = 0


@dataclass
class Case:
    """An engine and its requests.

    Attributes:
        model: Number of the model.
        way: How it is run, of `WAYS`.
        block_share: Of the drafter's block size, the block size to ask for; None leaves `drafting` as it is.
        stored: Least tokens of a stored prefix; 0 stores none. A second engine then loads what is stored.
    """

    seed: int
    model: int
    way: str
    drafter: str
    drafting: Drafting
    block_share: float | None
    max_batch_size: int
    prefix_tokens: int
    stored: int = 0
    asks: list[Ask] = field(default_factory=list)


def case_of(seed: int) -> Case:
    """Return the case of a seed. Neighbouring seeds share a model."""
    model, random = seed // CASES_PER_MODEL, Random(seed)
    way, drafter = random.choice(list(WAYS)), random.choice(DRAFTERS)
    later = Random(f"{seed} drafter")  # of its own, so that the other seeds mean what they did
    if later.random() < 0.3:
        drafter = later.choice(LATER)
    if later.random() < 0.06:
        drafter = NEWEST
    sampled = random.random() < 0.2
    if is_hybrid(model) and drafter == "draft_lm":  # whose states cannot be cut
        drafter = "lookup"
    if (way in FEW_BITS and not fits_few_bits(model)) or (is_latent(model) and "int8 store" in way):
        way = "compiled"
    budget: Any = 0 if sampled else random.choice((0, 0, random.randint(1, 60), random.randint(1, 10), 256))
    block_size: Any = None
    if random.random() < 0.12:  # costs are measured first, which takes a moment
        block_size, budget = random.choice((("auto", budget), (None, 0 if sampled else "auto")))
    share = random.random() if block_size is None and random.random() < 0.5 else None
    window = random.choice((None, None, random.randint(1, 40)))
    drafting = Drafting(block_size, budget, sampled, window)
    prefix_tokens = random.choice((0, random.randint(20, 300), 5000))
    case = Case(seed, model, way, drafter, drafting, share, random.randint(1, 6), prefix_tokens)
    stored = Random(f"{seed} stored")
    if stored.random() < 0.2:
        case.stored = stored.choice((1, 5, 20, 64))
    beginnings = [_text(random, model, random.randint(1, LONGEST_PROMPT)) for _ in range(2)]
    for number in range(random.randint(1, 8)):
        earlier = random.randrange(number) if number and random.random() < 0.5 else None
        turn_of = earlier if random.random() < 0.5 else None
        prompt = _prompt(random, model, beginnings, LONGEST_PROMPT if turn_of is None else 30)
        if turn_of is not None and _turns(case.asks, turn_of) >= 2:  # or it would outgrow the context
            turn_of = None
        ask = Ask(prompt, _params(random, model), turn_of, earlier)
        ask.cancel, ask.stream = random.random() < 0.1, random.random() < 0.1
        _add_extras(Random(f"{seed} {number}"), model, ask)  # of its own, so that seeds mean what they meant before
        ask.urgent = Random(f"{seed} {number} urgent").random() < 0.2
        if case.stored:
            ask.instructions = stored.choice((0, len(prompt), stored.randint(1, len(prompt))))
        case.asks.append(ask)
    return case


def _turns(asks: list[Ask], number: int) -> int:
    earlier = asks[number].turn_of
    return 1 if earlier is None else 1 + _turns(asks, earlier)


def _text(random: Random, model: int, length: int) -> list[int]:
    size = target_fields(model)[1]["vocab_size"]
    if random.random() < 0.3:  # one that repeats itself
        part = [random.randrange(size) for _ in range(random.randint(1, 12))]
        return (part * length)[:length]
    return [random.randrange(size) for _ in range(length)]


def _prompt(random: Random, model: int, beginnings: list[list[int]], longest: int) -> list[int]:
    if random.random() < 0.5:
        shared = random.choice(beginnings)[: random.randint(1, longest)]
        return [*shared, *_text(random, model, random.randint(0, 5))][:longest]
    return _text(random, model, random.choice((random.randint(1, 8), random.randint(1, longest))))


def _params(random: Random, model: int) -> SamplingParams:
    size, fields = target_fields(model)[1]["vocab_size"], dict[str, Any]()
    fields["max_new_tokens"] = random.choice((1, 2, random.randint(3, LONGEST_ANSWER)))
    fields["ignore_eos"] = random.random() < 0.7
    if random.random() < 0.5:
        fields |= {"temperature": random.choice((0.3, 0.8, 1.0, 1.5)), "seed": random.randrange(2**32)}
        fields["top_k"] = random.choice((0, 0, 1, 5, 20))
        fields["top_p"] = random.choice((1.0, 1.0, 0.9, 0.5))
        fields["min_p"] = random.choice((0.0, 0.0, 0.05))
    if random.random() < 0.3:
        fields["repetition_penalty"] = random.choice((0.8, 1.1, 1.5))
    if random.random() < 0.3:
        fields["presence_penalty"] = random.uniform(-2, 2)
    if random.random() < 0.3:
        fields["frequency_penalty"] = random.uniform(-2, 2)
    if random.random() < 0.2:
        fields["logit_bias"] = {random.randrange(size): random.uniform(-20, 5) for _ in range(random.randint(1, 4))}
    if random.random() < 0.3:
        fields["stop_token_ids"] = tuple(random.randrange(size) for _ in range(random.randint(1, 3)))
    if has_tokenizer(model) and random.random() < 0.3:
        fields["stop"] = tuple(random.sample(STOPS, random.randint(1, 2)))
    return SamplingParams(**fields)


def predicted(ask: Ask, answer: list[int], model: int) -> list[int]:
    """Return the prediction of a request: its output, with some tokens dropped, replaced or inserted."""
    if ask.predicted is None:
        return []
    random, size = Random(str(ask.prompt)), target_fields(model)[1]["vocab_size"]
    tokens = list[int]()
    for token in answer:
        if random.random() < ask.predicted:
            tokens.append(token)
        else:
            tokens += [random.randrange(size) for _ in range(random.randint(0, 2))]
    return tokens


def _add_extras(random: Random, model: int, ask: Ask) -> None:
    if random.random() < 0.3:
        size, budget = (random.choice((None, random.randint(most, 8))) for most in (1, 0))
        ask.bounds = RequestDrafting(random.random() < 0.7, size, budget)
    if random.random() < 0.2:
        ask.params = replace(ask.params, logprobs=random.randint(0, 5))
    if random.random() < 0.1:
        ask.params = replace(ask.params, prompt_logprobs=random.randint(0, 5))
    if has_tokenizer(model) and random.random() < 0.25:
        ask.params = replace(ask.params, ignore_eos=False, grammar=Grammar("regex", random.choice(GRAMMARS)))
    later = Random(random.random())
    if later.random() < 0.3:
        ask.predicted = later.choice((0.0, 0.5, 0.9, 1.0))
    if later.random() < 0.5:
        ask.params = replace(ask.params, lookup_scope=later.choice(("a", "b")))
