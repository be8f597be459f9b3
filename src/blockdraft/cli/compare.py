"""The same prompt with and without the drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from blockdraft.engine import Completion, Engine, Stats
from blockdraft.engine.adaptive import stored_costs
from blockdraft.types import SamplingParams

RUNS = 3
WARM_UP_TOKENS = 8
# Shares of plain decoding's speed below which drafting is called slower: measured in turns, and against stored times of
# another day.
SLOWER, SLOWER_THAN_STORED = 0.95, 0.85


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
    plain_engine = Engine(engine.target)
    methods = (engine, plain_engine)
    for method in methods:
        method.generate([prompt], replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens)))
    runs = [[method.generate([prompt], params)[0].checked() for method in methods] for _ in range(RUNS)]
    drafted, plain = (sorted(column, key=_speed)[RUNS // 2] for column in zip(*runs, strict=True))
    answers = [run.token_ids for pair in runs for run in pair]
    columns = enumerate(zip_longest(*answers))
    return Comparison(drafted, plain, next((i for i, tokens in columns if len(set(tokens)) > 1), None))


def slower_note(engine: Engine, stats: Stats, measured: Comparison | None) -> str | None:
    """What to say of drafting that is slower than plain decoding, as measured or, for a fixed size, as the stored times
    of cycles tell; None where it is not, or where nothing is known."""
    if engine.drafter.block_size == 1 or not stats.committed:
        return None
    if measured is not None:
        ratio = measured.speedup
        slower = ratio is not None and ratio < SLOWER
        said = f"speed-up {ratio:.2f}" if slower else ""
    else:
        # With "auto" whoever plans the cycles sees to it.
        known = (
            None if engine.controller.automatic else stored_costs.load(stored_costs.path(engine.target, engine.drafter))
        )
        plain = 0.0 if known is None else 1 / known.plain_cycle(1)
        slower = stats.tokens_per_second < SLOWER_THAN_STORED * plain
        said = f"{stats.tokens_per_second:.0f} tokens/s, and {plain:.0f} by the stored times of plain cycles"
    if not slower:
        return None
    auto = "" if engine.controller.automatic else ", or --block-size auto, which drafts only as far as it pays"
    return f"Drafting is slower here than plain decoding ({said}); use --drafter none{auto}."


def _speed(run: Completion) -> float:
    return run.stats.tokens_per_second
