"""Fixtures of `draft_models.py`."""

from draft_models import target

__all__ = ["target"]
