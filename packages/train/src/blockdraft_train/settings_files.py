"""Settings from TOML files, overridden by flags, and written as TOML."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from blockdraft.errors import UsageError
from blockdraft.settings import SettingsError, field_info, from_text
from blockdraft.text_files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

T = TypeVar("T")


def as_text(value: object) -> str:
    """Return the text that `from_text` reads as this value."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={amount}" for name, amount in value.items())
    if isinstance(value, list | tuple):  # a number alone may be a count, so a list of one ends in a comma
        return ",".join(map(str, value)) + ("," if len(value) == 1 else "")
    return str(value)


def read_settings(kind: type[T], file: Path | None = None, flags: Mapping[str, str] | None = None) -> T:
    """Read settings from a TOML file and from flags, which override the file.

    Args:
        kind: A class made by `settings`.
        file: None takes the defaults.
        flags: Texts, as `from_text` reads them, by field name. Dashes may stand for underscores.

    Raises:
        SettingsError: Names or values are invalid; the error lists all of them.
        UsageError: The file cannot be read.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(read_text(file))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{file} cannot be read ({error}).") from error
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    texts = {name.replace("-", "_"): text for name, text in (flags or {}).items()}
    problems: dict[str, str] = {}
    for name, text in texts.items():
        try:
            values[name] = from_text(kind, name, text) if name in known else text
        except SettingsError as error:
            problems |= error.problems
            values.pop(name, None)  # the flag overrides the file's value
    spelled = {name: f"--{name.replace('_', '-')}" for name in texts}
    try:
        made = kind(**values)
    except SettingsError as error:
        from_file = {
            name: f"{file}: {problem}"
            for name, problem in error.problems.items()
            if name in values and name not in texts
        }
        raise SettingsError({**error.problems, **from_file, **problems}).with_flags(spelled) from None
    if problems:
        raise SettingsError(problems).with_flags(spelled)
    return made


def describe(kind: type, name: str) -> str:
    """Return the description of a field."""
    return field_info(kind, name).description or ""


def as_toml(values: Any, described: bool = False) -> str:
    """Write all settings as a TOML file. Fields that are None become comments."""
    lines = []
    for name, value in dataclasses.asdict(values).items():
        if described:
            lines += ["", f"# {describe(type(values), name)}"]
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines).strip() + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are among JSON's
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(entry)}" for key, entry in value.items()) + " }"
    return repr(value)
