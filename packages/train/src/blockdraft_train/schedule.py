"""Learning rates over the steps of a run, which may finish early or be extended beyond its end."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from blockdraft.errors import UsageError
from blockdraft_train.recipe import Recipe

WSD_FALL = 0.2  # share of the steps in which the rates of "wsd" fall
FALL = 0.1  # length of the fall after a request to finish, as a share of the steps done
LONGEST_FALL = 100  # steps


def rate(step: int, steps: int, recipe: Recipe) -> float:
    """Return the share of the peak rates at step 0, 1, ..., `steps` - 1.

    Rates rise linearly and then fall by the recipe's schedule.
    """
    rising = recipe.warmup * steps
    if step + 1 < rising:
        return (step + 1) / rising
    begin = max(rising, (1 - WSD_FALL) * steps) if recipe.schedule == "wsd" else rising
    way = min(max(step - begin, 0.0) / max(steps - begin, 1.0), 1.0)
    left = 1 - way if recipe.schedule == "linear" else (1 + math.cos(math.pi * way)) / 2
    return recipe.final + (1 - recipe.final) * left


@dataclass
class Stretch:
    """Steps `begin` to `end` - 1, over which the rates rise and fall once.

    Attributes:
        planned: End that was planned; `end` comes earlier if the run was asked to finish.
        falls_from: Share of the peak rates that the rates fall from after a request to finish; None if the rates follow
            the recipe.
    """

    begin: int
    end: int
    planned: int
    falls_from: float | None = None


class Schedule:
    """Stretches of a run, one after the other. Extending a run adds a stretch.

    Args:
        steps: Number of steps of a new run.
        recipe: Its fields `warmup`, `schedule` and `final` shape the rates.
        saved: What `saved` returned, for a run that is resumed; `steps` is then ignored until `go_on`.
    """

    def __init__(self, steps: int, recipe: Recipe, saved: dict[str, Any] | None = None) -> None:
        self._recipe, self._requested = recipe, steps
        self._stretches = [Stretch(0, steps, steps)]
        if saved is not None:
            self._requested = saved["asked"]
            self._stretches = [Stretch(**stretch) for stretch in saved["stretches"]]

    @property
    def end(self) -> int:
        """Number of steps after which the run ends."""
        return self._stretches[-1].end

    @property
    def finishing(self) -> bool:
        """Whether the run was asked to finish before the last planned step."""
        return self._stretches[-1].falls_from is not None

    def saved(self) -> dict[str, Any]:
        return {"asked": self._requested, "stretches": [asdict(stretch) for stretch in self._stretches]}

    def rate(self, step: int) -> float:
        """Return the share of the peak rates at this step, counted from 0."""
        stretch = next(stretch for stretch in self._stretches if stretch.begin <= step < stretch.end)
        if stretch.falls_from is None:
            return rate(step - stretch.begin, stretch.planned - stretch.begin, self._recipe)
        final = min(self._recipe.final, stretch.falls_from)
        return final + (stretch.falls_from - final) * (stretch.end - step - 1) / (stretch.end - stretch.begin)

    def go_on(self, done: int, steps: int, more: int) -> None:
        """Add a stretch if the run has reached its end and more steps are requested now.

        Args:
            done: Number of steps that are done.
            steps: Number of steps that the recipe requests now.
            more: Steps to add beyond the end; 0 adds none.

        Raises:
            UsageError: The requested number differs from that of the run, which has not reached its end; or fewer steps
                are requested than before.
        """
        if done < self.end:
            added = {stretch.planned - stretch.begin for stretch in self._stretches[1:] if stretch.falls_from is None}
            if steps != self._requested or (more and more not in added):
                raise UsageError(
                    f"The run is at step {done} of {self.end} and another number of steps is requested; let the "
                    "command that began it reach its end first, and then give the larger number."
                )
            return
        if steps < self._requested:
            raise UsageError(
                f"The run has done {done} steps and {steps} are requested now instead of {self._requested}; a run "
                "cannot be shortened. Choose another --out to train for fewer steps."
            )
        to = done + more if more else steps
        if to > done and (more or steps > self._requested):
            self._stretches.append(Stretch(done, to, to))
        self._requested = steps

    def finish(self, done: int) -> None:
        """End the run within a few steps, over which the rates fall to their final share."""
        last = self._stretches[-1]
        if self.finishing or done >= last.end:
            return
        fall = min(max(1, int(FALL * (done - last.begin))), LONGEST_FALL, last.end - done)
        before = self.rate(max(done - 1, last.begin))
        last.end = done
        self._stretches.append(Stretch(done, done + fall, done + fall, before))
