"""Combinations of parameters, of which a quicker round takes a part."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest

SLOW, LONG = (pytest.mark.slow,), (pytest.mark.slow, pytest.mark.long)


def thinned(*lists: Iterable[Any], keep: int, marks: Collection[pytest.MarkDecorator] = SLOW) -> list[Any]:
    """Return all combinations of the lists' entries, as `pytest.mark.parametrize` takes them.

    One of `keep` has no marks: those whose indices in the lists add up to a multiple of `keep`. So of two lists every
    entry occurs among them, and of three lists every two entries meet, if all have at least `keep` entries.
    """
    params = []
    for combination in product(*map(enumerate, lists)):
        indices, entries = zip(*combination, strict=True)
        params.append(pytest.param(*entries, marks=() if sum(indices) % keep == 0 else marks))
    return params
