"""JSON schemas as trees: where their subschemas stand, and what their references point to.

A property may have any name, such as "$ref" or "properties". So keywords are read only where a schema stands
(JSON Schema 2020-12, Core, sections 8 to 11; `definitions`, `dependencies` and `additionalItems` are of draft 7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urljoin

Path: TypeAlias = "tuple[str | int, ...]"  # keys and indices from a schema to one inside of it
# Keywords whose value maps names to schemas, is a list of schemas, or is a schema.
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
LISTED = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
SINGLE = frozenset(
    ("items", "additionalItems", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "contains")
    + ("propertyNames", "contentSchema", "not", "if", "then", "else")
)


def parts(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas right inside a schema, each with its path."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in NAMED and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())
        elif key in LISTED and isinstance(value, list):
            yield from (((key, index), part) for index, part in enumerate(value))
        elif key in SINGLE:
            yield (key,), value


def walk(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a schema and all schemas inside of it that are objects, each with its path."""
    stack: list[tuple[Path, Any]] = [((), schema)]
    while stack:
        path, schema = stack.pop()
        if isinstance(schema, dict):
            yield path, schema
            stack += [((*path, *inner), part) for inner, part in parts(schema)]


def map_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with each schema right inside of it changed by a function."""
    result = dict(schema)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            result[key] = {name: change(part) for name, part in value.items()}
        elif key in LISTED and isinstance(value, list):
            result[key] = [change(part) for part in value]
        elif key in SINGLE:
            result[key] = change(value)
    return result


def pointer(path: Path) -> str:
    """Return a path as the fragment of a URI (RFC 6901, section 6)."""
    keys = (str(key).replace("~", "~0").replace("/", "~1") for key in path)
    return "#" + "".join("/" + quote(key, safe="~") for key in keys)


class References:
    """The references of a schema: pointers such as "#/$defs/a", anchors such as "#a", and ids.

    Args:
        root: The schema to which pointers are relative.
    """

    def __init__(self, root: Any) -> None:
        self._root = root

    @cached_property
    def _named(self) -> dict[str, Path]:
        """Paths of the schemas that have an anchor or an id."""
        named, base = dict[str, Path](), self._id(self._root)
        for path, schema in walk(self._root):
            anchor = schema.get("$anchor")
            for text in (f"#{anchor}" if isinstance(anchor, str) else "", self._id(schema)):
                with suppress(ValueError):  # no URI
                    named.setdefault(urljoin(base, text), path)
        return named

    @staticmethod
    def _id(schema: Any) -> str:
        value = schema.get("$id") if isinstance(schema, dict) else None
        return value if isinstance(value, str) else ""

    def path(self, reference: str) -> Path | None:
        """Return the path to which a reference points, or None if that is nothing in the schema."""
        document, _, fragment = reference.partition("#")
        try:
            start = self._named.get(urljoin(self._id(self._root), document)) if document else ()
            if fragment and not fragment.startswith("/"):
                return self._named.get(urljoin(self._id(self._root), reference))
        except ValueError:  # no URI
            return None
        if start is None:
            return None
        names = fragment.split("/")[1:]
        decoded = self._follow(start, [unquote(name) for name in names])
        return self._follow(start, names) if decoded is None else decoded  # some write "%" without encoding it

    def resolve(self, reference: str) -> Any:
        """Return the schema to which a reference points, or True, which allows any value, if there is none."""
        path = self.path(reference)
        return True if path is None else self.at(path)

    def at(self, path: Path) -> Any:
        value = self._root
        for key in path:
            value = value[key]
        return value

    def _follow(self, start: Path, names: list[str]) -> Path | None:
        path, value = list(start), self.at(start)
        for name in names:
            key: str | int = name.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isascii() and name.isdecimal():
                key = int(name[:9])
            if not (key in value if isinstance(value, dict) else isinstance(value, list) and key in range(len(value))):
                return None
            path.append(key)
            value = value[key]
        return tuple(path)


def with_pointers(root: Any, prefix: Path = ()) -> Any:
    """Return a schema whose references are all pointers, and which names no ids and anchors.

    References that point to nothing stay as they are.

    Args:
        prefix: Path of the schema in the document that it will be part of.
    """
    references = References(root)

    def change(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        result = {key: value for key, value in schema.items() if key not in ("$id", "$anchor")}
        if isinstance(reference := schema.get("$ref"), str):
            path = references.path(reference)
            result["$ref"] = reference if path is None else pointer((*prefix, *path))
        return map_parts(result, change)

    return change(root)


def endless_references(root: Any) -> set[str]:
    """Return the references to schemas of which no value is finite, such as one that refers to itself."""
    references = References(root)
    names = {schema["$ref"] for _, schema in walk(root) if isinstance(schema.get("$ref"), str)}
    ending = set[str]()  # references known to have a finite value
    pending = set[str]()

    def ends(schema: Any) -> bool:
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return True
        if isinstance(name := schema.get("$ref"), str) and not reference_ends(name):
            return False
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            if isinstance(options, list) and options and not any(map(ends, options)):
                return False
        needed = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
        kinds = schema.get("type", ["array", "object"])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if kinds == ["object"] and isinstance(properties := schema.get("properties"), dict):
            required = schema.get("required")
            known = required if isinstance(required, list) else []
            needed += [properties[name] for name in known if isinstance(name, str) and name in properties]
        if kinds == ["array"] and isinstance(least := schema.get("minItems"), int | float) and least > 0:
            first = schema.get("prefixItems")
            needed += first[: int(min(least, len(first)))] if isinstance(first, list) else [schema.get("items", True)]
        return all(map(ends, needed))

    def reference_ends(name: str) -> bool:
        if name not in ending and name not in pending:
            pending.add(name)
            if ends(references.resolve(name)):
                ending.add(name)
        return name in ending

    known = -1
    while known < len(ending):  # a reference that was pending may end by now
        known = len(ending)
        pending.clear()
        for name in names:
            reference_ends(name)
    return names - ending
