"""How many steps a run has and how its rates go, also where it is told to finish early or goes on behind its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.training.optimizers import rate
from blockdraft.training.recipe import Recipe

FALL = 0.1  # steps of the fall to the end after a run was told to finish, over the steps that were done
LONGEST_FALL = 100


@dataclass
class Stretch:
    """Steps `begin` to `end` - 1.

    Attributes:
        planned: Where it was to end; less was done if the run was told to finish.
        falls_from: In such a finish the share of the peak rates that falls to the end; None follows the recipe.
    """

    begin: int
    end: int
    planned: int
    falls_from: float | None = None


class Schedule:
    """The stretches of a run, one behind the other. In each the rates rise and fall as the recipe says.

    Args:
        steps: Of a new run.
        recipe: Its warm-up, schedule and final share.
        saved: What `saved` gave; then `steps` is what the recipe asks for now.
    """

    def __init__(self, steps: int, recipe: Recipe, saved: dict[str, Any] | None = None) -> None:
        self._recipe, self._asked = recipe, steps
        self._stretches = [Stretch(0, steps, steps)]
        if saved is not None:
            self._asked = saved["asked"]
            self._stretches = [Stretch(**one) for one in saved["stretches"]]

    @property
    def end(self) -> int:
        """The step behind the last one."""
        return self._stretches[-1].end

    @property
    def finishing(self) -> bool:
        """Whether the run was told to finish before the steps of its last stretch were done."""
        return self._stretches[-1].falls_from is not None

    def saved(self) -> dict[str, Any]:
        return {"asked": self._asked, "stretches": [asdict(one) for one in self._stretches]}

    def rate(self, step: int) -> float:
        """The share of the peak rates at this step, counted from 0."""
        one = next(one for one in self._stretches if one.begin <= step < one.end)
        if one.falls_from is None:
            return rate(step - one.begin, one.planned - one.begin, self._recipe)
        final = min(self._recipe.final, one.falls_from)
        return final + (one.falls_from - final) * (one.end - step - 1) / (one.end - one.begin)

    def go_on(self, done: int, steps: int, more: int) -> None:
        """Add a stretch behind the last one if the run has reached its end and more is asked for.

        Args:
            done: Steps that are done.
            steps: What the recipe asks for now.
            more: Steps to add besides; 0 adds none.

        Raises:
            ValueError: Another number is asked for and the run has not reached its end.
        """
        if done < self.end:
            added = {one.planned - one.begin for one in self._stretches[1:] if one.falls_from is None}
            if steps != self._asked or (more and more not in added):
                raise UsageError(
                    f"The run is at step {done} of {self.end} and another number of steps is asked for; let the "
                    "command that began it come to its end, and then give the larger number."
                )
            return
        if steps < self._asked:
            raise UsageError(
                f"The run has done {done} steps and {steps} are asked for now instead of {self._asked}; a run can only "
                "go on. Choose another --out to train less."
            )
        to = done + more if more else steps
        if to > done and (more or steps > self._asked):
            self._stretches.append(Stretch(done, to, to))
        self._asked = steps

    def finish(self, done: int) -> None:
        """Let the rates fall to the end within a few steps from here."""
        last = self._stretches[-1]
        if self.finishing or done >= last.end:
            return
        fall = min(max(1, int(FALL * (done - last.begin))), LONGEST_FALL, last.end - done)
        before = self.rate(max(done - 1, last.begin))
        last.end = done
        self._stretches.append(Stretch(done, done + fall, done + fall, before))
