"""What is to be made of the rows for one target: documents of their own text, or answers that the target writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import tensor

from blockdraft.data.chats import ChatEncoder, answer_places
from blockdraft.data.continuations import Continuation
from blockdraft.data.documents import Document, tokenizer_fingerprint
from blockdraft.data.folder import fingerprint
from blockdraft.data.regenerate import Conversation, Task, prompts_of
from blockdraft.data.rows import Message, Row, read_rows
from blockdraft.data.settings import CONTINUED, LONGEST, DataSettings, RowSettings
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.targets import Target, TargetText, without_tokenizer

CHARACTERS = 4  # of a token, about: so a text has a beginning to continue for each so many tokens that come out


class Reading:
    """Rows, and how they are read for a target.

    Args:
        target: Tokenizer and limits; weights are not looked at.
        sources, rows: See `read_rows`.
        settings: How documents are made.

    Attributes:
        length: Tokens of a document at most.
        continued: Tokens of each text that the target continues without a chat template; None where it answers chats,
            or writes nothing.

    Raises:
        ValueError: A target without a tokenizer, a length beyond its context, as many tokens to continue.
    """

    def __init__(
        self, target: Target | TargetText, sources: Sequence[str], rows: RowSettings, settings: DataSettings
    ) -> None:
        if target.tokenizer is None:
            raise UsageError(f"{without_tokenizer(target)}; training data take one.")
        if settings.length is not None and settings.length > target.max_context:
            raise UsageError(f"length is {settings.length} and the target's context {target.max_context} tokens.")
        self.length = settings.length or min(target.max_context, LONGEST)
        self.encoder = ChatEncoder(target.tokenizer, target.eos_token_ids, settings.template_args)
        self.continued = settings.continued
        if settings.writer != "text" and target.tokenizer.chat_template is None:
            self.continued = settings.continued or max(1, min(CONTINUED, self.length // 4))
        if self.continued is not None and self.continued >= self.length:
            raise UsageError(
                f"{self.continued} tokens of each text are to be continued and a document has {self.length} at most; "
                f"choose a smaller --continue."
            )
        self._prompt_tokens = settings.continued  # a prompt is a beginning by itself, unless told otherwise
        self._target, self._sources, self._settings, self._rows = target, sources, settings, rows

    @property
    def identity(self) -> dict[str, Any]:
        """What the data are made with, and must be the same for a folder to be gone on with."""
        assert self._target.tokenizer is not None
        template = self._target.tokenizer.chat_template
        continued = {"tokens": self.continued, "prompts": self._prompt_tokens}
        return {
            "tokenizer": tokenizer_fingerprint(self._target.tokenizer),
            "chat_template": None if template is None else fingerprint(template),
            "template_args": self.encoder.template_args,
            "length": self.length,
            "split_turns": self._settings.split_turns,
            "continued": None if self.continued is None else continued,
            "written_by": self._settings.written_by,
            "fields": [self._rows.text_field, self._rows.prompt_field, self._rows.response_field],
        }

    @property
    def continued_note(self) -> str:
        """What is continued, in a sentence."""
        prompts = "" if self._prompt_tokens else "; a {prompt} row is continued as a whole"
        return (
            f"Without a chat template: the target goes on behind the first {self.continued} tokens of a text{prompts}."
        )

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All rows with their places. Raises ValueError for one of no accepted form."""
        piece = None
        if self.continued is not None:
            piece = CHARACTERS * (self.continued + min(self._settings.sampling.max_new_tokens, self.length))
        return read_rows(self._sources, self._rows, piece)

    def check(self, place: str, row: Row) -> None:
        """Raises ValueError for a row that does not fit what is to be made of it."""
        if self.continued is not None:
            return
        if self._settings.writer != "text" and isinstance(row, str):
            raise UsageError(
                f"{place}: this is a plain text, which nobody can answer; leave out --regenerate, or have the target "
                f"continue it with --continue N."
            )
        if self._settings.writer == "text" and not isinstance(row, str):
            if any(message["content"] is None for message in row):
                raise UsageError(f"{place}: this is a prompt without a response; add --regenerate to have it answered.")
            self.encoder.check()

    def check_first(self) -> None:
        """Try the first row, so that what is wrong with all of them is said before anything takes long.

        Raises:
            ValueError: It cannot be read or encoded, or decoding would read it as other tokens.
        """
        place, row = next(self.rows())
        self.check(place, row)
        try:
            if self.continued is not None:
                self._check_prompt(self._continuation(row))
            elif self._settings.writer != "text":
                self.task(row).next_prompt()
            elif not isinstance(row, str):
                list(self.documents(row))
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error

    def task(self, row: Row) -> Task:
        """What is to be asked about a row."""
        if self.continued is not None:
            return self._continuation(row)
        assert not isinstance(row, str)
        return Conversation(prompts_of(row), self.encoder, self.length)

    def documents(self, row: Row) -> Iterator[Document]:
        """The documents of a row's own text that have a token to learn from."""
        if isinstance(row, str):
            ids = self.encoder.text(row)
            for begin in range(0, len(ids), self.length):
                part = tensor(ids[begin : begin + self.length])
                yield Document(part, part >= 0)
            return
        for ids, written in self._encoded(row):
            if any(written[: self.length]):
                yield Document(tensor(ids)[: self.length], tensor(written)[: self.length], len(ids) > self.length)

    def _continuation(self, row: Row) -> Continuation:
        text, most = (row, self.continued) if isinstance(row, str) else (row[0]["content"], self._prompt_tokens)
        return Continuation(text, most, self.encoder.text, self.length)

    def _check_prompt(self, text: Continuation) -> None:
        """Training on other tokens than decoding reads would go unnoticed."""
        ours = text.next_prompt()
        tokenizer = self._target.tokenizer
        if ours is None or tokenizer is None or tokenizer.chat_template is not None:
            return  # what decoding makes of a text with a template is not asked for
        theirs = encode(text.begun, self._target)
        if ours != theirs:
            raise UsageError(
                f"a text is read as the tokens {ours[:8]}... here and as {theirs[:8]}... when it is decoded, so a "
                f"drafter would learn what it never meets; give the target the tokenizer that it is used with."
            )

    def _encoded(self, chat: list[Message]) -> Iterator[tuple[list[int], list[bool]]]:
        if not self._settings.split_turns:
            yield self.encoder.chat(chat)
            return
        for i in answer_places(chat):
            prompt, answer = self.encoder.last_answer(chat[: i + 1])
            yield prompt + answer, [False] * len(prompt) + [True] * len(answer)
