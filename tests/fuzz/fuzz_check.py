"""Runs a case and compares each completion with its twin: plain decoding of that request alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from fuzz_cases import Ask, Case, predicted
from fuzz_drive import answers
from fuzz_models import COMPILED, ROUNDED, Models

from blockdraft import Completion, Engine, RequestDrafting, SamplingParams, Target
from blockdraft.decode.distributions import Distributions
from blockdraft.decode.proposal import chain
from blockdraft.decode.sampling import RandomNumbers
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.machine import cache_folder
from blockdraft.types import TokenLogprob

NEAR = 1e-4  # relative; logits closer than this may change places where sums are added up in another order
TRIES = 64
LOGPROB_NEAR = 1e-2  # likewise, of numbers up to tens


@dataclass
class Outcome:
    """Counts of what was compared.

    Attributes:
        near_ties: Completions that leave their twin at two nearly equal logits.
        steps, committed: Steps of all requests, and the tokens that they committed.
        remembered: Tokens of prompts that were copied or loaded.
    """

    requests: int = 0
    tokens: int = 0
    near_ties: int = 0
    steps: int = 0
    committed: int = 0
    remembered: int = 0

    def __iadd__(self, other: Outcome) -> Outcome:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class Different(AssertionError):
    """A completion is not its twin."""


def run(case: Case, models: Models) -> Outcome:
    """Run a case.

    Raises:
        Different: A completion is wrong. Any other error is a bug too.
    """
    target, drafter = models.target(case.model, case.way), models.drafter(case.model, case.way, case.drafter)
    plain = Engine(target, models.drafter(case.model, case.way, "none"), 1)
    drafting = case.drafting
    if case.block_share is not None:
        drafting = replace(drafting, block_size=1 + round(case.block_share * (drafter.block_size - 1)))
    outcome = Outcome()
    with ExitStack() as stack:
        if case.stored:
            stack.enter_context(_own_prefixes())
        stack.callback(plain.close)
        prompts: list[list[int]] = []
        twins: list[Completion] = []
        for ask in case.asks:  # a second turn continues the first completion
            before = [] if ask.turn_of is None else prompts[ask.turn_of] + twins[ask.turn_of].token_ids
            prompts.append(before + ask.prompt)
            twins.append(plain.submit(prompts[-1], ask.params, drafting=RequestDrafting(enabled=False)).result())
        asks = [
            replace(ask, params=replace(ask.params, prediction=predicted(ask, twin.token_ids, case.model)))
            for ask, twin in zip(case.asks, twins, strict=True)
        ]
        for _ in range(2 if case.stored else 1):  # the second engine loads what the first one has stored
            with Engine(
                target,
                drafter,
                case.max_batch_size,
                drafting,
                prefix_tokens=case.prefix_tokens,
                stored_prefix_tokens=case.stored,
            ) as engine:
                completions = answers(engine, asks, prompts)
                outcome += _compared(case, engine, asks, prompts, completions, twins, models)
    return outcome


@contextmanager
def _own_prefixes() -> Iterator[None]:
    """Store prefixes in a temporary folder."""
    before = os.environ.get("BLOCKDRAFT_CACHE")
    libraries = cache_folder() / "libraries"
    with tempfile.TemporaryDirectory() as folder:
        libraries.mkdir(parents=True, exist_ok=True)
        Path(folder, "libraries").symlink_to(libraries)
        os.environ["BLOCKDRAFT_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["BLOCKDRAFT_CACHE"]
            else:
                os.environ["BLOCKDRAFT_CACHE"] = before


def _compared(
    case: Case,
    engine: Engine,
    asks: Sequence[Ask],
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    twins: Sequence[Completion],
    models: Models,
) -> Outcome:
    """Compare the completions of an engine with their twins."""
    target, drafter, drafting, outcome = engine.target, engine.drafter, engine.drafting, Outcome()
    for number, (ask, completion, twin) in enumerate(zip(asks, completions, twins, strict=True)):
        here = f"seed {case.seed}, request {number}, {case.way}, {case.drafter}, {drafting}, {ask.params}"
        if drafting.sampled and ask.params.temperature > 0:
            _check_rules(completion, ask, target, here)
            fixed = "auto" not in (drafting.block_size, drafting.tree_budget)
            # Where neighbours change no bit of a drafter's distribution.
            if fixed and case.way in COMPILED and case.drafter not in ("eagle3", "flow"):
                with Engine(target, drafter, 1, drafting) as again:
                    alone = again.submit(prompts[number], ask.params, drafting=ask.bounds).result()
                if _differs(completion, alone, ask):
                    raise Different(f"{here}:\n{_shown(completion)}\nbut sampled alone:\n{_shown(alone)}")
        elif _differs(completion, twin, ask):
            if not _near_tie(prompts[number], ask.params, completion, twin, target):
                raise Different(f"{here}:\n{_shown(completion)}\nbut alone and plainly:\n{_shown(twin)}")
            outcome.near_ties += 1
        elif not _same_logprobs(completion, twin, len(prompts[number])):
            raise Different(f"{here}:\n{completion.logprobs}\nbut alone and plainly\n{twin.logprobs}")
        elif case.seed % 5 == 0 and case.way not in ROUNDED:
            _check_transformers(case, prompts[number], case.asks[number].params, twin, models, here)
        outcome.requests += 1
        outcome.tokens += len(completion.token_ids)
        outcome.steps += len(completion.stats.committed)
        outcome.committed += sum(completion.stats.committed)
        outcome.remembered += completion.stats.remembered
    return outcome


def _shown(completion: Completion) -> str:
    error = f", {completion.error}" if completion.error else ""
    return f"{completion.token_ids} {completion.finish_reason} {completion.text!r}{error}"


def _differs(completion: Completion, twin: Completion, ask: Ask) -> bool:
    if completion.finish_reason == "cancelled" and ask.cancel:
        return completion.token_ids != twin.token_ids[: len(completion.token_ids)]
    whole, expected = ((c.token_ids, c.finish_reason, c.text) for c in (completion, twin))
    return whole != expected or len(completion.drafted) != len(completion.token_ids)


def _same_logprobs(completion: Completion, twin: Completion, prompt: int) -> bool:
    """Return whether the log probabilities of output and prompt agree, as far as a cancelled request has them."""
    pairs: list[tuple[TokenLogprob | None, TokenLogprob | None]] = []
    for ours, theirs, tokens in (
        (completion.logprobs, twin.logprobs, len(completion.token_ids)),
        (completion.prompt_logprobs, twin.prompt_logprobs, prompt if completion.token_ids else 0),
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


def _check_rules(completion: Completion, ask: Ask, target: Target, here: str) -> None:
    """Check that a sampled completion ends where it must, and for the right reason."""
    params, ids = ask.params, completion.token_ids
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_token_ids))
    early = any(token in stops for token in ids[:-1])
    sound = {
        "length": len(ids) == params.max_new_tokens and stops.isdisjoint(ids[-1:]),
        "stop": bool(params.stop) or not stops.isdisjoint(ids[-1:]),
        "cancelled": ask.cancel,
    }
    if early or len(ids) > params.max_new_tokens or not sound.get(completion.finish_reason, False):
        raise Different(f"{here}: a completion that ends wrongly:\n{_shown(completion)}")


def _near_tie(
    prompt: Sequence[int], params: SamplingParams, completion: Completion, twin: Completion, target: Target
) -> bool:
    """Return whether rounding decides the first different token: noise of `NEAR` on the logits gives either."""
    pairs = enumerate(zip(completion.token_ids, twin.token_ids, strict=False))
    place = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
    if place is None or completion.error or twin.error:
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
    return {completion.token_ids[place], twin.token_ids[place]} <= reached


def _check_transformers(
    case: Case, prompt: list[int], params: SamplingParams, twin: Completion, models: Models, here: str
) -> None:
    """Check that a greedy completion without extras equals `generate` of transformers."""
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
