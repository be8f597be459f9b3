"""Whether drafting changes what is said, tried before anyone asks."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

from blockdraft.engine import Engine
from blockdraft.evaluation.prompts import SAMPLES
from blockdraft.types import RequestDrafting, SamplingParams

LENGTH = 64  # tokens of an answer at most
ROWS, TREE_BUDGET = 4, 16  # of the engine that is tried; guesses, where the server itself chooses their number


def answers_differ(engine: Engine, count: int) -> int:
    """How many of so many greedy answers are not the same with drafting and without. Each cycle drafts, also where the
    engine itself would pause.

    Raises:
        NumbersError, RequestError: Decoding failed.
    """
    room = engine.target.max_context // 2
    params = SamplingParams(max_new_tokens=max(1, min(LENGTH, room)))
    prompts = [f"{text} ({number})" for number, text in enumerate(islice(cycle(SAMPLES.prompts), count))]
    size, budget = engine.drafting.block_size, engine.drafting.tree_budget
    always = replace(
        engine.drafting,
        block_size=None if size == "auto" else size,
        tree_budget=TREE_BUDGET if budget == "auto" else budget,
    )
    with Engine(engine.target, engine.drafter, ROWS, always) as drafting:
        drafted, plain = (
            [drafting.submit(prompt, params, drafting=RequestDrafting(enabled)) for prompt in prompts]
            for enabled in (True, False)
        )
        return sum(
            one.result().checked().token_ids != other.result().checked().token_ids
            for one, other in zip(drafted, plain, strict=True)
        )
