"""Suffix redrafting, as a plug-in of two rooms: its training, and the layout that is written."""

from benchmarks.trials.redraft import DRAFTER, VARIANT

__all__ = ["DRAFTER", "VARIANT"]
