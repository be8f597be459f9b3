"""Refilled slots, as a plug-in of two rooms: their training, and the layout that is written."""

from benchmarks.trials.refill import DRAFTER, VARIANT

__all__ = ["DRAFTER", "VARIANT"]
