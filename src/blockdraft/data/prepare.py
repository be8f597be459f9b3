"""Preparation of data folders from records of conversations or text."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import tensor

from blockdraft.data.chats import ChatEncoder, response_indices
from blockdraft.data.documents import FORMAT, MANIFEST, Document, tokenizer_fingerprint
from blockdraft.data.folder import check_writable, fingerprint, read_manifest
from blockdraft.data.records import Message, Record, read_records
from blockdraft.data.regenerate import Continuation, Conversation, Task, prompts_of, regenerate
from blockdraft.data.responders import Responder
from blockdraft.data.settings import CONTINUED, LONGEST, DataSettings, RecordSettings
from blockdraft.data.writer import DataWriter
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.targets import Target, TargetText, without_tokenizer

CHARACTERS = 4  # average number of characters of a token; sets the size of the pieces of a continued text


class RecordReader:
    """Reader of records, which turns them into documents or prompts for a target.

    Args:
        target: Target, of which tokenizer and limits are used, and no weights.
        sources, records: See `read_records`.
        settings: How records become documents.

    Attributes:
        encoder: Encoder of chats and texts.
        length: Maximum number of tokens of a document.
        continued: Number of tokens of each text that the target continues without a chat template; None if it responds
            to chats or writes nothing.

    Raises:
        UsageError: The target has no tokenizer, or a length exceeds its limit.
    """

    def __init__(
        self, target: Target | TargetText, sources: Sequence[str], records: RecordSettings, settings: DataSettings
    ) -> None:
        if target.tokenizer is None:
            raise UsageError(f"{without_tokenizer(target)}; training data need one.")
        if settings.length is not None and settings.length > target.max_context:
            raise UsageError(
                f"length is {settings.length} and the target's context {target.max_context} tokens; give at most that."
            )
        self.length = settings.length or min(target.max_context, LONGEST)
        self.encoder = ChatEncoder(target.tokenizer, target.eos_token_ids, settings.template_args)
        self.continued = settings.continued
        if settings.writer != "text" and target.tokenizer.chat_template is None:
            self.continued = settings.continued or max(1, min(CONTINUED, self.length // 4))
        if self.continued is not None and self.continued >= self.length:
            raise UsageError(
                f"{self.continued} tokens of each text are to be continued and a document has at most {self.length}; "
                f"choose a smaller --continue."
            )
        self._prompt_tokens = settings.continued  # None continues prompts as a whole
        self._target, self._sources, self._settings, self._records = target, sources, settings, records

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that shapes the data, which must stay the same for a folder to be continued."""
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
            "fields": [self._records.text_field, self._records.prompt_field, self._records.response_field],
        }

    @property
    def continued_note(self) -> str:
        """Sentence on what is continued."""
        prompts = "" if self._prompt_tokens else "; a {prompt} record is continued as a whole"
        return f"Without a chat template, the target continues the first {self.continued} tokens of each text{prompts}."

    def records(self) -> Iterator[tuple[str, Record]]:
        """Yield all records with their places. Raise as `read_records` does."""
        piece = None
        if self.continued is not None:
            piece = CHARACTERS * (self.continued + min(self._settings.sampling.max_new_tokens, self.length))
        return read_records(self._sources, self._records, piece)

    def check(self, place: str, record: Record) -> None:
        """Raise UsageError unless a record can become a document or a prompt."""
        if self.continued is not None:
            return
        if self._settings.writer != "text" and isinstance(record, str):
            raise UsageError(
                f"{place}: this is a plain text, not a prompt; leave out --regenerate, or have "
                "the target continue it with --continue N."
            )
        if self._settings.writer == "text" and not isinstance(record, str):
            if any(message["content"] is None for message in record):
                raise UsageError(f"{place}: this is a prompt without a response; add --regenerate to generate one.")
            self.encoder.check()

    def check_first(self) -> None:
        """Check and encode the first record, to find faults of all records before anything takes long.

        Raises UsageError if it cannot be read or encoded, or if decoding would read it as other tokens.
        """
        place, record = next(self.records())
        self.check(place, record)
        try:
            if self.continued is not None:
                self._check_prompt(self._continuation(record))
            elif self._settings.writer != "text":
                self.task(record).next_prompt()
            elif not isinstance(record, str):
                list(self.documents(record))
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error

    def task(self, record: Record) -> Task:
        """Return the task that generates the responses of a record, or continues it."""
        if self.continued is not None:
            return self._continuation(record)
        assert not isinstance(record, str)
        return Conversation(prompts_of(record), self.encoder, self.length)

    def documents(self, record: Record) -> Iterator[Document]:
        """Yield the documents of a record's own text, without those that have no supervised token."""
        if isinstance(record, str):
            ids = self.encoder.text(record)
            for begin in range(0, len(ids), self.length):
                part = tensor(ids[begin : begin + self.length])
                yield Document(part, part >= 0)
            return
        for ids, written in self._encoded(record):
            if any(written[: self.length]):
                yield Document(tensor(ids)[: self.length], tensor(written)[: self.length], len(ids) > self.length)

    def _continuation(self, record: Record) -> Continuation:
        if isinstance(record, str):
            text, most = record, self.continued
        else:
            text, most = record[0]["content"], self._prompt_tokens
        return Continuation(text, most, self.encoder.text, self.length)

    def _check_prompt(self, text: Continuation) -> None:
        """Check that decoding reads a prompt as the same tokens. Training would not notice a difference."""
        ours = text.next_prompt()
        tokenizer = self._target.tokenizer
        if ours is None or tokenizer is None or tokenizer.chat_template is not None:
            return  # a target with a template does not decode raw texts by default
        theirs = encode(text.begun, self._target)
        if ours != theirs:
            raise UsageError(
                f"a text has the tokens {ours[:8]}... here and {theirs[:8]}... in decoding, so a drafter would learn "
                "from tokens that it never meets; give the target the tokenizer that it is used with."
            )

    def _encoded(self, chat: list[Message]) -> Iterator[tuple[list[int], list[bool]]]:
        if not self._settings.split_turns:
            yield self.encoder.chat(chat)
            return
        for i in response_indices(chat):
            prompt, response = self.encoder.last_response(chat[: i + 1])
            yield prompt + response, [False] * len(prompt) + [True] * len(response)


class Preparation:
    """A data folder that is about to be made. All records are read and checked before anything is computed.

    Args:
        folder: Folder of the data. A part of them that it holds is kept. If it holds finished data, records that were
            appended to the sources are added.
        target, sources, records, settings: See `RecordReader`.

    Attributes:
        reader: Reader of the records.
        total, missing: Number of records, and of those that still need work.

    Raises:
        UsageError: As `RecordReader` does; also if a record has none of the accepted forms, the first record cannot be
            encoded, or the folder cannot be written to or holds data made with other arguments or from other records.
    """

    def __init__(
        self,
        folder: Path,
        target: Target | TargetText,
        sources: Sequence[str],
        records: RecordSettings,
        settings: DataSettings,
    ) -> None:
        self.reader = RecordReader(target, sources, records, settings)
        self.settings = settings
        check_writable(folder)
        self.writer = DataWriter(folder, self.reader.identity)
        self.reader.check_first()
        manifest = self.writer.manifest or {"rows": 0, "digest": None}
        self.total, self.digest, before = self._check_records(manifest["rows"])
        if manifest["digest"] not in (None, before):
            raise UsageError(
                f"{folder} was made from {manifest['rows']} records, and the first {manifest['rows']} of these "
                f"{self.total} differ from them; choose another folder for --out, or delete this one."
            )
        self.missing = self.total - len(self.writer.done)

    def run(
        self,
        responder: Responder | None = None,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        note: Callable[[str], None] = lambda text: None,
        **facts: Any,
    ) -> dict[str, Any]:
        """Make the missing data. Finished parts are kept if the run is interrupted.

        Args:
            responder: Writer of new responses; None keeps those of the records.
            progress: Called with the pace, the records done and the records to do in this run.
            note: Called with sentences that should stay on the screen.
            facts: Further entries of the manifest.

        Returns:
            The manifest.

        Raises:
            UsageError: The template refuses a chat, a server does not respond, the disk is full, no token is supervised
                in the end, or another process makes the same data.
        """
        with held(self.writer.folder, "making data"):
            if read_manifest(self.writer.folder / MANIFEST, FORMAT) != self.writer.manifest:
                raise UsageError(f"{self.writer.folder} was changed by another process meanwhile; run this again.")
            return self._run(responder, progress, note, facts)

    def _run(
        self,
        responder: Responder | None,
        progress: Callable[[str, int, int], None],
        note: Callable[[str], None],
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        if not self.missing and self.writer.manifest and self.writer.manifest["finished"]:
            return self.writer.manifest
        self.writer.begin(rows=self.total, digest=self.digest, **facts)
        began, done = time.monotonic(), 0

        def report() -> None:
            nonlocal done
            done += 1
            pace = self.writer.supervised / max(time.monotonic() - began, 1e-9)
            progress(f"{pace:.0f} tokens/s", done, self.missing)

        if self.missing:
            progress("started", 0, self.missing)
        try:
            if responder is not None:
                tasks = ((number, self.reader.task(record)) for number, _, record in self._missing_records())
                length = self.reader.length
                regenerate(tasks, responder, self.writer, self.settings.sampling, length, report, note)
            else:
                for number, place, record in self._missing_records():
                    try:
                        documents = list(self.reader.documents(record))
                    except ValueError as error:
                        raise UsageError(f"{place}: {error}") from error
                    self.writer.add(number, documents, None if documents else "no supervised token")
                    report()
        finally:
            self.writer.flush()
        return self.writer.finish()

    def _check_records(self, known: int) -> tuple[int, str, str]:
        """Check all records. Return their number, their digest, and the digest of the first `known` of them."""
        digest, before, count = hashlib.sha256(), "", 0
        for place, record in self.reader.records():
            self.reader.check(place, record)
            digest.update(json.dumps(record, sort_keys=True).encode())
            count += 1
            before = digest.hexdigest()[:16] if count == known else before
        return count, digest.hexdigest()[:16], before

    def _missing_records(self) -> Iterator[tuple[int, str, Record]]:
        for number, (place, record) in enumerate(self.reader.records()):
            if number not in self.writer.done:
                yield number, place, record
