"""Statistics of decoding. Each is defined here and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

LOOP_SIZE, LOOP_TIMES = 8, 4


@dataclass
class Stats:
    """Counts and times of one request.

    Prefill, which yields the first token, is no step; it counts in `prefill_seconds` only.

    Attributes:
        committed: Tokens committed by each step, bonus included, after cutting at a stop token or the length limit.
        drafted: Draft tokens on the longest path of each step's proposal.
        accepted_prediction, rejected_prediction: Draft tokens of the request's prediction, accepted or rejected.
        remembered: Prompt tokens that were copied from another sequence instead of being read.
        prefill_seconds: Time of the forwards over the prompt, which other prompts may share.
        read_seconds: The request's share of that time. The shares of a batch sum to its prefill time.
        draft_seconds, verify_seconds: Time of all steps in the drafter (propose and observe) and in the target's
            forward. Each sequence of a batch counts the whole time. It is the host's time: a GPU's work counts where
            the host waits for it. `blockdraft bench --profile` waits after each part.
        total_seconds: From the first token to the last.
    """

    committed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted_prediction: int = 0
    rejected_prediction: int = 0
    remembered: int = 0
    prefill_seconds: float = 0.0
    read_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Mean tokens committed per target forward, bonus included; 1 without drafting."""
        return sum(self.committed) / len(self.committed) if self.committed else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """S_i for i = 1, 2, ...: share of steps whose first i draft tokens were accepted. tau = 1 + sum S_i."""
        count = max(self.drafted, default=0)
        return [sum(c > i for c in self.committed) / len(self.committed) for i in range(1, count + 1)]

    @property
    def host_seconds(self) -> float:
        """Time of the steps outside the drafter and the target: verification, commits, bookkeeping."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first token; 0 if there are none."""
        return sum(self.committed) / self.total_seconds if self.total_seconds else 0.0


def merge(stats: Iterable[Stats]) -> Stats:
    """Return the statistics of several requests as if they were one: their steps in a row, their times added up.

    Each sequence of a batch counts the whole time, so the time of a batch counts once per sequence.
    """
    merged = Stats()
    for part in stats:
        for field_ in fields(Stats):
            setattr(merged, field_.name, getattr(merged, field_.name) + getattr(part, field_.name))
    return merged


def mean_tau(stats: list[Stats]) -> float:
    """Return tau over several requests: all committed tokens over all steps."""
    return merge(stats).tau


def loops(token_ids: Sequence[int], size: int = LOOP_SIZE, times: int = LOOP_TIMES) -> bool:
    """Return whether an output is repetitive: some `size` tokens occur `times` times or more, overlaps included.

    Such outputs are easy to predict, so they say little about a drafter.
    """
    runs = Counter(tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))
    return max(runs.values(), default=0) >= times
