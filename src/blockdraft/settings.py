"""Settings classes: frozen dataclasses, checked by pydantic, that Python and command-line flags fill.

Each field is described once, by `Field(description=...)`. That text is shown in `--help`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.fields import FieldInfo
from typing_extensions import dataclass_transform

from blockdraft.errors import UsageError

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # torch's range
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# TOML has no tuples, so lists are accepted for them. Their elements are still checked strictly.
Layers = Annotated[tuple[Natural, ...], Strict(False), Field(min_length=1)]
Texts = Annotated[tuple[str, ...], Strict(False)]

# What a value must be, by pydantic's type of error. Other errors keep pydantic's message.
LIMITS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "string_too_short": "a text that is not empty",
    "tuple": "a list",
    "dict": "a table",
    "mapping": "a table",
    "model": "an object",
    "too_short": "a list that is not empty",
    "too_long": "a list of at most {max_length}",
    "string_too_long": "a text of at most {max_length} characters",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}


@dataclass(frozen=True)
class Flag:
    """Command-line form of a field, as metadata of its annotation. What is left out follows from name and type.

    Attributes:
        name: Flag, such as `--json`, or a pair such as `--round-drafter/--keep-drafter`.
        metavar: Placeholder of the value in `--help`.
        repeat: Whether the flag may be repeated, once for each element of a tuple.
        panel: Panel of `--help` that lists the flag.
        environment: Environment variable that sets the value where the flag is absent.
    """

    name: str | None = None
    metavar: str | None = None
    repeat: bool = False
    panel: str | None = None
    environment: str | None = None


class SettingsError(UsageError):
    """Invalid settings.

    Attributes:
        problems: One sentence per invalid field, by field name. The sentence begins with that name. The name "" holds
            what is wrong with several fields together.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(problems.values()))
        self.problems = problems

    @classmethod
    def of(cls, name: str, limit: str, value: object) -> SettingsError:
        """Return the error of one field.

        Args:
            limit: What the value must be.
        """
        return cls({name: f"{name} must be {limit}, got {value!r}."})

    def __reduce__(self) -> Any:
        return SettingsError, (self.problems,)

    def with_flags(self, flags: Mapping[str, str]) -> SettingsError:
        """Return the same error with flags in the place of field names.

        Args:
            flags: Flags by field name.
        """
        return SettingsError({name: with_flag(problem, flags) for name, problem in self.problems.items()})


def with_flag(problem: str, flags: Mapping[str, str]) -> str:
    """Return a sentence with a flag in the place of the field name that begins it."""
    name, space, rest = problem.partition(" ")
    return flags.get(name, name) + space + rest


@dataclass_transform(frozen_default=True)
def settings(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose values are checked strictly: `true` is not a number.

    The class raises `SettingsError` for unknown names and invalid values. Its `__post_init__` may raise a `UsageError`.
    """
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    made: Any = checked_dataclass(frozen=True, config=config)(kind)
    construct = made.__init__

    @functools.wraps(construct)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            construct(self, *arguments, **named)
        except ValidationError as error:
            names, groups = [field.name for field in dataclasses.fields(made)], dict[str, list[Any]]()
            for fault in error.errors(include_url=False):
                place = fault["loc"][0] if fault["loc"] else ""  # the index of a positional argument
                name = place if isinstance(place, str) else names[place] if place < len(names) else "an argument"
                groups.setdefault(name, []).append(fault)
            raise SettingsError({name: _sentence(made, name, group) for name, group in groups.items()}) from None

    made.__init__ = init
    return made  # type: ignore[no-any-return]


def _sentence(kind: Any, name: str, faults: Sequence[Any]) -> str:
    """Return one sentence that says what is wrong with a field."""
    first = faults[0]
    if first["type"] == "unexpected_keyword_argument":
        near = difflib.get_close_matches(name, [field.name for field in dataclasses.fields(kind)], n=3, cutoff=0.5)
        return f"{name} is unknown; " + (f"did you mean {' or '.join(near)}?" if near else "leave it out.")
    if first["type"] == "unexpected_positional_argument":
        return f"{first['input']!r} is one argument too many."
    if first["type"].startswith("missing"):
        return f"{name} is missing."
    if "error" in first.get("ctx", {}):
        return str(first["ctx"]["error"])
    hint = _hints(kind).get(name)
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    is_union = get_origin(hint) in (Union, types.UnionType) and len({*get_args(hint)} - {type(None)}) > 1
    # In a union, the second part of a location is the type that was tried.
    places = ["".join(f"[{part}]" for part in fault["loc"][1 + is_union :]) for fault in faults]
    # The error deepest inside the value is the most specific.
    place = max(places, key=len)
    deepest = [fault for fault, other in zip(faults, places, strict=True) if other == place]
    return f"{name}{place} must be {_limits(deepest)}, got {deepest[0]['input']!r}."


def _limits(faults: Sequence[Any]) -> str:
    return " or ".join(dict.fromkeys(map(limit_of, faults)))


def limit_of(fault: Any) -> str:
    """Return the limit that a value breaks, in words, from one of pydantic's errors."""
    limit = LIMITS.get(fault["type"]) or LIMITS.get(fault["type"].split("_")[0])
    message: str = fault["msg"].removeprefix("Input should be ")
    return limit.format(**fault.get("ctx", {})) if limit else message


def from_text(kind: type, name: str, text: str | Sequence[str], none: bool = True) -> Any:
    """Read a field's value from the text of a flag.

    Args:
        text: "5", "true"; a list as "1,9,17", a table as "decay=1,dpace=2". Or the texts of a repeated flag.
        none: Whether "none" stands for None.

    Raises:
        SettingsError: The text is no value of the field.
    """
    hint = _hints(kind)[name]
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    readings: list[Any] = [text]
    if isinstance(text, str):
        parts = [part.strip() for part in text.strip("[]{} ").split(",") if part.strip()]
        table = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in parts)}
        readings = [None if none and text.lower() == "none" else text, parts, table]
        is_number = text.strip().isdecimal()
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        options = get_args(plain) if get_origin(plain) in (Union, types.UnionType) else ()
        if is_number and any(get_args(option)[:1] == (int,) for option in options):
            del readings[1:]  # where the field takes a number too, a list of one needs a comma or brackets
        if is_number:
            readings.append(int(text))  # pydantic does not read a literal number from text
    failures: list[Any] = []
    for value in readings:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            failures.append(error.errors(include_url=False))
    # Report the error deepest inside the value, which is the most specific, or else that of the plain text.
    depths = [max(len(fault["loc"]) for fault in faults) for faults in failures]
    deepest = max(depths)
    faults = [fault for fault in failures[depths.index(deepest)] if len(fault["loc"]) == deepest]
    raise SettingsError({name: f"{name} must be {_limits(faults)}, got {text!r}."})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def field_info(kind: type, name: str) -> FieldInfo:
    """Return type, default, description and metadata of a field. A subclass may change a default alone."""
    first: FieldInfo | None = None
    for owner in kind.__mro__:
        if name not in owner.__dict__.get("__annotations__", {}):
            continue
        field = next(field for field in dataclasses.fields(owner) if field.name == name)
        default: Any = field.default if isinstance(field.default, FieldInfo) else field
        info = FieldInfo.from_annotated_attribute(_hints(owner)[name], default)
        first = first or info
        if info.description is not None:
            first.description = info.description
            break
    assert first is not None
    return first
