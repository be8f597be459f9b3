"""Rows of conversations or text, read by the `datasets` library from files, folders or the hub."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from blockdraft.data.settings import RowSettings
from blockdraft.errors import UsageError

Message: TypeAlias = dict[str, Any]
# A text, or the messages of a chat. An answer that is still to be written has the content None.
Row: TypeAlias = "str | list[Message]"

ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool")
}
ACCEPTED = (
    '{"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]}, {"prompt", "response"}, '
    '{"turns": ["prompt", ...]} or {"text"}'
)


def read_rows(sources: Sequence[str], settings: RowSettings) -> Iterator[tuple[str, Row]]:
    """Rows of all sources one after the other, each with the place it comes from.

    Args:
        sources: JSON, JSON-lines and Parquet files, folders of such files or of a saved dataset, names on the hub.

    Raises:
        ValueError: A source that cannot be read, or a row of no accepted form.
    """
    rows = itertools.chain.from_iterable(_numbered(source, settings) for source in sources)
    for place, raw in itertools.islice(rows, settings.limit):
        try:
            yield place, parse_row(raw, settings)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error


def parse_row(raw: dict[str, Any], settings: RowSettings) -> Row:
    """A row as a text or a chat. Fields that are None count as absent, as `datasets` fills them in.

    Raises:
        ValueError: It has none of the accepted forms.
    """
    held = {name: value for name, value in raw.items() if value is not None}
    if settings.text_field is not None:
        return _text(held, settings.text_field)
    prompt, response = settings.prompt_field or "prompt", settings.response_field or "response"
    if settings.prompt_field is None and settings.response_field is None:
        for name in ("messages", "conversations"):
            if name in held:
                return _chat(name, held[name])
        if "turns" in held:
            return [message for text in _list("turns", held["turns"]) for message in _pair(_text({"turns": text}))]
        if "prompt" not in held and "text" in held:
            return _text(held, "text")
    if prompt not in held:
        raise UsageError(
            f"it has the fields {sorted(raw)} and none that is needed ({ACCEPTED}); name its fields by --text-field, "
            f"or by --prompt-field and --response-field."
        )
    if response not in held and (settings.response_field is not None or "completion" in held):
        raise UsageError(f"it has the fields {sorted(held)} and no {response!r}; name it by --response-field.")
    return _pair(_text(held, prompt), _text(held, response) if response in held else None)


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
    held = {key: value for key, value in raw.items() if value is not None}
    role = held.pop("role", None) or held.pop("from", None)
    content = held.pop("content", None) if "content" in held else held.pop("value", None)
    if role not in ROLES:
        raise UsageError(f"a message has the role {role!r}; it must be one of {', '.join(sorted(ROLES))}.")
    if not isinstance(content, str):
        raise UsageError(f"a message has the content {content!r}; it must be a text.")
    return {"role": ROLES[role], "content": content, **held}


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UsageError(f'"{name}" is {value!r}; it must be a list that is not empty.')
    return value


def _text(held: dict[str, Any], name: str = "turns") -> str:
    value = held.get(name)
    if not isinstance(value, str):
        raise UsageError(f'"{name}" is {"absent" if value is None else repr(value)}; it must be a text.')
    return value


def _numbered(source: str, settings: RowSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = iter(_open(source, settings))
    for number in itertools.count(1):
        try:
            row = next(rows, None)
        except Exception as error:  # of pyarrow, of json, of the hub, ...
            raise UsageError(f"{source}, row {number} or one after it cannot be read: {error}") from error
        if row is None:
            if number == 1:
                raise UsageError(f"{source} holds no rows.")
            return
        yield f"{source}, row {number}", row


def _open(source: str, settings: RowSettings) -> Iterable[dict[str, Any]]:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("Reading data takes `datasets`; pip install 'blockdraft[train]' brings it.") from error
    path = Path(source)
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get((path.suffixes or [""])[-1])
    if path.suffix in (".gz", ".zst", ".bz2", ".xz"):
        kind = "json"
    if not path.exists() and (kind or path.is_absolute() or source.startswith(".")):
        raise UsageError(f"There is no {source}.")
    if path.is_file() and kind is None:
        raise UsageError(f"{source} is of no known kind; give .jsonl, .json or .parquet files, or a dataset.")
    # Not its own bars, and no warnings about the hub: errors say what is wrong.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        if path.is_file():
            # Streamed, as a copy in the cache of `datasets` would double the disk space.
            found: Any = datasets.load_dataset(str(kind), data_files=str(path), split="train", streaming=True)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(source)
            found = found[settings.split] if isinstance(found, datasets.DatasetDict) else found
        else:
            # What is on the hub is read twice, so a whole dataset is better downloaded once.
            streaming = path.exists() or settings.limit is not None
            found = datasets.load_dataset(source, settings.subset, split=settings.split, streaming=streaming)
    except Exception as error:  # there are many kinds
        raise UsageError(f"{source} cannot be read as a dataset: {error}") from error
    rows: Iterable[dict[str, Any]] = found
    return rows
