"""Settings: frozen dataclasses that check their values and are read from TOML files and flags.

The decorator `settings` makes them with pydantic. Types and ranges stand in the annotations and are checked strictly,
so that `true` is no number. Errors are `UsageError`s that name field, value and limit.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from typing_extensions import dataclass_transform

from blockdraft.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # torch's range
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# Lists are accepted for tuples, which TOML lacks; their elements are still checked strictly.
Layers = Annotated[tuple[Natural, ...], Strict(False), Field(min_length=1)]
Texts = Annotated[tuple[str, ...], Strict(False)]

# What a value must be, by pydantic's type of error. Other errors keep pydantic's message.
LIMITS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "dict": "a table",
    "mapping": "a table",
    "too_short": "a list that is not empty",
    "too_long": "a list of at most {max_length}",
    "string_too_long": "a text of at most {max_length} characters",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}


class SettingsError(UsageError):
    """Wrong settings.

    Attributes:
        complaints: A sentence for each wrong field, by its name; "" is the name for errors of several fields together.
    """

    def __init__(self, complaints: Mapping[str, str]) -> None:
        super().__init__(" ".join(complaints.values()))
        self.complaints = complaints


@dataclass_transform(frozen_default=True)
def settings(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass that checks its values. Its `__post_init__` may check how they fit together.

    The class raises `SettingsError`, a ValueError, for unknown names and for values of a wrong type or out of range.
    """
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    made: Any = checked_dataclass(frozen=True, config=config)(kind)
    construct = made.__init__

    @functools.wraps(construct)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            construct(self, *arguments, **named)
        except ValidationError as error:
            names, groups = [field.name for field in fields(made)], dict[str, list[Any]]()
            for one in error.errors(include_url=False):
                place = one["loc"][0] if one["loc"] else ""  # the index of a positional argument
                name = place if isinstance(place, str) else names[place] if place < len(names) else "an argument"
                groups.setdefault(name, []).append(one)
            raise SettingsError({name: _sentence(made, name, group) for name, group in groups.items()}) from None

    made.__init__ = init
    return made  # type: ignore[no-any-return]


def _sentence(kind: Any, name: str, errors: Sequence[Any]) -> str:
    """One sentence that says what is wrong with a field."""
    if errors[0]["type"] == "unexpected_keyword_argument":
        near = difflib.get_close_matches(name, [field.name for field in fields(kind)], n=3, cutoff=0.5)
        return f"{name!r} is unknown; " + (f"did you mean {' or '.join(near)}?" if near else "leave it out.")
    if errors[0]["type"] == "unexpected_positional_argument":
        return f"{errors[0]['input']!r} is one argument too many."
    if errors[0]["type"].startswith("missing"):
        return f"{name} is missing."
    if "error" in errors[0].get("ctx", {}):
        return str(errors[0]["ctx"]["error"])
    hint = get_type_hints(kind).get(name)
    united = get_origin(hint) in (Union, types.UnionType) and len({*get_args(hint)} - {type(None)}) > 1
    # For a union of types, the second part of a location names the type that was tried.
    places = ["".join(f"[{part}]" for part in one["loc"][1 + united :]) for one in errors]
    # The error deepest inside the value is the most specific.
    place = max(places, key=len)
    furthest = [one for one, other in zip(errors, places, strict=True) if other == place]
    limits = " or ".join(dict.fromkeys(map(limit_of, furthest)))
    return f"{name}{place} is {furthest[0]['input']!r}; it must be {limits}."


def limit_of(error: Any) -> str:
    """Limit that a refused value must meet, from pydantic's error."""
    kind = error["type"]
    known = LIMITS.get(kind) or LIMITS.get(kind.split("_")[0])
    told: str = error["msg"].removeprefix("Input should be ")
    return known.format(**error.get("ctx", {})) if known else told


def from_text(kind: type, name: str, text: str) -> Any:
    """A field's value from the text of a flag: "5", "true", "none"; a list is "1,9,17", a table "decay=1,dpace=2".

    Raises:
        ValueError: The text stands for no value of the field's type.
    """
    hint = get_type_hints(kind, include_extras=True)[name]
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    parts = [part.strip() for part in text.strip("[]{} ").split(",") if part.strip()]
    table = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in parts)}
    wrong: list[Any] = []
    readings: list[Any] = [None if text.lower() == "none" else text, parts, table]
    if text.strip().isdecimal() and any(get_args(one)[:1] == (int,) for one in get_args(hint)):
        del readings[1:]  # if the field takes numbers too, a list of one needs a comma or brackets
    if text.strip().isdecimal():
        readings.append(int(text))  # one of a few numbers is not read from text
    for value in readings:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            wrong.append(error.errors(include_url=False))
    # Report the reading whose error is deepest inside the value; of equals, the plain text.
    meant = max(wrong, key=lambda errors: max(len(one["loc"]) for one in errors))
    raise UsageError(f"{name} is {text!r}; it must be {' or '.join(dict.fromkeys(map(limit_of, meant)))}.")


def read_settings(kind: type[T], file: Path | None = None, flags: Mapping[str, str] | None = None) -> T:
    """Settings from a TOML file and flags; flags override the file.

    Args:
        kind: A class made by `settings`.
        file: None takes the defaults.
        flags: Values as texts, see `from_text`.

    Raises:
        ValueError: The file cannot be read, a key is unknown, or a value is of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{file} cannot be read ({error}).") from error
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    texts = {name.replace("-", "_"): text for name, text in (flags or {}).items()}
    wrong: dict[str, str] = {}
    for name, text in texts.items():
        try:
            values[name] = from_text(kind, name, text) if name in known else text
        except UsageError as error:
            wrong[name] = str(error)
            values.pop(name, None)  # the flag overrides the file's value
    try:
        made = kind(**values)
    except SettingsError as error:
        of_file = {
            name: f"{file}: {told}" for name, told in error.complaints.items() if name in values and name not in texts
        }
        raise SettingsError({**error.complaints, **of_file, **wrong}) from None
    if wrong:
        raise SettingsError(wrong)
    return made


def explain(kind: type, name: str) -> str:
    """Description of a field, from the docstring of the class that defines it."""
    for owner in kind.__mro__:
        found = re.search(rf"^( *){name}: (.+?)(?=\n\1\S|\Z)", inspect.getdoc(owner) or "", re.S | re.M)
        if found:
            return " ".join(found[2].split())
    raise AssertionError(f"{kind.__name__} does not explain {name}")


def explain_option(kind: type, name: str) -> str:
    """Description of a field for `--help`, in which None reads as the default."""
    text = re.sub(r"(^|\. )None\b", r"\1The default", explain(kind, name))
    return re.sub(r"\bNone\b", "the default", text)


def as_toml(values: Any, explained: bool = False) -> str:
    """All settings as a TOML file. Fields that are None become comments."""
    lines = []
    for name, value in asdict(values).items():
        if explained:
            lines += ["", f"# {explain_option(type(values), name)}"]
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines).strip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    return repr(value)
