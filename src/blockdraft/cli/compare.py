"""The same prompt with and without the drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from blockdraft.drafters import load_drafter
from blockdraft.engine import Completion, Engine
from blockdraft.types import SamplingParams

RUNS = 3
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    drafted, plain: Of each method the run of median speed.
    first_difference: Index of the first token that is not the same in all runs; None where all are identical.
    """

    drafted: Completion
    plain: Completion
    first_difference: int | None

    @property
    def speedup(self) -> float | None:
        """Ratio of the tokens per second; None for an answer of one token, which takes no cycle."""
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain else None


def compare_with_plain(engine: Engine, prompt: str, params: SamplingParams) -> Comparison:
    """Decode a prompt with the engine and plainly, `RUNS` times in turns after a short warm-up.

    Args:
        params: With a seed, unless greedy; otherwise the runs differ.
    """
    plain_engine = Engine(engine.target, load_drafter("none", target=engine.target))
    methods = (engine, plain_engine)
    for method in methods:
        method.generate([prompt], replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens)))
    runs = [[method.generate([prompt], params)[0].checked() for method in methods] for _ in range(RUNS)]
    drafted, plain = (sorted(column, key=_speed)[RUNS // 2] for column in zip(*runs, strict=True))
    answers = [run.token_ids for pair in runs for run in pair]
    columns = enumerate(zip_longest(*answers))
    return Comparison(drafted, plain, next((i for i, tokens in columns if len(set(tokens)) > 1), None))


def _speed(run: Completion) -> float:
    return run.stats.tokens_per_second
