"""From rows of conversations or text to a data folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import tensor

from blockdraft.data.answerers import Answerer
from blockdraft.data.chats import ChatEncoder, answer_places
from blockdraft.data.documents import DataWriter, Document, tokenizer_fingerprint
from blockdraft.data.folder import fingerprint
from blockdraft.data.regenerate import regenerate
from blockdraft.data.rows import Message, Row, read_rows
from blockdraft.data.settings import LONGEST, DataSettings, RowSettings
from blockdraft.errors import UsageError
from blockdraft.targets import Target, TargetText


class Preparation:
    """Data about to be made. The rows are read once to check them all, before anything is computed.

    Args:
        folder: Where the data go. A folder that holds part of them is gone on with; a finished one is added to where
            further rows have been put behind those that it was made of.
        target: Tokenizer and limits; weights are not looked at.
        sources, rows: See `read_rows`.
        settings: How documents are made.

    Attributes:
        total, missing: Rows there are, and those that are still to be worked on.

    Raises:
        ValueError: A row of no accepted form, a target without a tokenizer, a length beyond its context, a folder of
            data made with other arguments or from other rows.
    """

    def __init__(
        self,
        folder: Path,
        target: Target | TargetText,
        sources: Sequence[str],
        rows: RowSettings,
        settings: DataSettings,
    ) -> None:
        if target.tokenizer is None:
            raise UsageError("The target has no tokenizer; training data take one.")
        if settings.length is not None and settings.length > target.max_context:
            raise UsageError(f"length is {settings.length} and the target's context {target.max_context} tokens.")
        self.length = settings.length or min(target.max_context, LONGEST)
        self.settings = settings
        self.encoder = ChatEncoder(target.tokenizer, target.eos_token_ids, settings.template_args)
        self._sources, self._rows = sources, rows
        template = target.tokenizer.chat_template
        identity = {
            "tokenizer": tokenizer_fingerprint(target.tokenizer),
            "chat_template": None if template is None else fingerprint(template),
            "template_args": self.encoder.template_args,
            "length": self.length,
            "split_turns": settings.split_turns,
            "written_by": settings.written_by,
            "fields": [rows.text_field, rows.prompt_field, rows.response_field],
        }
        self.writer = DataWriter(folder, identity)
        manifest = self.writer.manifest or {"rows": 0, "digest": None}
        self.total, self.digest, before = self._check_rows(manifest["rows"])
        if manifest["digest"] not in (None, before):
            raise UsageError(
                f"{folder} was made from {manifest['rows']} rows, and the first {manifest['rows']} of these are others "
                f"(there are {self.total}); choose another folder for --out, or delete this one."
            )
        self.missing = self.total - len(self.writer.done)

    def run(
        self,
        answerer: Answerer | None = None,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        **facts: Any,
    ) -> dict[str, Any]:
        """Make the data that are missing; what is made stays, also when interrupted.

        Args:
            answerer: Who writes the answers, unless they are those of the rows.
            progress: Called with the pace, and the rows done and to do in this run.
            facts: Put into the manifest.

        Returns:
            The manifest.

        Raises:
            ValueError: A chat that the template refuses, a server that does not answer, a full disk, no supervised
                token in the end.
        """
        if not self.missing and self.writer.manifest and self.writer.manifest["finished"]:
            return self.writer.manifest
        self.writer.begin(rows=self.total, digest=self.digest, **facts)
        began, done = time.monotonic(), 0

        def tell() -> None:
            nonlocal done
            done += 1
            pace = self.writer.supervised / max(time.monotonic() - began, 1e-9)
            progress(f"{pace:.0f} tokens/s", done, self.missing)

        try:
            if answerer is not None:
                chats = ((number, row) for number, _, row in self._todo() if not isinstance(row, str))
                regenerate(chats, answerer, self.encoder, self.writer, self.settings.sampling, self.length, tell)
            else:
                for number, place, row in self._todo():
                    try:
                        documents = list(self._documents(row))
                    except ValueError as error:
                        raise UsageError(f"{place}: {error}") from error
                    self.writer.add(number, documents, None if documents else "no supervised token")
                    tell()
        finally:
            self.writer.flush()
        return self.writer.finish()

    def _check_rows(self, known: int) -> tuple[int, str, str]:
        """Count and digest all rows; the last value is the digest of the first `known` ones."""
        digest, before, count = hashlib.sha256(), "", 0
        for place, row in read_rows(self._sources, self._rows):
            if self.settings.writer != "text" and isinstance(row, str):
                raise UsageError(f"{place}: this is a plain text, which nobody can answer; leave out --regenerate.")
            if self.settings.writer == "text" and not isinstance(row, str) and any(m["content"] is None for m in row):
                raise UsageError(f"{place}: this is a prompt without a response; add --regenerate to have it answered.")
            digest.update(json.dumps(row, sort_keys=True).encode())
            count += 1
            before = digest.hexdigest()[:16] if count == known else before
        return count, digest.hexdigest()[:16], before

    def _todo(self) -> Iterator[tuple[int, str, Row]]:
        for number, (place, row) in enumerate(read_rows(self._sources, self._rows)):
            if number not in self.writer.done:
                yield number, place, row

    def _documents(self, row: Row) -> Iterator[Document]:
        """The documents of a row that have a token to learn from."""
        if isinstance(row, str):
            ids = self.encoder.text(row)
            for begin in range(0, len(ids), self.length):
                part = tensor(ids[begin : begin + self.length])
                yield Document(part, part >= 0)
            return
        for ids, written in self._encoded(row):
            if any(written[: self.length]):
                yield Document(tensor(ids)[: self.length], tensor(written)[: self.length], len(ids) > self.length)

    def _encoded(self, chat: list[Message]) -> Iterator[tuple[list[int], list[bool]]]:
        if not self.settings.split_turns:
            yield self.encoder.chat(chat)
            return
        for i in answer_places(chat):
            prompt, answer = self.encoder.last_answer(chat[: i + 1])
            yield prompt + answer, [False] * len(prompt) + [True] * len(answer)
