"""Fixtures of `draft_models.py` and `training_fixtures.py`."""

from draft_models import target, tiny_block_dir, tiny_combination, tiny_lm_dir
from training_fixtures import answered, parity, with_pictures, without_pictures

__all__ = [
    "answered",
    "parity",
    "target",
    "tiny_block_dir",
    "tiny_combination",
    "tiny_lm_dir",
    "with_pictures",
    "without_pictures",
]
