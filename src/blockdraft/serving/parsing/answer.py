"""Splits the text of an answer, as it arrives, into reasoning, tool calls and the answer itself."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from blockdraft.serving.core.events import Reasoning, Text, ToolCall, ToolChoice
from blockdraft.serving.parsing.formats import Format, Tools, marker_at
from blockdraft.serving.parsing.template import THINK, THOUGHT, format_of, is_thinking, schemas_of, thinks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part: TypeAlias = "Text | Reasoning | ToolCall"
FREE = ToolChoice()


def parser_of(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] = (),
    tool_choice: ToolChoice = FREE,
    prompt_text: str = "",
    parallel: bool = True,
) -> AnswerParser:
    """The parser of one answer, in the format of the chat template.

    Args:
        tools: OpenAI's function tools. Without tools, or where `tool_choice` forbids calls, calls are left as text.
        prompt_text: The prompt as text. The reasoning may begin at its end.
        parallel: Whether several calls are allowed; otherwise the answer ends with the first.

    Raises:
        UsageError: The template has no known format of calls, or a tool is malformed.
    """
    schemas = schemas_of(tools)
    form = format_of(tokenizer) if schemas and tool_choice.mode != "none" else None
    return AnswerParser(
        form, tools=schemas, thinks=thinks(tokenizer), thinking=is_thinking(prompt_text), parallel=parallel
    )


class AnswerParser:
    """Takes the text of an answer piece by piece. The parts, joined, do not depend on where the pieces end.

    Text that may become a marker is held back until that is decided, and a call until it is complete. A call that turns
    out to be malformed is text. Whitespace around reasoning and calls is left out.

    Args:
        form: Format of the calls; None leaves them in the text.
        tools: Schemas of the tools' arguments, by name.
        thinks: Whether the answer may begin with reasoning.
        thinking: Whether the reasoning has begun in the prompt.
        parallel: Whether several calls are allowed.

    Attributes:
        called: Whether a call was found.
        ended: Whether the only allowed call was found; later text is not part of the answer.
    """

    def __init__(self, form: Format | None, tools: Tools, thinks: bool, thinking: bool, parallel: bool = True) -> None:
        self._form, self._tools, self._parallel = form, tools, parallel
        self._stage = "reasoning" if thinking else "begin" if thinks else "answer"
        self._held = ""
        self._reasoning, self._said = _Trimmed(leading=True), _Trimmed(leading=False)
        self._calls = 0

    @property
    def called(self) -> bool:
        return self._calls > 0

    @property
    def ended(self) -> bool:
        return self.called and not self._parallel

    def push(self, text: str) -> list[Part]:
        """Parts that are decided once this text has come."""
        self._held += text
        return self._parts(final=False)

    def finish(self) -> list[Part]:
        """The remaining parts, once no more text will come."""
        parts = self._parts(final=True)
        if space := self._said.rest():
            parts.append(Text(space))
        return parts

    def _parts(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._stage == "begin":
            begin = self._held.lstrip()
            if begin.startswith(THINK):
                self._stage, self._held = "reasoning", begin.removeprefix(THINK)
            elif final or not THINK.startswith(begin):
                self._stage = "answer"
        if self._stage == "reasoning":
            at = len(self._held) if final and THOUGHT not in self._held else marker_at(self._held, THOUGHT)
            if thought := self._reasoning.push(self._held[:at]):
                parts.append(Reasoning(thought))
            self._held = self._held[at:]
            if self._held.startswith(THOUGHT):
                self._stage, self._held = "answer", self._held.removeprefix(THOUGHT)
                self._said = _Trimmed(leading=True)
        if self._stage == "answer":
            parts += self._answer(final)
        return parts

    def _answer(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._form is None:
            text, self._held = self._held, ""
            return self._text(text)
        while self._held and not self.ended:
            at = self._form.find(self._held, self._said.begins_line)
            parts += self._text(self._held[:at])
            self._held = self._held[at:]
            read = self._form.read(self._held, self._tools, final) if self._held else None
            if read is None:
                break
            if read.call is None:
                parts += self._text(self._held[: read.length])
            else:
                name, arguments = read.call
                parts.append(ToolCall(self._calls, arguments, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
                self._calls += 1
                self._said = _Trimmed(leading=True)
            self._held = self._held[read.length :]
        return parts

    def _text(self, text: str) -> list[Part]:
        said = self._said.push(text)
        return [Text(said)] if said else []


class _Trimmed:
    """Text without the whitespace at its end and, if `leading`, at its beginning.

    Attributes:
        begins_line: Whether the next character begins a line.
    """

    def __init__(self, leading: bool) -> None:
        self._leading = leading
        self._space = ""
        self.begins_line = True

    def push(self, text: str) -> str:
        text = self._space + text
        text = text.lstrip() if self._leading else text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._leading = False
        if text:
            self.begins_line = "\n" in self._space or (self.begins_line and not said)
        return said

    def rest(self) -> str:
        return self._space
