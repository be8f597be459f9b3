"""Tokens of chats, with a mask of those that the assistant wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from blockdraft.data.records import Message
from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]


def response_indices(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages after the first message of a user."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > min(users, default=i)]


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
        except ValueError as error:
            raise UsageError(f"template_args is {template_args!r}; it must be a JSON object ({error}).") from error
        self._tokenizer, self._end_tokens = tokenizer, end_tokens
        self._checked = False

    def text(self, text: str) -> list[int]:
        """Return the token ids of a plain text."""
        return encode_text(text, self._tokenizer)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat up to where the assistant's next response begins."""
        return self._ids(self._render(messages, add_generation_prompt=True))

    def chat(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the token ids of a chat, and for each whether the assistant wrote it.

        Raises:
            UsageError: The template refuses the chat, marks no tokens of the assistant, or hides where responses begin.
        """
        self.check()
        return self._chat(messages)

    def last_response(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return the token ids of a chat before its last message, a response, and of this response.

        Raise as `chat` does.
        """
        self.check()
        ids, written = self._chat(messages, last_only=True)
        end = len(written) - written[::-1].index(True) if True in written else 0
        begin = end
        while begin > 0 and written[begin - 1]:
            begin -= 1
        return ids[:begin], ids[begin:end]

    def decode(self, ids: list[int]) -> str:
        return cast(str, self._tokenizer.decode(ids))

    def without_end(self, ids: list[int]) -> list[int]:
        """Return the token ids of a response up to its first end token, which the template adds."""
        return next((ids[:at] for at, token in enumerate(ids) if token in self._end_tokens), ids)

    @property
    def _marked(self) -> bool:
        return GENERATION_MARK.search(self._template()) is not None

    def _template(self) -> str:
        try:
            return self._tokenizer.get_chat_template()
        except ValueError as error:
            raise UsageError(
                f"The target's tokenizer has no chat template; add --chat-template FILE. ({error})"
            ) from error

    def check(self) -> None:
        """Check that there is a template and that it gives tokens of the assistant. Raise as `chat` does."""
        if self._checked:
            return
        if not self._tokenizer.is_fast:
            raise UsageError(
                "The target's tokenizer is a slow one (without tokenizer.json), which cannot tell responses from "
                "prompts; use a model with a fast tokenizer."
            )
        if not any(self._chat(PROBE)[1]):
            raise UsageError(
                "The chat template marks no assistant tokens, so there would be nothing to learn; put {% generation %} "
                "around the response in a copy of it and add --chat-template FILE."
            )
        self._checked = True

    def _chat(self, messages: Sequence[Message], last_only: bool = False) -> tuple[list[int], list[bool]]:
        if self._marked:
            encoding = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
            return list(encoding["input_ids"]), list(map(bool, encoding["assistant_masks"]))
        whole = self._render(messages)
        encoding = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, written = list(encoding["input_ids"]), [False] * len(encoding["input_ids"])
        for i in response_indices(messages)[-1:] if last_only else response_indices(messages):
            before = self._render(messages[:i], add_generation_prompt=True)
            after = self._render(messages[: i + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                raise UsageError(
                    f"the chat template renders message {i + 1} differently once the chat goes on, or not after its "
                    f"own header, so the response cannot be told from the prompt. Add --split-turns to make a document "
                    f"of each response, or --template-args if the difference is about thinking (such as "
                    f"'{{\"enable_thinking\": false}}'), or --chat-template FILE with a copy of the template that has "
                    f"{{% generation %}} around the response."
                )
            inside = [
                index
                for index, (begin, end) in enumerate(encoding["offset_mapping"])
                if len(before) <= begin < len(after) and end <= len(after)
            ]
            ends = [index for index in inside if ids[index] in self._end_tokens]
            for index in inside:
                written[index] = not ends or index <= ends[-1]
        return ids, written

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        return cast(str, self._apply(messages, tokenize=False, **options))

    def _ids(self, text: str) -> list[int]:
        return list(cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"]))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        self._template()
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options, **self.template_args)
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from error
