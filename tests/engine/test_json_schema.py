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
    ],
)  # fmt: skip
def test_endless_references(schema: Any, endless: set[str]) -> None:
    assert endless_references(schema) == endless
