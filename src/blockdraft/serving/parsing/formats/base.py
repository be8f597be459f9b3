"""What a format of tool calls must hold, and what several of them need."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from json import JSONDecoder
from typing import Any, NamedTuple, Protocol, TypeAlias

Schema: TypeAlias = dict[str, Any]
# The JSON schema of each tool's arguments, by the tool's name.
Tools: TypeAlias = Mapping[str, Schema]
# As templates write it, which is what models have learnt; whitespace without bound would let a weak model write on.
# Keywords that a grammar cannot express are left to the model, since tools are often described by others.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
# With these beside them, `properties` are not all that a schema may allow.
OPEN_KEYS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
LONGEST_WORD = 12  # characters of JSON whose end may be missing, such as -Infinity; strings aside


class Call(NamedTuple):
    """Attributes:
    arguments: JSON text of an object.
    """

    name: str
    arguments: str


class Read(NamedTuple):
    """What the beginning of a text is.

    Attributes:
        length: Characters that it takes, at least one, and no more than the next call may begin behind.
        call: None: these are plain text.
    """

    length: int
    call: Call | None = None


class Format(Protocol):
    """How a family of models writes tool calls.

    What is found and read must not depend on how much of the text has come: a decision, once made, holds however the
    text goes on.
    """

    @property
    def separator(self) -> str:
        """What stands between two calls."""
        ...

    @property
    def marked(self) -> bool:
        """Whether calls begin with a marker, which no other JSON begins with."""
        ...

    @property
    def rules(self) -> str:
        """Rules of Lark that the expressions of `grammar` use."""
        ...

    def fits(self, template: str) -> bool:
        """Whether a chat template asks for this format. At most one format may fit a template."""
        ...

    def find(self, text: str, fresh: bool) -> int:
        """Where the first call begins, or may begin once more text has come; the text's length if nowhere.

        Args:
            fresh: Whether the text begins a line, the answer or what follows a call.
        """
        ...

    def read(self, text: str, tools: Tools, final: bool) -> Read | None:
        """What a text that may begin with a call begins with; None while that needs more text.

        Args:
            text: From where `find` found it.
            final: No more text will come, so the answer is never None.
        """
        ...

    def grammar(self, name: str, schema: Schema, added: Collection[str]) -> str:
        """A call of one tool, as an expression of llguidance's dialect of Lark.

        Args:
            added: Texts that are tokens of their own; see `literal`.
        """
        ...


def literal(text: str, added: Collection[str]) -> str:
    """A text as an expression of Lark. Tokens that were added to a vocabulary are named, as bytes do not match them."""
    named = [re.escape(token) for token in added if token in text]
    parts = re.split(f"({'|'.join(named)})", text) if named else [text]
    return " ".join(part if part in added else json.dumps(part) for part in parts if part)


def json_grammar(schema: Schema) -> str:
    """JSON as an expression of Lark."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})


def arguments_schema(schema: Schema) -> Schema:
    """A tool's schema for a grammar: an object that has none but the arguments named, unless the schema has a say."""
    schema = {"type": "object", "properties": {}, **schema}
    return schema if OPEN_KEYS & set(schema) else {**schema, "additionalProperties": False}


def marker_at(text: str, marker: str) -> int:
    """Where a marker begins, or its first characters at the end of the text; the text's length if nowhere."""
    at = text.find(marker)
    if at >= 0:
        return at
    held = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text) - held


class Broken(ValueError):
    """A text is no JSON, however it goes on."""


def _refuse(constant: str) -> Any:
    raise Broken(constant)


_DECODER = JSONDecoder(strict=False, parse_constant=_refuse)  # models write bare line breaks into strings


def read_json(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON object that begins at a place of a text, and where it ends; None while its end is missing.

    Raises:
        Broken: There is none.
    """
    if at < len(text) and text[at] != "{":
        raise Broken("no object")
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        if "Unterminated string" in error.msg or error.pos + LONGEST_WORD > len(text):
            return None
        raise Broken(str(error)) from error
    except Broken:
        raise
    except (RecursionError, ValueError):  # nested too deep, or a number that has too many digits so far
        return None


def call_of(name: object, arguments: object) -> Call:
    """Raises:
    Broken: The name is no text, or the arguments are no object.
    """
    if isinstance(arguments, str):  # JSON in JSON, as OpenAI's API writes them
        arguments = read_whole(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Broken("no call")
    return Call(name, json_text(arguments))


def read_whole(text: str) -> Any:
    """The value of a text that is JSON throughout.

    Raises:
        Broken: It is not.
    """
    try:
        return _DECODER.decode(text)
    except (RecursionError, ValueError) as error:
        raise Broken(str(error)) from error


def json_text(value: Any) -> str:
    """Raises:
    Broken: A number is infinite.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise Broken(str(error)) from error
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(value)
    return text
