"""Fixtures of `draft_models.py` and `training_fixtures.py`."""

from draft_models import target
from training_fixtures import answered, parity

__all__ = ["answered", "parity", "target"]
