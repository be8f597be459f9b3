"""Where keywords and schemas stand in a JSON schema, and what its references point to."""

from typing import Any

import pytest

from blockdraft.engine.json_schema import References, endless_references, pointer, walk, with_pointers

LEAF = {"type": "integer"}
NAMED_AS_KEYWORDS = {
    "properties": {"$ref": LEAF, "properties": {"type": "object", "properties": {"enum": LEAF}}, "items": True},
    "const": {"properties": {"a": {"$ref": "#"}}},
    "enum": [{"$ref": "#/x"}],
    "default": {"allOf": [LEAF]},
    "dependencies": {"a": ["b"], "c": LEAF},
    "not": {"anyOf": [LEAF, False]},
    "required": ["$ref"],
    "x-own": {"properties": {"a": LEAF}},
}


def test_only_schemas_are_walked() -> None:
    assert {pointer(path) for path, _ in walk(NAMED_AS_KEYWORDS)} == {
        "#",
        "#/properties/%24ref",
        "#/properties/properties",
        "#/properties/properties/properties/enum",
        "#/dependencies/c",
        "#/not",
        "#/not/anyOf/0",
    }


CIRCLE = {"#/$defs/a", "#/$defs/b"}
ROOT: dict[str, Any] = {
    "$id": "http://here/root.json",
    "$defs": {
        "a/b": LEAF,
        "x<y>": LEAF,
        "50%": LEAF,
        "a~b": LEAF,
        "~1": LEAF,
        "/": True,
        "ö": LEAF,
        "named": {"$anchor": "name", **LEAF},
        "other": {"$id": "other.json", "properties": {"z": LEAF}},
    },
    "allOf": [LEAF, {"type": "string"}],
}


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("#", ()),
        ("#/$defs/a~1b", ("$defs", "a/b")),
        ("#/%24defs/x%3Cy%3E", ("$defs", "x<y>")),
        ("#/$defs/x<y>", ("$defs", "x<y>")),
        ("#/$defs/50%", ("$defs", "50%")),
        ("#/$defs/50%25", ("$defs", "50%")),
        ("#/$defs/a~0b", ("$defs", "a~b")),
        ("#/$defs/%C3%B6", ("$defs", "ö")),
        ("#/allOf/1", ("allOf", 1)),
        ("#/$defs/~01", ("$defs", "~1")),
        ("#name", ("$defs", "named")),
        ("other.json", ("$defs", "other")),
        ("http://here/other.json#/properties/z", ("$defs", "other", "properties", "z")),
        ("#/allOf/2", None),
        ("#/allOf/-1", None),
        ("#/nowhere", None),
        ("#nobody", None),
        ("http://there/x", None),
        ("http://[", None),
    ],
)
def test_references(reference: str, path: Any) -> None:
    references = References(ROOT)
    assert references.path(reference) == path
    if path is not None:
        assert References(ROOT).path(pointer(path)) == path  # whatever the names hold
        changed = with_pointers({**ROOT, "$ref": reference}, ("$defs", "tool"))
        assert changed["$ref"] == pointer(("$defs", "tool", *path)) and "$id" not in changed
    else:
        assert references.resolve(reference) is True


NESTED: dict[str, Any] = {
    "$id": "http://here/a/root.json",
    "$defs": {"leaf": LEAF},
    "properties": {
        "inner": {
            "$id": "b/",
            "$defs": {"leaf": True, "anchored": {"$anchor": "name"}, "next": {"$id": "next.json"}},
            "properties": {"x": True},
        },
        "old": {"$id": "#old", "properties": {"y": {"$ref": "#/$defs/leaf"}}},  # an anchor of draft 7
    },
}
INNER = ("properties", "inner", "$defs")


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("#/$defs/leaf", (*INNER, "leaf")),
        ("#name", (*INNER, "anchored")),
        ("next.json", (*INNER, "next")),
        ("#", ("properties", "inner")),
        ("../root.json#/$defs/leaf", ("$defs", "leaf")),
        ("../root.json#old", ("properties", "old")),
        ("#/properties/y", None),
        ("leaf", None),
    ],
)
def test_references_are_relative_to_the_id_around_them(reference: str, path: Any) -> None:
    schema = {**NESTED, "properties": {**NESTED["properties"]}}
    schema["properties"]["inner"] = {**NESTED["properties"]["inner"], "properties": {"x": {"$ref": reference}}}
    changed = with_pointers(schema)["properties"]
    assert changed["inner"]["properties"]["x"]["$ref"] == (reference if path is None else pointer(path))
    assert changed["old"]["properties"]["y"]["$ref"] == pointer(("$defs", "leaf"))


@pytest.mark.parametrize("base", ["urn:example:root", "http://here/root.json#", "root", "http://["])
def test_any_id_of_the_root(base: str) -> None:
    schema = {"$id": base, "$anchor": "top", "$defs": {"a": LEAF}, "items": [{"$ref": "#/$defs/a"}, {"$ref": "#top"}]}
    first, second = with_pointers(schema)["items"]
    assert first == {"$ref": pointer(("$defs", "a"))} and second == {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({"$ref": "#"}, {"#"}),
        ({"allOf": [{"$ref": "#"}]}, {"#"}),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, set()),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"#"}),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"#"}),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, set()),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, set()),  # a number fits
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"#"}),
        ({"type": "array", "items": {"$ref": "#"}}, set()),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, CIRCLE),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {}]}, "b": {"$ref": "#"}}}, set()),
        ({"const": {"$ref": "#"}}, set()),
        ({"anyOf": [{"$ref": "#"}, False]}, {"#"}),
        ({"type": ["array", "object"], "minItems": 1, "items": {"$ref": "#"}}, set()),
        ({"type": [{}], "items": {"$ref": "#"}}, set()),
        ({"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}}, {"#"}),
        ({"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}, "properties": {"a": {}}}, set()),
        ({"type": "object", "minProperties": 2, "additionalProperties": {"$ref": "#"}, "properties": {"a": {}}}, {"#"}),
        ({"type": "object", "minProperties": 2, "patternProperties": {"": {"$ref": "#"}}}, set()),
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, {"#"}),
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}, "properties": {"a": {}}}, set()),
        ({"type": "array", "minItems": 2, "prefixItems": [{}], "items": {"$ref": "#"}}, {"#"}),
        ({"type": "array", "minItems": 1, "prefixItems": [{}], "items": {"$ref": "#"}}, set()),
        ({"type": "array", "contains": {"$ref": "#"}}, {"#"}),
        ({"type": "array", "contains": {"$ref": "#"}, "minContains": 0}, set()),
    ],
)  # fmt: skip
def test_endless_references(schema: Any, endless: set[str]) -> None:
    assert endless_references(schema) == endless
