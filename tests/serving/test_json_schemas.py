"""Schemas of tools and outputs, whose properties may have the names of keywords."""

from typing import Any

import pytest

from blockdraft.serving.json_schemas import allowed_types, close, listed_values, tool_schemas

NAMES = ["$ref", "properties", "allOf", "anyOf", "type", "required", "$defs", "items", "additionalProperties", "enum"]


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_closed_whatever_their_properties_are_called(name: str) -> None:
    leaf = {"type": "object", "properties": {"a": {"type": "integer"}}}
    inner = {"type": "object", "properties": {name: leaf, "properties": leaf, "$ref": leaf}, "required": [name]}
    closed = close({"type": "object", "properties": {"o": inner}, "default": {"properties": {}}})
    assert closed["additionalProperties"] is False and closed["default"] == {"properties": {}}
    assert closed["properties"]["o"]["additionalProperties"] is False
    assert closed["properties"]["o"]["properties"][name] == {**leaf, "additionalProperties": False}


def test_values_are_no_schemas() -> None:
    value = {"type": "object", "properties": {"a": 1}, "required": ["b"]}
    for schema in ({"const": value}, {"enum": [value]}, {"type": "object", "default": value}):
        assert close(schema) == schema


def test_closing_allows_what_is_required() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}
    assert close(schema)["properties"] == {"a": {}, "b": True}
    assert close({**schema, "additionalProperties": {"type": "string"}})["properties"] == {"a": {}}
    assert close({**schema, "additionalProperties": False})["properties"] == {"a": {}}  # wrong, and stays so


def test_objects_that_are_merged_stay_open() -> None:
    for more in ({"allOf": [{"properties": {"b": {}}}]}, {"$ref": "#/$defs/b"}):
        schema = {"properties": {"o": {"properties": {"a": {}}, **more}}, "$defs": {"b": {}}}
        assert close(schema) == schema


def test_tools_are_tidied_at_every_depth() -> None:
    properties = {"a": None, "const": {"const": None}}
    inner = {"type": "object", "description": None, "properties": properties, "required": ["b"]}
    parameters: Any = {"type": "object", "properties": {"o": inner}, "additionalProperties": None}
    [tidied] = tool_schemas([{"function": {"name": "f", "parameters": parameters}}]).values()
    assert tidied == {
        "type": "object",
        "properties": {
            "o": {
                "type": "object",
                "properties": {"a": True, "const": {"const": None}, "b": True},
                "required": ["b"],
            }
        },
    }


def test_references_of_parameters() -> None:
    root = {"properties": {"a": {"enum": ["x", 1]}, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#/properties/b"}}}
    assert listed_values({"$ref": "#/properties/c"}, root) == ["x", 1]
    assert allowed_types({"$ref": "#/properties/c"}, root) == {"string", "integer", "number"}
    assert listed_values({"$ref": "#/properties/d"}, {"properties": {"d": {"$ref": "#/properties/d"}}}) is None
