"""Tokens of chats, with a mask of those that the assistant wrote."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from blockdraft.chat_text import encode_rendered, encode_with_offsets, render_chat
from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError
from blockdraft_train.data.records import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
GENERATION_MARK = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
# Stand for the marks in a rendered chat. Messages do not know them.
BEGIN, END = ("".join(str(secrets.randbelow(10)) for _ in range(24)) for _ in range(2))
PROBE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
RESERVED = {"tokenizer", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
RESERVED |= {"conversation", "tokenize", "return_dict"}
KEPT = {"role", "content", "weight", "tool_calls", "tool_call_id"}  # fields of messages with a meaning of their own
Tools: TypeAlias = "Sequence[dict[str, Any]] | None"


def response_indices(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages after the first message of a user, without those of weight 0."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [
        i
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and i > min(users, default=i) and message.get("weight") != 0
    ]


class ChatEncoder:
    """Encoder of texts, and of chats by a tokenizer's chat template.

    Responses are the tokens that the template marks by `{% generation %}`. If it has no marks, each chat is rendered
    up to a response, with the assistant's header, and once more with the response. The response is the difference, up
    to the last end token. This needs a template that never changes what it has already rendered.

    Args:
        tokenizer: Tokenizer, with a chat template unless only texts are encoded.
        end_tokens: Tokens that end a response.
        template_args: Further arguments of the template, as a JSON object.

    Raises:
        UsageError: `template_args` is no JSON object.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_tokens: frozenset[int], template_args: str = "{}"
    ) -> None:
        try:
            self.template_args: dict[str, Any] = json.loads(template_args)
            if not isinstance(self.template_args, dict):
                raise UsageError("it is JSON of another kind")
            if reserved := RESERVED & set(self.template_args):
                raise UsageError(f"it names {', '.join(sorted(reserved))}, which are set already")
        except ValueError as error:
            raise UsageError(f"template_args must be a JSON object, got {template_args!r} ({error}).") from error
        self._tokenizer, self._end_tokens = tokenizer, end_tokens
        self._checked = False

    def text(self, text: str) -> list[int]:
        """Return the token ids of a plain text."""
        return encode_text(text, self._tokenizer)

    def render_prompt(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Return the text of a chat up to where the assistant's next response begins. Raise as `chat` does."""
        return self._render(messages, tools, add_generation_prompt=True)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the token ids of a chat up to where the assistant's next response begins. Raise as `chat` does."""
        return encode_rendered(self._tokenizer, self.render_prompt(messages, tools))

    def chat(
        self, messages: Sequence[Message], tools: Tools = None, last_only: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a chat, and for each whether the assistant wrote it.

        Args:
            last_only: Whether only the last response counts.

        Raises:
            UsageError: The template refuses the chat, marks no tokens of the assistant, or hides where responses begin.
        """
        self.check()
        return self._encode(*self.render_chat(messages, tools, last_only), self._is_marked(tools))

    def last_response(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        """Return the token ids of a chat before its last message, a response, and of this response.

        Raise as `chat` does.
        """
        ids, written = self.chat(messages, tools, last_only=True)
        end = len(written) - written[::-1].index(True) if True in written else 0
        begin = end
        while begin > 0 and written[begin - 1]:
            begin -= 1
        return ids[:begin], ids[begin:end]

    def render_chat(
        self, messages: Sequence[Message], tools: Tools = None, last_only: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and the first and last position of each response. Arguments are those of `chat`.

        Raises:
            UsageError: The template refuses the chat, or hides where responses begin.
        """
        indices = response_indices(messages)
        if not self._is_marked(tools):
            whole = self._render(messages, tools)
            return whole, [self._span(whole, messages, i, tools) for i in (indices[-1:] if last_only else indices)]
        marked = GENERATION_MARK.sub(_visible_mark, self._template(tools))
        whole, spans = "", list[tuple[int, int]]()
        for part in re.split(
            f"({BEGIN}.*?{END})", self._render(messages, tools, chat_template=marked), flags=re.DOTALL
        ):
            if part.startswith(BEGIN):
                part = part.removeprefix(BEGIN).removesuffix(END)
                spans.append((len(whole), len(whole) + len(part)))
            whole += part
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("weight") == 0:
                begin, end = self._span(whole, messages, i, tools)
                spans = [span for span in spans if not begin <= span[0] < end]
        return whole, spans

    def decode(self, ids: list[int]) -> str:
        return cast(str, self._tokenizer.decode(ids))

    def without_end(self, ids: list[int]) -> list[int]:
        """Return the token ids of a response up to its first end token, which the template adds."""
        return next((ids[:at] for at, token in enumerate(ids) if token in self._end_tokens), ids)

    def check(self) -> None:
        """Check that there is a template and that it gives tokens of the assistant. Raise as `chat` does."""
        if self._checked:
            return
        self._template(None)
        if not self._tokenizer.is_fast:
            raise UsageError(
                "The target's tokenizer is a slow one (without tokenizer.json), which cannot tell responses from "
                "prompts; use a model with a fast tokenizer."
            )
        if not any(self._encode(*self.render_chat(PROBE), self._is_marked(None))[1]):
            raise UsageError(
                "The chat template marks no assistant tokens, so there would be nothing to learn; put {% generation %} "
                "around the response in a copy of it and add --chat-template FILE."
            )
        self._checked = True

    def _template(self, tools: Tools) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=cast(Any, tools))
        except ValueError as error:
            raise UsageError(
                f"The target's tokenizer has no chat template; add --chat-template FILE. ({error})"
            ) from error

    def _is_marked(self, tools: Tools) -> bool:
        return GENERATION_MARK.search(self._template(tools)) is not None

    def _encode(self, whole: str, spans: Sequence[tuple[int, int]], is_marked: bool) -> tuple[list[int], list[bool]]:
        ids, offsets = encode_with_offsets(self._tokenizer, whole)
        written = [False] * len(ids)
        for first, last in spans:
            inside = [i for i, (begin, end) in enumerate(offsets) if first <= begin < last and end <= last]
            ends = [] if is_marked else [i for i in inside if ids[i] in self._end_tokens]
            for i in inside:
                written[i] = not ends or i <= ends[-1]
        return ids, written

    def _span(self, whole: str, messages: Sequence[Message], i: int, tools: Tools) -> tuple[int, int]:
        """Return where the text of message i, a response, begins and ends in the text of the chat."""
        before = self.render_prompt(messages[:i], tools)
        after = self._render(messages[: i + 1], tools)
        if not (after.startswith(before) and whole.startswith(after)):
            raise UsageError(
                f"the chat template renders message {i + 1} differently once the chat goes on, or not after its own "
                f"header, so the response cannot be told from the prompt. Add --split-turns to make a document of each "
                f"response, or --template-args if the difference is about thinking (such as "
                f"'{{\"enable_thinking\": false}}'), or --chat-template FILE with a copy of the template that has "
                f"{{% generation %}} around the response."
            )
        return len(before), len(after)

    def _render(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        template = self._template(tools)
        fields = {name for message in messages for name in message} - KEPT
        if "thinking" in template:  # gpt-oss's name of it
            fields.discard("reasoning_content")
        _log_dropped(frozenset(name for name in fields if name not in template))
        return render_chat(self._tokenizer, messages, tools, add_generation_prompt, **options, **self.template_args)


@cache
def _log_dropped(names: frozenset[str]) -> None:
    if names:
        log.warning("Fields of messages that the chat template drops: %s.", ", ".join(sorted(names)))


def _visible_mark(mark: re.Match[str]) -> str:
    """Return template code that writes `BEGIN` or `END`, and treats the space around it as the mark does."""
    before, end, after = mark.groups()
    return f"{{%{before} if true %}}{{{{ '{END if end else BEGIN}' }}}}{{% endif {after}%}}"
