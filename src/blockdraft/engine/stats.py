"""Statistics of decoding, each defined here and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LOOP_SIZE, LOOP_TIMES = 8, 4


@dataclass
class Stats:
    """Counts and times of one request.

    The forward over the prompt, which yields the first token, is no cycle; it counts in `prefill_seconds` only.

    Attributes:
        committed: Tokens committed by each cycle, bonus included, after cutting at a stop token or the length limit.
        drafted: Guesses on the longest path of each cycle's proposal.
        remembered: Tokens of the prompt that were copied from the cache of another request instead of being read.
        prefill_seconds: Time of the forwards over its prompt, which other prompts may share.
        read_seconds: Its share of that time: those of a batch sum to the time in which prompts were read.
        draft_seconds, verify_seconds: Time of all cycles in the drafter (propose and observe) and in the target's
            forward; each row of a batch counts the whole time. It is the host's time: work of a GPU counts where the
            host waits for it. `blockdraft bench --profile` waits after each part.
        total_seconds: From the first token to the last.
    """

    committed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
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
        """S_i for i = 1, 2, ...: share of the cycles in which the first i guesses were accepted. tau = 1 + sum S_i."""
        count = max(self.drafted, default=0)
        return [sum(c > i for c in self.committed) / len(self.committed) for i in range(1, count + 1)]

    @property
    def host_seconds(self) -> float:
        """Time of the cycles outside the drafter and the target: choosing, copying, bookkeeping."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one a second; 0 if there are none."""
        return sum(self.committed) / self.total_seconds if self.total_seconds else 0.0


def merge(stats: Iterable[Stats]) -> Stats:
    """Statistics of several requests as if they were one: their cycles in a row, their times added up.

    Each row of a batch counts the whole time, so the time of a batch counts once for each of its rows.
    """
    merged = Stats()
    for one in stats:
        merged.committed += one.committed
        merged.drafted += one.drafted
        merged.remembered += one.remembered
        merged.prefill_seconds += one.prefill_seconds
        merged.read_seconds += one.read_seconds
        merged.draft_seconds += one.draft_seconds
        merged.verify_seconds += one.verify_seconds
        merged.total_seconds += one.total_seconds
    return merged


def mean_tau(stats: list[Stats]) -> float:
    """tau over several requests: all committed tokens over all cycles."""
    return merge(stats).tau


def loops(token_ids: Sequence[int], size: int = LOOP_SIZE, times: int = LOOP_TIMES) -> bool:
    """Whether some sequence of `size` tokens occurs `times` times or more, overlapping ones included.

    Such answers are easy to guess, so they say little about a drafter.
    """
    runs = Counter(tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))
    return max(runs.values(), default=0) >= times
