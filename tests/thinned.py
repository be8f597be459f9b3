"""Combinations of parameters of which a quicker round takes a part."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(*lists: Iterable[Any], keep: int, mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """All combinations of the lists' entries, as `pytest.mark.parametrize` takes them.

    One of `keep` has no mark: those whose places in the lists add up to a multiple of `keep`. So of two lists every
    entry occurs among them, and of three lists every two entries meet, if all have at least `keep` entries.
    """
    combinations = product(*(enumerate(each) for each in lists))
    found = []
    for combination in combinations:
        places, entries = zip(*combination, strict=True)
        found.append(pytest.param(*entries, marks=() if sum(places) % keep == 0 else mark))
    return found
