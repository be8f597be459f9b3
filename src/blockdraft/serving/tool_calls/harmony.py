"""Harmony, the response format of gpt-oss: a response is a sequence of messages, each with a header and a body.

`<|channel|>analysis<|message|>BODY<|end|>` is reasoning, the channels `final` and `commentary` are text, and a header
with `to=functions.NAME` makes the body the arguments of a tool call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import TypeAlias

from blockdraft.chat_text import HARMONY
from blockdraft.serving.json_schemas import Tools
from blockdraft.serving.request import TextDelta, ToolCall, ToolCallDelta
from blockdraft.serving.tool_calls.call_parts import CallParts
from blockdraft.serving.tool_calls.formats import (
    Call,
    InvalidCall,
    begun_arguments,
    decode_arguments,
    find_marker,
    json_expression,
    literal,
    object_schema,
)

START, CHANNEL, MESSAGE, CONSTRAIN, END = HARMONY
BODY_ENDS = (END, START, CHANNEL, "<|call|>", "<|return|>")
HEADERS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")  # how headers begin
OWN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTION = "functions."
PROMPT_END = START + "assistant"

Part: TypeAlias = "TextDelta | ToolCallDelta | ToolCall"


class HarmonyParser:
    """Parses text that arrives in pieces, like `OutputParser`.

    Malformed calls, and those of unknown tools, are text. Those of tools that only the makers of gpt-oss run, such as
    `to=python`, are reasoning.

    Args:
        tools: Names of the tools that may be called.
        parallel: Whether several calls are allowed.
        begun: Whether the prompt ends inside of a final message.
    """

    def __init__(self, tools: Collection[str], parallel: bool, begun: bool) -> None:
        self._tools, self._parallel = tools, parallel
        self._buffer = ""
        # Kind of the current body: "text", "reasoning", the name of a tool after "functions.", or None in a header.
        self._kind: str | None = "text" if begun else None
        self._written: set[str] = set()  # kinds with text
        self._separator = ""  # before the next text
        self._calls = CallParts()

    @property
    def called(self) -> bool:
        """Whether the output has a call."""
        return self._calls.num_calls > 0

    @property
    def ended(self) -> bool:
        """Whether the only allowed call is complete. Later text is not part of the output."""
        return self.called and not self._parallel

    def push(self, text: str) -> list[Part]:
        """Add text and return the parts that are decided."""
        self._buffer += text
        return self._parse(final=False)

    def finish(self, cut: bool = False) -> list[Part]:
        """Return the remaining parts once no more text will come.

        Args:
            cut: Whether the model would have gone on. An unfinished call after others, or without text, is dropped.
        """
        if cut and self._in_call and (self.called or not self._buffer):
            self._buffer, self._kind = "", None
        return self._parse(final=True)

    @property
    def _in_call(self) -> bool:
        return self._kind is not None and self._kind.startswith(FUNCTION)

    @property
    def _tool(self) -> str:
        """Name of the tool that is called."""
        return str(self._kind).removeprefix(FUNCTION)

    def _parse(self, final: bool) -> list[Part]:
        parts = list[Part]()
        while not self.ended and (self._buffer or (final and self._in_call)):
            if self._kind is None and not self._read_header(final):
                break
            assert self._kind is not None
            end = min(find_marker(self._buffer, marker) for marker in BODY_ENDS)
            marker = next((marker for marker in BODY_ENDS if self._buffer.startswith(marker, end)), None)
            end = len(self._buffer) if final and marker is None else end
            if self._in_call and marker is None and not final:
                if (body := self._buffer[:end].lstrip()).startswith("{"):
                    parts += self._calls.begin(Call(self._tool, begun_arguments(body)))
                break
            body, self._buffer = self._buffer[:end], self._buffer[end:]
            parts += self._call(body) if self._in_call else self._text(self._kind, body)
            if marker is None:
                self._kind = None if final else self._kind
                break
            self._kind = None
            self._buffer = self._buffer.removeprefix(marker) if marker not in HEADERS else self._buffer
        return parts

    def _read_header(self, final: bool) -> bool:
        """Read the header at the start of the buffer. Return whether it is complete."""
        begin = self._buffer.lstrip()
        if not any(begin.startswith(header) or header.startswith(begin) for header in HEADERS):
            self._kind = "text"  # of a model that does not keep to the format
            return True
        header, message, body = self._buffer.partition(MESSAGE)
        if not message:
            if final:
                self._buffer = ""
            return False
        channels, recipient = OWN_CHANNEL.findall(header), RECIPIENT.search(header)
        own = "" if recipient is None else recipient[1]
        self._kind = "reasoning" if channels[-1:] == ["analysis"] else "text"
        if own.startswith(FUNCTION):
            self._kind = own if own.removeprefix(FUNCTION) in self._tools else "text"
        elif own not in ("", "assistant"):
            self._kind = "reasoning"
        self._separator = "\n\n" if self._kind in self._written else ""
        self._buffer = body
        return True

    def _text(self, kind: str, body: str) -> list[Part]:
        if not body:
            return []
        text, self._separator = self._separator + body, ""
        self._written.add(kind)
        return [TextDelta(text, reasoning=kind == "reasoning")]

    def _call(self, body: str) -> list[Part]:
        try:
            return [self._calls.complete(Call(self._tool, decode_arguments(body)))]
        except InvalidCall:
            self._calls.drop()
            return self._text("text", body)


def harmony_grammar(tools: Tools, content: str | None, begun: bool, added: Collection[str]) -> str:
    """Return the Lark grammar of a response that calls one of some tools or whose text has a grammar.

    Any reasoning may come first.

    Args:
        tools: Schemas of the arguments, by name.
        content: Expression of the text of the final message; None forces a call.
        begun: As in `HarmonyParser`.
        added: Tokens added to the vocabulary, the markers among them.
    """
    rules = [f"analysis: {CHANNEL} {json.dumps('analysis')} {MESSAGE} /(?s:.*)/ {END} {literal(PROMPT_END, added)}"]
    outputs = []
    for name, schema in tools.items():
        header = literal(f"{CHANNEL}commentary to={FUNCTION}{name} {CONSTRAIN}json{MESSAGE}", added)
        outputs.append(f"{header} {json_expression(object_schema(schema))}")
    if content is not None:
        outputs.append("content" if begun else f"{literal(f'{CHANNEL}final{MESSAGE}', added)} content")
        rules.append(f"content: {content}")
    return "\n".join([f"start: {'' if begun else 'analysis* '}({' | '.join(outputs)})", *rules])
