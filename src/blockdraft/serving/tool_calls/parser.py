"""Splits the output of a model, as it arrives, into reasoning, tool calls and text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from blockdraft.chat_text import harmony_ids
from blockdraft.serving.json_schemas import Tools, tool_schemas
from blockdraft.serving.request import ChatMessages, TextDelta
from blockdraft.serving.tool_calls.call_parts import CallParts
from blockdraft.serving.tool_calls.formats import (
    FORMATS,
    THINK,
    THINK_END,
    ToolCallFormat,
    allows_parallel_calls,
    find_marker,
    format_of,
    is_reasoning,
    may_reason,
)
from blockdraft.serving.tool_calls.harmony import PROMPT_END, HarmonyParser, Part


def parser_of(
    tokenizer: PreTrainedTokenizerBase, chat: ChatMessages, prompt_text: str = "", json_content: bool = False
) -> OutputParser | HarmonyParser:
    """Return the parser for the output of one choice.

    Without tools, or if `tool_choice` forbids calls, calls remain text.

    Args:
        prompt_text: The rendered chat, at whose end the reasoning may begin.
        json_content: Whether text must be JSON, so that only marked calls can be told from it.

    Raises:
        UsageError: The template takes no tools, or a tool is malformed.
    """
    tools, formats = tool_schemas(chat.tools), tuple[ToolCallFormat, ...]()
    if tools and chat.tool_choice.mode != "none":
        own = format_of(tokenizer)
        formats = tuple(form for form in FORMATS if form.marked or not (own.marked and json_content))
    parallel = chat.parallel_tool_calls and allows_parallel_calls(tokenizer) and chat.tool_choice.name is None
    if harmony_ids(tokenizer):
        return HarmonyParser(tools if formats else (), parallel, begun=not prompt_text.endswith(PROMPT_END))
    return OutputParser(
        formats,
        tools,
        may_reason=may_reason(tokenizer),
        reasoning=is_reasoning(prompt_text),
        parallel=parallel,
    )


class OutputParser:
    """Parses text that arrives in pieces. The joined parts do not depend on where the pieces end.

    Text that may become a marker is held back until that is decided, and a call until it is complete. Of a call of a
    known tool behind a marker, the arguments come as `ToolCallDelta`s meanwhile. A malformed call is text. Whitespace
    around reasoning and calls is dropped.

    Args:
        formats: Formats of calls; without any, calls stay in the text.
        tools: Schemas of the tools' arguments, by name.
        may_reason: Whether the output may begin with reasoning.
        reasoning: Whether the reasoning has begun in the prompt.
        parallel: Whether several calls are allowed.
    """

    def __init__(
        self, formats: Sequence[ToolCallFormat], tools: Tools, may_reason: bool, reasoning: bool, parallel: bool = True
    ) -> None:
        self._formats, self._tools, self._parallel = formats, tools, parallel
        self._stage = "reasoning" if reasoning else "start" if may_reason else "output"
        self._buffer = ""
        self._reasoning, self._output = _Trimmer(leading=True), _Trimmer(leading=False)
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
            cut: Whether the model would have gone on. An unfinished call after others is then dropped.
        """
        if cut and self.called:
            self._buffer = ""
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
        while self._buffer and not self.ended:
            at_line_start = self._output.at_line_start
            starts = [form.find(self._buffer, at_line_start) for form in self._formats]
            start = min(starts, default=len(self._buffer))
            self._add_text(parts, self._buffer[:start])
            self._buffer = self._buffer[start:]
            if not self._buffer:
                break
            candidates = [form for form, index in zip(self._formats, starts, strict=True) if index == start]
            matches = [form.match(self._buffer, self._tools, final) for form in candidates]
            match = next((match for match in matches if match and match.calls), None)
            if match is None:
                if None in matches:
                    undecided = [form for form, match in zip(candidates, matches, strict=True) if match is None]
                    begun = [form.begun(self._buffer, self._tools) for form in undecided]
                    for call in [call for call in begun if call and call.name in self._tools][:1]:
                        parts += self._calls.begin(call)
                    break
                match = min(filter(None, matches))
                self._add_text(parts, self._buffer[: match.length])
            for call in match.calls[: None if self._parallel else 1]:
                parts.append(self._calls.complete(call))
                self._output = _Trimmer(leading=True)
            self._buffer = self._buffer[match.length :]
            self._calls.drop()
        return parts

    def _add_text(self, parts: list[Part], text: str) -> None:
        if not (trimmed := self._output.push(text)):
            return
        last = parts[-1] if parts else None
        if isinstance(last, TextDelta):
            parts[-1] = TextDelta(last.text + trimmed)
        else:
            parts.append(TextDelta(trimmed))


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
