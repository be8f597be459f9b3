"""Events of streams, as text."""

import json

from blockdraft.serving.streaming import data


def test_events_are_one_line_for_every_client() -> None:
    """httpx's `iter_lines`, for one, takes more for the end of a line than the standard does."""
    value = {"text": "a\u2028b\x85c\nd \N{SLEEPING SYMBOL}"}
    [line] = data(value).splitlines()[:-1]
    assert json.loads(line.removeprefix("data: ")) == value
