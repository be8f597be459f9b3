"""Records of files, folders, saved datasets and the hub, as they are: objects of JSON, or whole texts."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.text_files import refuse_pointer
from blockdraft_train.data.settings import RecordSettings
from blockdraft_train.data.token_data import MANIFEST

PATTERN = re.compile(r"[\[\]*?]|::")  # what fsspec reads as a pattern or as a chain of files
PARQUET_ROWS = 1000  # read at once
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
KINDS |= dict.fromkeys((".gz", ".zst", ".bz2", ".xz"), "json")
END = object()


def numbered(source: str, settings: RecordSettings) -> Iterator[tuple[str, Any]]:
    """Yield the raw records of a source, each with its place. A line that is no JSON is a UsageError instead."""
    records = iter(_open(source, settings))
    for number in itertools.count(1):
        try:
            record = next(records, END)
        except UsageError:
            raise
        except Exception as error:  # pyarrow, fsspec, the hub and others raise their own kinds
            if "utf-8" in str(error).lower():
                raise UsageError(
                    f"{source} is no UTF-8 text, at record {number} or after it ({error}); convert it to UTF-8."
                ) from error
            raise UsageError(
                f"{source} cannot be read, at record {number} or after it ({error}); repair it, or leave it out."
            ) from error
        if record is END:
            if number == 1:
                raise UsageError(f"{source} holds no records; give another source.")
            return
        yield f"{source}, record {number}", record


def _open(source: str, settings: RecordSettings) -> Iterable[Any]:
    path = Path(source)
    kind = KINDS.get(path.suffix.lower())
    if not path.exists() and names_file(source):
        raise UsageError(f"There is no {source}; give .jsonl, .json, .parquet or .txt files, or a dataset.")
    if path.is_file():
        refuse_pointer(path)
    if path.is_file() and path.stat().st_size == 0:
        raise UsageError(f"{source} is empty; give another source.")
    if (path / MANIFEST).is_file():
        raise UsageError(
            f"{source} holds tokens, not records: give it as --data to `blockdraft train`, `hidden-states` or `fit "
            "--init`."
        )
    if texts := _text_files(path):
        return map(_text_record, texts)
    if path.is_file() and kind is None:
        raise UsageError(f"{source} is of no known kind; give .jsonl, .json, .parquet or .txt files, or a dataset.")
    try:
        import datasets  # type: ignore[import-untyped]
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("Reading data needs the package `datasets`; run pip install datasets.") from error
    if path.is_file() and kind == "json":
        return _json_records(LocalFileSystem(), str(path.resolve()))
    if path.is_file():
        return map(_without_nulls, _parquet_records(path))
    if path.exists() and PATTERN.search(f"{path.resolve()}/{'/'.join(file.name for file in path.rglob('*'))}"):
        return _plainly_named(path, settings)
    # No progress bars of its own and no warnings about the hub; errors say what is wrong.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            dataset: Any = datasets.load_from_disk(source)
            dataset = dataset[settings.split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            # Records are read twice, so a whole dataset on the hub is better downloaded once.
            streaming = path.exists() or settings.limit is not None
            builder = datasets.load_dataset_builder(source, settings.subset)
            if path.is_dir():
                _refuse_files_of_no_split(path, builder.config.data_files or {})
            if builder.__module__.endswith(".json") and settings.split in (builder.config.data_files or ()):
                files = [str(file) for file in builder.config.data_files[settings.split]]
                files = files if streaming else datasets.DownloadManager().download_and_extract(files)
                return itertools.chain.from_iterable(_json_records(*url_to_fs(file)) for file in files)
            dataset = datasets.load_dataset(source, settings.subset, split=settings.split, streaming=streaming)
    except UsageError:
        raise
    except Exception as error:  # `datasets` raises many kinds
        refuse_pointer(path)
        raise UsageError(f"{source} cannot be read as a dataset: {error}") from error
    return map(_without_nulls, dataset)


def _refuse_files_of_no_split(folder: Path, files_of_splits: Mapping[str, Sequence[object]]) -> None:
    """Raise a UsageError if `datasets` would leave out a file of records of a folder without saying so.

    It takes a name such as `train.jsonl` as that of a split, and then reads files with such names alone.
    """
    if (folder / "README.md").exists():  # a card, which may name the files of several subsets
        return
    read = {Path(str(file)).resolve() for files in files_of_splits.values() for file in files}
    files = [file for file in sorted(folder.rglob("*")) if KINDS.get(file.suffix.lower()) and file.is_file()]
    left_out = [file.name for file in files if file.resolve() not in read and file.name != "dataset_infos.json"]
    if read and left_out:
        splits = ", ".join(map(str, files_of_splits))
        raise UsageError(
            f"{folder} has files named after splits ({splits}), and {', '.join(left_out)[:200]} would be left out; "
            "give the files one by one, or rename those of the splits."
        )


def _parquet_records(file: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=PARQUET_ROWS):
            yield from batch.to_pylist()


def _plainly_named(folder: Path, settings: RecordSettings) -> Iterator[Any]:
    """Yield the records of a folder through links whose names have no characters that fsspec reads as patterns."""
    with TemporaryDirectory() as plain:
        for number, file in enumerate(sorted(folder.rglob("*"))):
            if file.is_file():
                names = [PATTERN.sub("_", part) for part in file.relative_to(folder).parts]
                place = Path(plain, *names)
                place = place.with_name(f"{number}-{place.name}") if place.exists() else place
                place.parent.mkdir(parents=True, exist_ok=True)
                try:
                    place.symlink_to(file.resolve())
                except OSError:  # Windows allows links to some users only
                    shutil.copy(file, place)
        yield from _open(plain, settings)


def _json_records(files: Any, file: str) -> Iterator[Any]:
    """Yield the values of a JSON-lines file, or of a JSON array. A line that is no JSON is yielded as a UsageError.

    `datasets` would add the missing fields of nested objects as nulls, and turn texts such as dates into other types.

    Args:
        files: Filesystem of fsspec, which holds the file. Unlike `fsspec.open`, it reads no pattern in the name.
    """

    def values(text: bytes) -> list[Any]:
        value = json.loads(text)
        return value if isinstance(value, list) else [value]

    with files.open(file, "rb", compression="infer") as opened:
        first = opened.readline().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        lines: Iterable[bytes] = itertools.chain([first], opened)
        try:
            json.loads(first)
        except (ValueError, RecursionError):  # several lines make one value, or the line is wrong
            whole = first + opened.read()
            try:
                yield from values(whole)
                return
            except (ValueError, RecursionError):
                lines = whole.splitlines()
        for line in lines:
            try:
                yield from values(line) if line.strip() else ()
            except UnicodeDecodeError:
                raise
            except (ValueError, RecursionError) as error:
                yield UsageError(f"it is no JSON ({error}).")


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are None, which Parquet files add to objects with other fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def names_file(source: str) -> bool:
    """Return whether a source is a file or folder, or looks like a missing one; else it is a hub name."""
    path = Path(source)
    # A name on the hub may have dots too, but there is no local folder of its first part.
    looks = path.suffix.lower() in (*KINDS, ".txt") or source.startswith((".", "~")) or path.is_absolute()
    return path.exists() or looks or (path.suffix != "" and path.parent.is_dir())


def _text_files(path: Path) -> list[Path]:
    """Return the file itself if it is a text file, the files of a folder of text files, else none."""
    files = sorted(path.rglob("*") if path.is_dir() else [path])
    files = [file for file in files if file.is_file()]
    return files if all(file.suffix.lower() == ".txt" for file in files) else []


def _text_record(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8."
        ) from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); check its permissions, or leave it out."
        ) from error
    return {"text": text}
