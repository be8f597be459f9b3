"""Preparation of data folders from records of conversations or text."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import tensor

from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.folders import check_writable, fingerprint, held
from blockdraft.targets import Target, TargetText, without_tokenizer
from blockdraft_train.data.chats import ChatEncoder, response_indices
from blockdraft_train.data.documents import Document
from blockdraft_train.data.manifest import read_manifest
from blockdraft_train.data.records import ChatRecord, Message, Record, read_records
from blockdraft_train.data.regenerate import Continuation, RegeneratedChat, Task, prompts_of, regenerate
from blockdraft_train.data.responders import Responder
from blockdraft_train.data.settings import CONTINUED, LONGEST, DataSettings, RecordSettings
from blockdraft_train.data.token_data import FORMAT, MANIFEST, tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

MAX_FAULTS = 20  # faulty records that are listed
CHARACTERS = 4  # average number of characters of a token; sets the size of the pieces of a continued text


@dataclass(frozen=True)
class CheckedRecords:
    """Result of `RecordReader.check`.

    Attributes:
        keys: Key of each record that can be used, which depends on its content.
        faults: Faults of the other records by their places.
    """

    keys: list[int]
    faults: dict[str, str]


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

    def check(self) -> CheckedRecords:
        """Read and check all records: that they can be parsed, and that the chat template renders them.

        Raises:
            UsageError: A source cannot be read, no record or, without `skip_faulty`, not every record can be used, or
                decoding would read the first record as other tokens.
        """
        faults, keys = dict[str, str](), list[int]()
        for key, place, record in self.records(faults.setdefault):
            if self._settings.writer == "text" and isinstance(record, ChatRecord):
                self.encoder.check()
            try:
                self._check(record)
            except ValueError as error:
                faults[place] = str(error)
                continue
            keys.append(key)
            if self.continued is not None and len(keys) == 1:
                self._check_prompt(self._continuation(record))
        if faults and not (self._settings.skip_faulty and keys):
            listed = [f"{place}: {fault}" for place, fault in itertools.islice(faults.items(), MAX_FAULTS)]
            if len(faults) == 1 and keys:
                raise UsageError(f"{listed[0].removesuffix('.')}. Add --skip-faulty to leave the record out.")
            more = f"\n- and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
            remedy = "; mend them, or add --skip-faulty to leave them out" if keys else ""
            lines = "".join(f"\n- {line}" for line in listed)
            raise UsageError(f"{len(faults)} of {len(faults) + len(keys)} records cannot be used{remedy}:{lines}{more}")
        return CheckedRecords(keys, faults)

    def records(self, on_fault: Callable[[str, str], object]) -> Iterator[tuple[int, str, Record]]:
        """Yield key, place and content of all records that can be parsed. See `read_records` for `on_fault`."""
        piece, times = None, Counter[bytes]()
        if self.continued is not None:
            piece = CHARACTERS * (self.continued + min(self._settings.sampling.max_new_tokens, self.length))
        for place, record in read_records(self._sources, self._records, piece, on_fault):
            content = [record.messages, record.tools] if isinstance(record, ChatRecord) else record
            digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
            # Equal records are told apart by their order.
            key = int.from_bytes(hashlib.sha256(digest + b"%d" % times[digest]).digest()[:8], "little", signed=True)
            times[digest] += 1
            yield key, place, record

    def _check(self, record: Record) -> None:
        """Raise UsageError unless a record can become a document or a prompt."""
        if self.continued is not None:
            return
        if self._settings.writer == "text":
            if isinstance(record, str):
                return
            if any(message["content"] is None for message in record.messages):
                raise UsageError("this is a prompt without a response; add --regenerate to generate one.")
            for messages, last_only in self._parts(record):
                self.encoder.render_chat(messages, record.tools, last_only)
            return
        if isinstance(record, str):
            raise UsageError(
                "this is a plain text, not a prompt; leave out --regenerate, or have the target continue it with "
                "--continue N."
            )
        messages = list[Message]()
        for part in prompts_of(record.messages):
            messages += part
            self.encoder.render_prompt(messages, record.tools)
            messages.append({"role": "assistant", "content": "..."})

    def task(self, record: Record) -> Task:
        """Return the task that generates the responses of a record, or continues it."""
        if self.continued is not None:
            return self._continuation(record)
        assert isinstance(record, ChatRecord)
        return RegeneratedChat(prompts_of(record.messages), self.encoder, self.length, record.tools)

    def documents(self, record: Record) -> Iterator[Document]:
        """Yield the documents of a record's own text, without those that have no supervised token."""
        if isinstance(record, str):
            ids = self.encoder.text(record)
            for begin in range(0, len(ids), self.length):
                part = tensor(ids[begin : begin + self.length])
                yield Document(part, part >= 0)
            return
        for messages, last_only in self._parts(record):
            if last_only:
                prompt, response = self.encoder.last_response(messages, record.tools)
                ids, written = prompt + response, [False] * len(prompt) + [True] * len(response)
            else:
                ids, written = self.encoder.chat(messages, record.tools)
            if any(written[: self.length]):
                yield Document(tensor(ids)[: self.length], tensor(written)[: self.length], len(ids) > self.length)

    def _continuation(self, record: Record) -> Continuation:
        if isinstance(record, str):
            text, most = record, self.continued
        else:
            text, most = record.messages[0]["content"], self._prompt_tokens
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

    def _parts(self, chat: ChatRecord) -> Iterator[tuple[list[Message], bool]]:
        """Yield the messages of each document of a chat, and whether only the last one is learned."""
        if not self._settings.split_turns:
            yield chat.messages, False
        else:
            yield from ((chat.messages[: i + 1], True) for i in response_indices(chat.messages))


class Preparation:
    """A data folder that is about to be made. All records are read and checked before anything is computed.

    Args:
        folder: Folder of the data. A part of them that it holds is kept. If it holds finished data, records that were
            appended to the sources are added.
        target, sources, records, settings: See `RecordReader`.
        checked: Result of `RecordReader.check` for the same arguments; None checks the records here.

    Attributes:
        reader: Reader of the records.
        total, missing: Number of records, and of those that still need work.

    Raises:
        UsageError: As `RecordReader` and its `check` do; also if the folder cannot be written to, or holds data made
            with other arguments or from other records.
    """

    def __init__(
        self,
        folder: Path,
        target: Target | TargetText,
        sources: Sequence[str],
        records: RecordSettings,
        settings: DataSettings,
        checked: CheckedRecords | None = None,
    ) -> None:
        self.reader = RecordReader(target, sources, records, settings)
        self.settings = settings
        check_writable(folder)
        self.writer = DataWriter(folder, self.reader.identity)
        self._checked = self.reader.check() if checked is None else checked
        self._numbers = dict(zip(self._checked.keys, self.writer.numbers(self._checked.keys), strict=True))
        self.total = len(self._numbers)
        self.missing = self.total - self.writer.finished

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
        known, skipped = self.writer.manifest, len(self._checked.faults)
        unchanged = known and (known["removed"], known["skipped"]) == (self.writer.removed, skipped)
        if known and known["finished"] and unchanged and not self.missing:
            return known
        self.writer.begin(rows=self.total, skipped=skipped, **facts)
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

    def _missing_records(self) -> Iterator[tuple[int, str, Record]]:
        for key, place, record in self.reader.records(lambda place, fault: None):
            number = self._numbers.get(key)
            if number is not None and number not in self.writer.done:
                yield number, place, record
