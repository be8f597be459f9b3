"""Fixtures of `training_fixtures.py`."""

from training_fixtures import answered, parity, with_pictures, without_pictures

__all__ = ["answered", "parity", "with_pictures", "without_pictures"]
