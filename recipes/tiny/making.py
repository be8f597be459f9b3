"""What making the pair took, and whether figures belong to the weights at hand.

`train_target.py` notes its steps here; `blockdraft train` and the answers have logs of their own.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from blockdraft_train.progress import read_log, run_folder

NAME = "making.jsonl"  # in the target's folder


class Making:
    """A line of `making.jsonl`: the steps of a stage that this process did, and their seconds.

    Args:
        folder: The target's folder.
        start: Steps of the stage that earlier processes did.
    """

    def __init__(self, folder: Path, stage: str, start: int, tokens_per_step: int) -> None:
        self._path = folder / NAME
        self._before = read_log(self._path)
        self._line = {"stage": stage, "from": start, "tokens_per_step": tokens_per_step}
        self._began = time.monotonic()

    def note(self, step: int) -> None:
        """Note the number of steps done, after the checkpoint of this step is written."""
        line = {**self._line, "to": step, "seconds": round(time.monotonic() - self._began, 1)}
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(each) + "\n" for each in (*self._before, line)), encoding="utf-8")
        partial.replace(self._path)


@dataclass(frozen=True)
class Took:
    """Steps, tokens and minutes of a stage or drafter.

    Attributes:
        untimed: Steps whose time was not noted; `minutes` leave them out.
    """

    name: str
    steps: int
    tokens: int
    minutes: float
    untimed: int = 0

    def row(self) -> str:
        """Return a row of a Markdown table."""
        without = f" (without {self.untimed:,} steps, which were not timed)" if self.untimed else ""
        return f"| {self.name} | {self.steps:,} | {self.tokens / 1e6:.1f} M | {self.minutes:,.0f}{without} |"


def took_target(folder: Path) -> list[Took]:
    """Return figures by stage, in order. Steps of a repeated stage are summed."""
    found: dict[str, Took] = {}
    done = 0
    for line in read_log(folder / NAME):
        stage, first, last = line["stage"], line["from"], line["to"]
        before = found.get(stage, Took(stage, 0, 0, 0.0))
        done = 0 if stage not in found or first < done else done
        untimed, steps = first - done, last - done
        tokens = steps * line["tokens_per_step"]
        found[stage] = Took(
            stage,
            before.steps + steps,
            before.tokens + tokens,
            before.minutes + line["seconds"] / 60,
            before.untimed + untimed,
        )
        done = last
    return list(found.values())


def took_drafter(drafter: Path) -> Took | None:
    """Return figures from the log of the drafter's run, without evaluations, or None without a log."""
    lines = [line for line in read_log(run_folder(drafter) / "log.jsonl") if "tokens" in line]
    if not lines:
        return None
    seconds = sum(line["tokens"] / line["tokens_per_second"] for line in lines)
    return Took(drafter.name, len(lines), sum(line["tokens"] for line in lines), seconds / 60)


def digest(folder: Path) -> str:
    """Return a hash of a checkpoint's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def answers_kept(files: list[Path]) -> tuple[int, int]:
    """Return the number of responses in these files, and of their tokens."""
    lengths = [len(row["ids"]) for file in files for row in read_log(file) if "ids" in row]
    return len(lengths), sum(lengths)
