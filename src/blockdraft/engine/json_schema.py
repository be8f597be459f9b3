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

    A reference is relative to the id of the nearest schema around it that has one.

    Args:
        root: The whole schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root

    @cached_property
    def _named(self) -> dict[str, Path]:
        """Paths of the schemas that have an anchor or an id, by its URI."""
        named = dict[str, Path]()
        stack: list[tuple[Path, str, Any]] = [((), "", self._root)]
        while stack:
            path, base, schema = stack.pop()
            if isinstance(schema, dict):
                base = base_uri(base, schema)
                if isinstance(own := schema.get("$id"), str):
                    _, mark, name = own.rstrip("#").partition("#")  # a name where draft 7 has an anchor
                    named.setdefault(base + mark + name, path)
                if isinstance(anchor := schema.get("$anchor"), str):
                    named.setdefault(f"{base}#{anchor}", path)
                stack += [((*path, *inner), base, part) for inner, part in parts(schema)]
        return named

    def path(self, reference: str, base: str | None = None) -> Path | None:
        """Return the path to which a reference points, or None if that is nothing in the schema.

        Args:
            base: URI to which the reference is relative; None is that of the root.
        """
        base = base_uri("", self._root) if base is None else base
        document, _, fragment = reference.partition("#")
        try:
            uri = urljoin(base, document)
            start = self._named.get(uri, () if uri == base_uri("", self._root) else None)
            if fragment and not fragment.startswith("/"):
                return self._named.get(f"{uri}#{fragment}")
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


def base_uri(base: str, schema: Any) -> str:
    """Return the URI to which references inside of a schema are relative.

    Args:
        base: URI to which the schema's own id is relative.
    """
    own = schema.get("$id") if isinstance(schema, dict) else None
    with suppress(ValueError):  # no URI
        return urljoin(base, own.partition("#")[0]) if isinstance(own, str) else base
    return base


def with_pointers(root: Any, prefix: Path = ()) -> Any:
    """Return a schema whose references are all pointers, and which names no ids and anchors.

    References that point to nothing stay as they are.

    Args:
        prefix: Path of the schema in the document that it will be part of.
    """
    references = References(root)

    def change(schema: Any, base: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        base = base_uri(base, schema)
        result = {key: value for key, value in schema.items() if key not in ("$id", "$anchor")}
        if isinstance(reference := schema.get("$ref"), str):
            path = references.path(reference, base)
            result["$ref"] = reference if path is None else pointer((*prefix, *path))
        return map_parts(result, lambda part: change(part, base))

    return change(root, "")


def endless_references(root: Any) -> set[str]:
    """Return the references to schemas of which no value is finite, such as one that refers to itself.

    Args:
        root: Schema whose references are pointers.
    """
    references = References(root)
    names = {schema["$ref"] for _, schema in walk(root) if isinstance(schema.get("$ref"), str)}
    ending = set[str]()  # references known to have a finite value
    pending = set[str]()

    def ends(schema: Any) -> bool:
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return schema is not False
        if isinstance(name := schema.get("$ref"), str) and not reference_ends(name):
            return False
        if not all(any(map(ends, options)) for key in ("anyOf", "oneOf") if (options := _list(schema, key))):
            return False
        kinds = _list(schema, "type") or [schema.get("type")]
        if not any(kind_ends[kind](schema) if kind in ("array", "object") else True for kind in kinds):
            return False
        return all(map(ends, _list(schema, "allOf")))

    def array_ends(schema: dict[str, Any]) -> bool:
        first, items = _list(schema, "prefixItems"), schema.get("items", True)
        if isinstance(items, list):  # draft 7's name of prefixItems
            first, items = items, schema.get("additionalItems", True)
        least = _count(schema, "minItems", 0)
        if "contains" in schema and _count(schema, "minContains", 1) > 0 and not ends(schema["contains"]):
            return False
        return all(map(ends, first[:least])) and (least <= len(first) or ends(items))

    def object_ends(schema: dict[str, Any]) -> bool:
        named, patterns = _table(schema, "properties"), _table(schema, "patternProperties")
        others = any(map(ends, [schema.get("additionalProperties", True), *patterns.values()]))
        required = {name for name in _list(schema, "required") if isinstance(name, str)}
        if not all(ends(named[name]) if name in named else others for name in required):
            return False
        return others or sum(map(ends, named.values())) >= _count(schema, "minProperties", 0)

    kind_ends = {"array": array_ends, "object": object_ends}

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


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _table(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _count(schema: dict[str, Any], key: str, default: int) -> int:
    value = schema.get(key, default)
    return value if isinstance(value, int) else default
