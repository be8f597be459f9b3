"""Settings of the server that depend on the target."""

from __future__ import annotations

from typing import Any

import pytest

from blockdraft.serving.settings import ServeSettings


@pytest.mark.parametrize(
    "given, context, cpu, expected",
    [
        ({}, 32_768, True, (131_072, 131_072)),
        ({}, 8_192, True, (65_536, 32_768)),
        ({}, 512, True, (None, 2_048)),  # a full batch takes less
        ({}, 32_768, False, (None, 131_072)),
        ({"cache_tokens": 5_000, "prefix_tokens": 0}, 32_768, True, (5_000, 0)),
        ({"prefix_tokens": 200_000}, 32_768, True, (200_000, 200_000)),
        ({"max_batch_size": 1, "prefix_tokens": 0}, 8_192, True, (None, 0)),
    ],
)
def test_memory_of_a_laptop(given: dict[str, Any], context: int, cpu: bool, expected: tuple[int | None, int]) -> None:
    assert ServeSettings(**given).memory_tokens(context, cpu) == expected
