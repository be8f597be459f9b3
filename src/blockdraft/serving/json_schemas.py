"""JSON schemas: those of a request's tools, and the types and values that a schema allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from blockdraft.engine.json_schema import References, map_parts, walk
from blockdraft.errors import UsageError

Schema: TypeAlias = dict[str, Any]
Tools: TypeAlias = Mapping[str, Schema]  # JSON schemas of the tools' arguments, by the tools' names
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
            resolved[reference] = allowed_types(References(root).resolve(reference), root, resolved)
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
    seen, references = set[str](), References(root)
    while isinstance(schema, dict) and isinstance(name := schema.get("$ref"), str) and name not in seen:
        seen.add(name)
        schema = references.resolve(name)
    return (_values(schema) or None) if isinstance(schema, dict) else None


def _values(schema: Schema) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def tool_schemas(tools: Sequence[dict[str, Any]]) -> Tools:
    """Map the names of OpenAI's function tools to the schemas of their arguments.

    Raises:
        UsageError: A tool has no name or an invalid schema, or two have the same name.
    """
    schemas = dict[str, dict[str, Any]]()
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise UsageError(f"tools holds {str(tool)[:80]}; every tool needs a function with a name.")
        if name in schemas:
            raise UsageError(f"tools holds {name} twice; give every tool a name of its own.")
        schemas[name] = _check_schema(name, function.get("parameters") or {})
    return schemas


def _check_schema(tool: str, schema: Any) -> dict[str, Any]:
    """Check the schema of a tool's arguments and return it without keys that are null, which count as absent."""
    kind = schema.get("type") or "object" if isinstance(schema, dict) else None
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise UsageError(
            f'tools holds parameters of {tool} that are not the JSON schema of an object; give one of type "object".'
        )
    for path, part in walk(schema):
        place = "".join(f" of {key}" for key in reversed(path))
        properties, required = part.get("properties"), part.get("required")
        if not isinstance(properties, dict | None):
            raise UsageError(
                f'tools holds parameters of {tool} whose "properties"{place} are not an object; map names to schemas.'
            )
        if required is not None and not _is_names(required):
            raise UsageError(
                f'tools holds parameters of {tool} whose "required"{place} is not a list of names; list the names.'
            )
    tidied: dict[str, Any] = _tidy(schema)
    return tidied


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _tidy(schema: Any) -> Any:
    """Return a schema as its author meant it.

    Keywords that are null count as absent. A null schema, and a required name without a schema, allow any value.
    """
    if schema is None:
        return True
    if not isinstance(schema, dict):
        return schema
    tidied = {key: value for key, value in schema.items() if value is not None or key in ("const", "default")}
    return _with_required(map_parts(tidied, _tidy))


def _with_required(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with a schema for each required name, unless it has one for all other names."""
    properties, required = schema.get("properties", {}), schema.get("required")
    is_open = schema.get("additionalProperties", False) is not False or schema.get("patternProperties")
    if is_open or not isinstance(properties, dict) or not _is_names(required) or not required:
        return schema
    return {**schema, "properties": properties | {name: True for name in required if name not in properties}}


# A schema with one of these keys says itself which properties it allows, or leaves it to its parts.
OPEN_KEYS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
# Keywords whose schemas are of values inside of the value, and those whose schemas are of the value itself.
VALUE_KEYS = {"properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems"}
VALUE_KEYS |= {"$defs", "definitions"}
OPTION_KEYS = {"anyOf", "oneOf", "allOf"}


def close(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that it names, unless it says otherwise.

    By the standard, objects may have any other property, and a model that is forced to write JSON may never stop
    adding them. Schemas that merge objects, by `allOf` or beside `$ref`, are returned as they are, since each part
    names some of the properties.
    """
    return schema if any(_merges(part) for _, part in walk(schema)) else _close(schema)


def _merges(schema: Schema) -> bool:
    parts = schema.get("allOf")
    merged = isinstance(parts, list) and len(parts) + ("properties" in schema) > 1
    return merged or {"$ref", "properties"} <= set(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    named = isinstance(schema.get("properties"), dict)
    keys = VALUE_KEYS if named else VALUE_KEYS | OPTION_KEYS
    closed = {key: map_parts({key: value}, _close)[key] if key in keys else value for key, value in schema.items()}
    if not named or any(schema.get(key) is not None for key in OPEN_KEYS):
        return closed
    return {**_with_required(closed), "additionalProperties": False}
