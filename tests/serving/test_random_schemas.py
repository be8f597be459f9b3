"""Random JSON schemas as formats of responses: no server error, JSON of 64 tokens, and errors that name the keyword.

JSON_SCHEMA_SUITE=FOLDER adds all schemas of the official test suite, which the source archive of jsonschema holds.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from random_schemas import SchemaMaker, check_schema, is_prefix, suite_schemas
from serving_client import Client

SUITE = os.environ.get("JSON_SCHEMA_SUITE")


@pytest.mark.parametrize(
    "text", ["", "{", '{"a', '{"a"', '{"a": ', "[1, ", "[1, -", "tr", '"\\u00', "1.", "1e", "[[], {"]
)
def test_beginnings_of_json(text: str) -> None:
    assert is_prefix(text)


@pytest.mark.parametrize("text", ["}", "[,", '{"a" 1', "{1", "[1 2", "truth", '{"a": 1,, ', "1 2", "01", '"\n'])
def test_no_beginnings_of_json(text: str) -> None:
    assert not is_prefix(text)


def counted(client: Client, seeds: range) -> Counter[int]:
    return Counter(check_schema(client, SchemaMaker(seed).root(), strict=seed % 2 == 0) for seed in seeds)


def test_random_schemas(shared_client: Client) -> None:
    statuses = counted(shared_client, range(120))
    assert statuses[200] > 30 and statuses[400] > 5  # or the schemas would test little


@pytest.mark.long
def test_two_thousand_random_schemas(shared_client: Client) -> None:
    statuses = counted(shared_client, range(1000, 3000))
    print(dict(statuses))
    assert statuses[200] > 500


@pytest.mark.long
@pytest.mark.skipif(SUITE is None, reason="JSON_SCHEMA_SUITE names the official test suite")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("draft", ["draft4", "draft6", "draft7", "draft2019-09", "draft2020-12"])
def test_the_official_suite(shared_client: Client, draft: str, strict: bool) -> None:
    assert SUITE is not None
    schemas = list(suite_schemas(Path(SUITE, draft)))
    statuses = Counter(check_schema(shared_client, schema, strict) for schema in schemas)
    print(draft, strict, len(schemas), dict(statuses))
    assert statuses[200] > len(schemas) / 3
