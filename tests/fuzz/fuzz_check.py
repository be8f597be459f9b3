"""Runs a case and compares every answer with plain decoding of that request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from fuzz_cases import Ask, Case, predicted
from fuzz_drive import answers
from fuzz_models import COMPILED, ROUNDED, Models

from blockdraft import Completion, Engine, RequestDrafting, SamplingParams, Target
from blockdraft.decode.distributions import Distributions
from blockdraft.decode.proposal import chain
from blockdraft.decode.sampling import RandomNumbers
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.types import TokenLogprob

NEAR = 1e-4  # relative; logits closer than this may change places where sums are added up in another order
TRIES = 64
LOGPROB_NEAR = 1e-2  # likewise, of numbers up to tens


@dataclass
class Outcome:
    """What was compared.

    Attributes:
        near_ties: Answers that left their twin at two nearly equal logits.
        steps: Of all requests; with `committed` this says how often draft tokens stood.
    """

    requests: int = 0
    tokens: int = 0
    near_ties: int = 0
    steps: int = 0
    committed: int = 0

    def __iadd__(self, other: Outcome) -> Outcome:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class Different(AssertionError):
    """An answer is not that of its twin."""


def run(case: Case, models: Models) -> Outcome:
    """Run a case.

    Raises:
        Different: An answer is wrong. Anything else that is raised is a bug too.
    """
    target, drafter = models.target(case.model, case.way), models.drafter(case.model, case.way, case.drafter)
    plain = Engine(target, models.drafter(case.model, case.way, "none"), 1)
    drafting = case.drafting
    if case.block_share is not None:
        drafting = replace(drafting, block_size=1 + round(case.block_share * (drafter.block_size - 1)))
    engine = Engine(target, drafter, case.max_batch_size, drafting, prefix_tokens=case.prefix_tokens)
    outcome = Outcome()
    try:
        prompts: list[list[int]] = []
        twins: list[Completion] = []
        for ask in case.asks:  # a second turn needs the first one's answer
            before = [] if ask.turn_of is None else prompts[ask.turn_of] + twins[ask.turn_of].token_ids
            prompts.append(before + ask.prompt)
            twins.append(plain.submit(prompts[-1], ask.params, drafting=RequestDrafting(enabled=False)).result())
        asks = [
            replace(ask, params=replace(ask.params, prediction=predicted(ask, twin.token_ids, case.model)))
            for ask, twin in zip(case.asks, twins, strict=True)
        ]
        found = answers(engine, asks, prompts)
        for number, ask in enumerate(asks):
            here = f"seed {case.seed}, request {number}, {case.way}, {case.drafter}, {drafting}, {ask.params}"
            if drafting.sampled and ask.params.temperature > 0:
                _check_rules(found[number], ask, target, here)
                fixed = "auto" not in (drafting.block_size, drafting.tree_budget)
                # Where neighbours change no bit of a drafter's distribution.
                if fixed and case.way in COMPILED and case.drafter not in ("eagle3", "flow"):
                    again = Engine(target, drafter, 1, drafting)
                    alone = again.submit(prompts[number], ask.params, drafting=ask.bounds).result()
                    again.close()
                    if _differs(found[number], alone, ask):
                        raise Different(f"{here}:\n{_shown(found[number])}\nbut sampled alone:\n{_shown(alone)}")
            elif _differs(found[number], twins[number], ask):
                if not _near_tie(prompts[number], ask.params, found[number], twins[number], target):
                    raise Different(
                        f"{here}:\n{_shown(found[number])}\nbut alone and plainly:\n{_shown(twins[number])}"
                    )
                outcome.near_ties += 1
            elif not _same_logprobs(found[number], twins[number], len(prompts[number])):
                raise Different(f"{here}:\n{found[number].logprobs}\nbut alone and plainly\n{twins[number].logprobs}")
            elif case.seed % 5 == 0 and case.way not in ROUNDED:
                _check_transformers(case, prompts[number], case.asks[number].params, twins[number], models, here)
            outcome.requests += 1
            outcome.tokens += len(found[number].token_ids)
            outcome.steps += len(found[number].stats.committed)
            outcome.committed += sum(found[number].stats.committed)
    finally:
        engine.close()
        plain.close()
    return outcome


def _shown(completion: Completion) -> str:
    error = f", {completion.error}" if completion.error else ""
    return f"{completion.token_ids} {completion.finish_reason} {completion.text!r}{error}"


def _differs(found: Completion, twin: Completion, ask: Ask) -> bool:
    if found.finish_reason == "cancelled" and ask.cancel:
        return found.token_ids != twin.token_ids[: len(found.token_ids)]
    ends = (found.token_ids, found.finish_reason, found.text) != (twin.token_ids, twin.finish_reason, twin.text)
    return ends or len(found.drafted) != len(found.token_ids)


def _same_logprobs(found: Completion, twin: Completion, prompt: int) -> bool:
    """Of the answer as far as it goes; of the prompt, unless it was cancelled meanwhile."""
    pairs: list[tuple[TokenLogprob | None, TokenLogprob | None]] = []
    for ours, theirs, tokens in (
        (found.logprobs, twin.logprobs, len(found.token_ids)),
        (found.prompt_logprobs, twin.prompt_logprobs, prompt if found.token_ids else 0),
    ):
        if ours is not None and theirs is not None:
            pairs += zip(ours, theirs, strict=False)
        if (ours is None) != (theirs is None) or (tokens and ours is not None and len(ours) != tokens):
            return False
    return all(
        ours is theirs is None
        or (ours and theirs and ours.token_id == theirs.token_id and abs(ours.logprob - theirs.logprob) < LOGPROB_NEAR)
        for ours, theirs in pairs
    )


def _check_rules(found: Completion, ask: Ask, target: Target, here: str) -> None:
    """What holds of a sampled answer, whatever was sampled: where it ends, and why."""
    params, ids = ask.params, found.token_ids
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_token_ids))
    early = any(token in stops for token in ids[:-1])
    sound = {
        "length": len(ids) == params.max_new_tokens and stops.isdisjoint(ids[-1:]),
        "stop": bool(params.stop) or not stops.isdisjoint(ids[-1:]),
        "cancelled": ask.cancel,
    }
    if early or len(ids) > params.max_new_tokens or not sound.get(found.finish_reason, False):
        raise Different(f"{here}: an answer that ends wrongly:\n{_shown(found)}")


def _near_tie(
    prompt: Sequence[int], params: SamplingParams, found: Completion, twin: Completion, target: Target
) -> bool:
    """Whether the first different token hangs on rounding: noise of `NEAR` on the logits gives one or the other."""
    pairs = enumerate(zip(found.token_ids, twin.token_ids, strict=False))
    place = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
    if place is None or found.error or twin.error:
        return False
    text = [*prompt, *twin.token_ids[:place]]
    tokens, cache = torch.tensor([text]), target.new_cache(1, len(text))
    logits = target.forward(tokens, chain(tokens).parents, cache, (), torch.tensor([len(text) - 1])).logits.float()
    noise = torch.randn(TRIES, *logits.shape[1:], generator=torch.Generator().manual_seed(0))
    noisy = logits + 0.3 * NEAR * logits.abs().amax() * noise
    node, parent = tokens[:, -1:].expand(TRIES, 1), torch.full((TRIES, 1), -1)
    grammar = params.grammar and AnswerGrammar(params.grammar, target)
    assert grammar is None or all(map(grammar.advance, twin.token_ids[:place]))
    texts = [list(prompt)] * TRIES, [twin.token_ids[:place]] * TRIES
    distributions = Distributions(noisy, [params] * TRIES, node, parent, *texts, rules=[grammar] * TRIES)
    number = RandomNumbers(params.seed).at([place]).expand(TRIES, 1)
    reached = set(distributions.draw(range(TRIES), [0] * TRIES, number))
    return {found.token_ids[place], twin.token_ids[place]} <= reached


def _check_transformers(
    case: Case, prompt: list[int], params: SamplingParams, twin: Completion, models: Models, here: str
) -> None:
    """A greedy answer without extras is that of transformers' own `generate`."""
    plain = SamplingParams(params.max_new_tokens, ignore_eos=params.ignore_eos)
    if replace(params, lookup_scope=None) != plain:
        return
    model, target = models.reference(case.model), models.target(case.model, "hf")
    eos = None if params.ignore_eos else sorted(target.eos_token_ids)
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": params.max_new_tokens, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=eos, pad_token_id=0, **options)
    theirs = replace(twin, token_ids=made[0, len(prompt) :].tolist())
    if theirs.token_ids != twin.token_ids and not _near_tie(prompt, params, theirs, twin, target):
        raise Different(f"{here}:\nplain {twin.token_ids}\nbut transformers {theirs.token_ids}")
