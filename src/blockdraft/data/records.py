"""Records of conversations or text, read by the `datasets` library from files, folders or the hub."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from blockdraft.data.settings import RecordSettings
from blockdraft.errors import Complaints, UsageError

Message: TypeAlias = dict[str, Any]
# A text, or the messages of a chat. The content of a response is None if it is still to be written.
Record: TypeAlias = "str | list[Message]"

ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool")
}
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
KINDS |= dict.fromkeys((".gz", ".zst", ".bz2", ".xz"), "json")
ACCEPTED = (
    '{"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]}, {"prompt", "response"}, '
    '{"turns": ["prompt", ...]} or {"text"}'
)


def read_records(
    sources: Sequence[str], settings: RecordSettings, piece: int | None = None
) -> Iterator[tuple[str, Record]]:
    """Read the records of all sources, one source after the other, each with its place for error messages.

    Args:
        sources: JSON, JSON-lines and Parquet files, text files (one record each), folders of such files or of a saved
            dataset, or names on the hub.
        piece: Characters of a piece. Given when texts are continued without a chat template: records are then those of
            `parse_for_continuation`, and each piece of a text is a record.

    Raises:
        UsageError: A source cannot be read, or a record has none of the accepted forms.
    """

    def parsed(place: str, raw: dict[str, Any]) -> Iterator[tuple[str, Record]]:
        try:
            record = parse_record(raw, settings) if piece is None else parse_for_continuation(raw, settings)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error
        pieces = [record] if piece is None or not isinstance(record, str) else pieces_of(record, piece)
        for number, part in enumerate(pieces, 1):
            yield place if number == 1 else f"{place}, piece {number}", part

    raws = itertools.chain.from_iterable(_numbered(source, settings) for source in sources)
    records = itertools.chain.from_iterable(parsed(place, raw) for place, raw in raws)
    return itertools.islice(records, settings.limit)


def check_sources(sources: Sequence[str], settings: RecordSettings) -> None:
    """Check the first record of each source that is a file or a folder. Sources on the hub are not checked.

    Raises UsageError as `read_records` does, with the faults of all sources together.
    """
    complaints = Complaints()
    for source in filter(_names_file, sources):
        with complaints.noting():
            next(read_records([source], settings))
    complaints.check()


def parse_record(raw: dict[str, Any], settings: RecordSettings) -> Record:
    """Parse the fields of a record into a text or a chat. Raise UsageError if it has none of the accepted forms.

    Fields that are None count as absent, because `datasets` fills absent fields with None.
    """
    present = {name: value for name, value in raw.items() if value is not None}
    if settings.text_field is not None:
        return _text(present, settings.text_field)
    prompt, response = settings.prompt_field or "prompt", settings.response_field or "response"
    if settings.prompt_field is None and settings.response_field is None:
        for name in ("messages", "conversations"):
            if name in present:
                return _chat(name, present[name])
        if "turns" in present:
            return [message for text in _list("turns", present["turns"]) for message in _pair(_text({"turns": text}))]
        if "prompt" not in present and "text" in present:
            return _text(present, "text")
    if prompt not in present:
        raise UsageError(
            f"it has the fields {sorted(raw)} and none that is needed ({ACCEPTED}); name its fields by --text-field, "
            f"or by --prompt-field and --response-field."
        )
    if response not in present and (settings.response_field is not None or "completion" in present):
        raise UsageError(f"it has the fields {sorted(present)} and no {response!r}; name it by --response-field.")
    return _pair(_text(present, prompt), _text(present, response) if response in present else None)


def parse_for_continuation(raw: dict[str, Any], settings: RecordSettings) -> Record:
    """Parse a record whose text will be continued as it is: a text, or a prompt as the only message of a user.

    Raises UsageError if the record has none of the accepted forms, or is a chat.
    """
    record = parse_record(raw, settings)
    if isinstance(record, str):
        return record
    named = settings.prompt_field is not None or settings.response_field is not None
    if len(record) > 2 or (not named and any(raw.get(name) is not None for name in ("messages", "conversations"))):
        raise UsageError(
            "this is a chat, whose roles only a chat template can spell, and none is used here (the target has none, "
            'or --continue does without). Give {"text"} or {"prompt"} records or .txt files to have them continued. '
            "To generate the responses of chats, leave out --continue, and add --chat-template FILE if the target has "
            "none."
        )
    return record[:1]


def pieces_of(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces of at most `size` characters, each as long as possible.

    Cuts fall at the end of a paragraph, else of a line, else of a word, as long as the piece has at least half of
    `size`.
    """
    begin = 0
    while len(text) - begin > size:
        least, most = begin + size // 2, begin + size
        places = (text.rfind(mark, least, most) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((place for place in places if place > least), most)
        yield text[begin:end]
        begin = end
    if begin == 0 or text[begin:].strip():
        yield text[begin:]


def _pair(prompt: str, response: str | None = None) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _chat(name: str, value: Any) -> list[Message]:
    chat = [_message(name, message) for message in _list(name, value)]
    if not any(message["role"] == "user" for message in chat):
        raise UsageError(f'"{name}" holds no message of a user; a conversation needs one.')
    return chat


def _message(name: str, raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise UsageError(f'"{name}" holds {raw!r}; it must be a list of messages.')
    present = {key: value for key, value in raw.items() if value is not None}
    role = present.pop("role", None) or present.pop("from", None)
    content = present.pop("content", None) if "content" in present else present.pop("value", None)
    if role not in ROLES:
        raise UsageError(f"a message has the role {role!r}; it must be one of {', '.join(sorted(ROLES))}.")
    if not isinstance(content, str):
        raise UsageError(f"a message has the content {content!r}; it must be a text.")
    return {"role": ROLES[role], "content": content, **present}


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UsageError(f'"{name}" is {value!r}; it must be a list that is not empty.')
    return value


def _text(present: dict[str, Any], name: str = "turns") -> str:
    value = present.get(name)
    if not isinstance(value, str):
        raise UsageError(f'"{name}" is {"absent" if value is None else repr(value)}; it must be a text.')
    return value


def _numbered(source: str, settings: RecordSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    records = iter(_open(source, settings))
    for number in itertools.count(1):
        try:
            record = next(records, None)
        except UsageError:
            raise
        except Exception as error:  # pyarrow, json, the hub and others raise their own kinds
            if "utf-8" in str(error).lower():
                raise UsageError(
                    f"{source} is no UTF-8 text, at record {number} or after it ({error}); convert it to UTF-8."
                ) from error
            raise UsageError(
                f"{source} cannot be read, at record {number} or after it ({error}); repair it, or leave it out."
            ) from error
        if record is None:
            if number == 1:
                raise UsageError(f"{source} holds no records; give another source.")
            return
        yield f"{source}, record {number}", record


def _open(source: str, settings: RecordSettings) -> Iterable[dict[str, Any]]:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("Reading data needs the package `datasets`; run pip install 'blockdraft[train]'.") from error
    path, kind = Path(source), KINDS.get(Path(source).suffix)
    if not path.exists() and _names_file(source):
        raise UsageError(f"There is no {source}; give .jsonl, .json, .parquet or .txt files, or a dataset.")
    if path.is_file() and path.stat().st_size == 0:
        raise UsageError(f"{source} is empty; give another source.")
    if texts := _text_files(path):
        return map(_text_record, texts)
    if path.is_file() and kind is None:
        raise UsageError(f"{source} is of no known kind; give .jsonl, .json, .parquet or .txt files, or a dataset.")
    # No progress bars of its own and no warnings about the hub; errors say what is wrong.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        if path.is_file():
            # Streaming avoids a copy in the cache of `datasets`, which would double the disk space.
            dataset: Any = datasets.load_dataset(str(kind), data_files=str(path), split="train", streaming=True)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(source)
            dataset = dataset[settings.split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            # Records are read twice, so a whole dataset on the hub is better downloaded once.
            streaming = path.exists() or settings.limit is not None
            dataset = datasets.load_dataset(source, settings.subset, split=settings.split, streaming=streaming)
    except Exception as error:  # `datasets` raises many kinds
        raise UsageError(f"{source} cannot be read as a dataset: {error}") from error
    records: Iterable[dict[str, Any]] = dataset
    return records


def _names_file(source: str) -> bool:
    """Return whether a source is a file or folder, or looks like a missing one; else it is a hub name."""
    path = Path(source)
    # A name on the hub may have dots too, but there is no local folder of its first part.
    looks = path.suffix in (*KINDS, ".txt") or source.startswith((".", "~")) or path.is_absolute()
    return path.exists() or looks or (path.suffix != "" and path.parent.is_dir())


def _text_files(path: Path) -> list[Path]:
    """Return the file itself if it is a text file, the files of a folder of text files, else none."""
    files = sorted(path.rglob("*") if path.is_dir() else [path])
    files = [file for file in files if file.is_file()]
    return files if all(file.suffix == ".txt" for file in files) else []


def _text_record(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8."
        ) from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); check its permissions, or leave it out."
        ) from error
    return {"text": text}
