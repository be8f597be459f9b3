"""Splits the output of a model, as it arrives, into reasoning, tool calls and text."""

from __future__ import annotations

import uuid
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from blockdraft.serving.request import Chat, TextDelta, ToolCall
from blockdraft.serving.tool_calls.formats import Format, Tools, find_marker
from blockdraft.serving.tool_calls.template import (
    THINK,
    THINK_END,
    allows_parallel_calls,
    format_of,
    is_reasoning,
    may_reason,
    tool_schemas,
)

Part: TypeAlias = "TextDelta | ToolCall"


def parser_of(tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt_text: str = "") -> OutputParser:
    """Return the parser for the output of one choice, in the format of the chat template.

    Without tools, or if `tool_choice` forbids calls, calls remain text.

    Args:
        prompt_text: The rendered chat, at whose end the reasoning may begin.

    Raises:
        UsageError: The template has no known format of calls, or a tool is malformed.
    """
    tools = tool_schemas(chat.tools)
    return OutputParser(
        format_of(tokenizer) if tools and chat.tool_choice.mode != "none" else None,
        tools,
        may_reason=may_reason(tokenizer),
        reasoning=is_reasoning(prompt_text),
        parallel=chat.parallel_tool_calls and allows_parallel_calls(tokenizer),
    )


class OutputParser:
    """Parses text that arrives in pieces. The joined parts do not depend on where the pieces end.

    Text that may become a marker is held back until that is decided, and a call until it is complete. A malformed call
    is text. Whitespace around reasoning and calls is dropped.

    Args:
        form: Format of the calls; None leaves them in the text.
        tools: Schemas of the tools' arguments, by name.
        may_reason: Whether the output may begin with reasoning.
        reasoning: Whether the reasoning has begun in the prompt.
        parallel: Whether several calls are allowed.
    """

    def __init__(
        self, form: Format | None, tools: Tools, may_reason: bool, reasoning: bool, parallel: bool = True
    ) -> None:
        self._format, self._tools, self._parallel = form, tools, parallel
        self._stage = "reasoning" if reasoning else "start" if may_reason else "output"
        self._buffer = ""
        self._reasoning, self._output = _Trimmer(leading=True), _Trimmer(leading=False)
        self._num_calls = 0

    @property
    def called(self) -> bool:
        """Whether the output has a call."""
        return self._num_calls > 0

    @property
    def ended(self) -> bool:
        """Whether the only allowed call is complete. Later text is not part of the output."""
        return self.called and not self._parallel

    def push(self, text: str) -> list[Part]:
        """Add text and return the parts that are decided."""
        self._buffer += text
        return self._parse(final=False)

    def finish(self) -> list[Part]:
        """Return the remaining parts once no more text will come."""
        parts = self._parse(final=True)
        if whitespace := self._output.whitespace:
            parts.append(TextDelta(whitespace))
        return parts

    def _parse(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._stage == "start":
            text = self._buffer.lstrip()
            if text.startswith(THINK):
                self._stage, self._buffer = "reasoning", text.removeprefix(THINK)
            elif final or not THINK.startswith(text):
                self._stage = "output"
        if self._stage == "reasoning":
            end = find_marker(self._buffer, THINK_END)
            if final and THINK_END not in self._buffer:
                end = len(self._buffer)
            if text := self._reasoning.push(self._buffer[:end]):
                parts.append(TextDelta(text, reasoning=True))
            self._buffer = self._buffer[end:]
            if self._buffer.startswith(THINK_END):
                self._stage, self._buffer = "output", self._buffer.removeprefix(THINK_END)
                self._output = _Trimmer(leading=True)
        if self._stage == "output":
            parts += self._parse_output(final)
        return parts

    def _parse_output(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._format is None:
            text, self._buffer = self._buffer, ""
            return self._text(text)
        while self._buffer and not self.ended:
            start = self._format.find(self._buffer, self._output.at_line_start)
            parts += self._text(self._buffer[:start])
            self._buffer = self._buffer[start:]
            match = self._format.match(self._buffer, self._tools, final) if self._buffer else None
            if match is None:
                break
            if match.call is None:
                parts += self._text(self._buffer[: match.length])
            else:
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                parts.append(ToolCall(self._num_calls, call_id, match.call.name, match.call.arguments))
                self._num_calls += 1
                self._output = _Trimmer(leading=True)
            self._buffer = self._buffer[match.length :]
        return parts

    def _text(self, text: str) -> list[Part]:
        trimmed = self._output.push(text)
        return [TextDelta(trimmed)] if trimmed else []


class _Trimmer:
    """Drops the whitespace at the end of a text and, if `leading`, at its start.

    Attributes:
        whitespace: Whitespace held back, which more text would release.
        at_line_start: Whether the next character begins a line.
    """

    def __init__(self, leading: bool) -> None:
        self._leading = leading
        self.whitespace = ""
        self.at_line_start = True

    def push(self, text: str) -> str:
        text = self.whitespace + text
        text = text.lstrip() if self._leading else text
        trimmed = text.rstrip()
        self.whitespace = text[len(trimmed) :]
        if trimmed:
            self._leading = False
        if text:
            self.at_line_start = "\n" in self.whitespace or (self.at_line_start and not trimmed)
        return trimmed
