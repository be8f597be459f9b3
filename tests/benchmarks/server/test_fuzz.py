"""Fuzzed requests, made from the API's document by a seed."""

import json
from random import Random

from benchmarks.server.fuzz import Maker

DOCUMENT = {
    "paths": {
        "/v1/things": {
            "get": {},
            "post": {
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}}
            },
        }
    },
    "components": {
        "schemas": {
            "Thing": {
                "type": "object",
                "required": ["model", "kind", "count"],
                "properties": {
                    "model": {"type": "string"},
                    "kind": {"enum": ["a", "b"]},
                    "count": {"anyOf": [{"type": "integer", "minimum": 2, "maximum": 9}, {"type": "null"}]},
                    "more": {"type": "array", "items": {"$ref": "#/components/schemas/Thing"}},
                },
            }
        }
    },
}


def test_values_are_of_the_schema() -> None:
    maker = Maker(DOCUMENT)
    assert [path for path, _ in maker.routes] == ["/v1/things"]
    random = Random(1)
    values = [maker.value({"$ref": "#/components/schemas/Thing"}, random, 0) for _ in range(200)]
    assert {value["kind"] for value in values} == {"a", "b"} and {value["count"] for value in values} > {2, 5, 9, None}
    assert any(value.get("more") for value in values) and not all("more" in value for value in values)


def test_cases_are_the_same_again_and_many() -> None:
    maker = Maker(DOCUMENT)
    cases = [maker.case(3, number) for number in range(400)]
    assert cases == [Maker(DOCUMENT).case(3, number) for number in range(400)]
    assert len({case.body for case in cases}) > 200 and any(case.headers for case in cases)
    assert cases[0] != maker.case(4, 0)

    def is_json(body: bytes) -> bool:
        try:
            json.loads(body)
        except ValueError:
            return False
        return True

    assert 0.9 < sum(is_json(case.body) for case in cases) / len(cases) < 1
