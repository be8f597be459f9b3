"""The JSON types and values that a JSON schema allows."""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
Types: TypeAlias = frozenset[str]
ALL_TYPES: Types = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def allowed_types(schema: Any, root: Schema, resolved: dict[str, Types] | None = None) -> Types:
    """Return the JSON types that a schema allows.

    Args:
        root: Schema to which references point.
        resolved: Types of the references resolved so far.
    """
    resolved = {} if resolved is None else resolved
    if not isinstance(schema, dict):
        return ALL_TYPES
    types = ALL_TYPES
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types &= {name for name in named if isinstance(name, str)} | ({"integer"} if "number" in named else set())
    if (values := _values(schema)) is not None:
        types &= frozenset().union(*map(types_of_value, values))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types &= frozenset().union(*(allowed_types(option, root, resolved) for option in schema[key]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= allowed_types(part, root, resolved)
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in resolved:
            resolved[reference] = ALL_TYPES  # while it is resolved, so that recursion ends
            resolved[reference] = allowed_types(_resolve(reference, root), root, resolved)
        types &= resolved[reference]
    return types


def types_of_value(value: Any) -> Types:
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int | float):
        return frozenset(("integer", "number") if value == int(value) else ("number",))
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return frozenset((next((name for kind, name in kinds if isinstance(value, kind)), "null"),))


def listed_values(schema: Any, root: Schema) -> list[Any] | None:
    """Return the values that a schema lists, or None if it lists none."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = _resolve(schema["$ref"], root)
    return (_values(schema) or None) if isinstance(schema, dict) else None


def _values(schema: Schema) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _resolve(reference: str, root: Schema) -> Any:
    """Return the part of a schema to which a local reference points, or True, which allows any value."""
    value: Any = root
    for key in reference.split("/")[1:] if reference.startswith("#") else ("",):
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return True if value is None else value
