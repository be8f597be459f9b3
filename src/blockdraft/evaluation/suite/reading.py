"""Prompts of the sets, read from the hub or from a folder with copies of its datasets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from blockdraft.errors import Complaints, UsageError, describe
from blockdraft.evaluation.suite.paper import SHUFFLE_SEED, SUITES, Task, Turns

KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def chosen_tasks(suite: str, names: str | None) -> list[Task]:
    """Sets of a suite with these names, which commas separate; None is all. Raises a UsageError for unknown names."""
    if suite not in SUITES:
        raise UsageError(f"suite is {suite!r}; it must be {' or '.join(SUITES)}.")
    known = {task.name: task for task in SUITES[suite]}
    wanted = list(known) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise UsageError(f"tasks names {name!r}; it must be some of {','.join(known)}.")
    return [task for task in known.values() if task.name in wanted]


def read_tasks(tasks: Sequence[Task], folder: Path | None, limit: int | None) -> dict[str, list[Turns]]:
    """Read the prompts of all sets. Each call takes the same prompts in the same order, and none twice.

    Args:
        folder: Folder with the datasets, each in a folder of its name on the hub, with or without the owner; None asks
            the hub.
        limit: Most prompts of a set; None takes as many as the paper.

    Returns:
        Prompts by the name of their set.

    Raises:
        UsageError: Sets cannot be read, or lack columns; the message names all of them.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}; it must be at least 1.")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"suite_data is {folder}, which is no folder; give the one that holds the datasets.")
    complaints, found = Complaints(), dict[str, list[Turns]]()
    for task in tasks:
        with complaints.noting():
            found[task.name] = _taken(list(_prompts(task, folder)), task.samples if limit is None else limit)
    complaints.check()
    return found


def _taken(prompts: list[Turns], count: int) -> list[Turns]:
    """Prompts that are measured: shuffled by a seed if not all are wanted, as in the authors' benchmark."""
    if len(prompts) <= count:
        return prompts
    order = numpy.random.default_rng(SHUFFLE_SEED).permutation(len(prompts))  # as in datasets' `shuffle`
    return [prompts[place] for place in order[:count]]


def _prompts(task: Task, folder: Path | None) -> Iterator[Turns]:
    empty = True
    for source, records in _sources(task, folder):
        for number, record in enumerate(_safely(source, task, records), 1):
            empty = False
            yield _turns(task, record, source, number)
    if empty:
        raise UsageError(f"{task.title}: {folder or task.hub} holds no records of {task.hub}; {_fetch(task)}.")


def _turns(task: Task, record: Mapping[str, Any], source: str, number: int) -> Turns:
    for column in task.columns:
        names = (column,) if isinstance(column, str) else column
        if not any(name in record for name in names):
            raise UsageError(
                f"{task.title}: {source} has no column {' or '.join(map(repr, names))}, and "
                f"{', '.join(map(repr, record))} instead; {_fetch(task)}."
            )
    try:
        turns = task.turns(record)
    except TypeError:  # a column of another kind
        turns = ()
    if not turns or not all(isinstance(text, str) and text.strip() for text in turns):
        wrong = {name: record[name] for name in record if any(name in column for column in task.columns)}
        raise UsageError(f"{task.title}: record {number} of {source} asks nothing: {str(wrong)[:200]}; {_fetch(task)}.")
    return turns


def _sources(task: Task, folder: Path | None) -> Iterator[tuple[str, Iterable[Mapping[str, Any]]]]:
    """Files or datasets, with their records."""
    if folder is None:
        if task.files:
            files = [f"hf://datasets/{task.hub}/{file}" for file in task.files]
            yield task.hub, _load(task, task.hub, "json", data_files=files, split="train")
        else:
            yield task.hub, _load(task, task.hub, task.hub, task.subset, split=task.split)
        return
    for file in _files(task, folder):
        yield str(file), _load(task, str(file), KINDS[file.suffix], data_files=str(file), split="train")


def _files(task: Task, folder: Path) -> list[Path]:
    """Files of a dataset: those named after its split, or else all, in the folder of its subset if there is one."""
    places = [folder / task.hub, folder / task.hub.partition("/")[2]]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise UsageError(f"{task.title}: there is neither {places[0]} nor {places[1]}; {_fetch(task)}.")
    whole = place
    if task.subset is not None and (place / task.subset).is_dir():
        place = place / task.subset
    if task.files:
        lacking = [name for name in task.files if not (place / name).is_file()]
        if lacking:
            raise UsageError(f"{task.title}: {place} lacks {', '.join(lacking)}; {_fetch(task)}.")
        return [place / name for name in task.files]
    files = sorted(file for file in place.rglob("*") if file.suffix in KINDS and not _hidden(file, place))
    named = [file for file in files if file.name.startswith(task.split)] or files
    kinds = {file.suffix for file in named}
    if len(kinds) != 1:
        told = "no .parquet or .jsonl file" if not kinds else f"files of several kinds ({', '.join(sorted(kinds))})"
        raise UsageError(f"{task.title}: {whole} holds {told}; {_fetch(task)}.")
    return named


def _hidden(file: Path, place: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(place).parts)  # the hub's client keeps a .cache


def _load(task: Task, source: str, *given: Any, **named: Any) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("Reading the sets takes `datasets`; pip install 'blockdraft[train]' brings it.") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        records: Iterable[Mapping[str, Any]] = datasets.load_dataset(*given, **named, streaming=True)
    except Exception as error:  # datasets raises many kinds
        raise _unreadable(task, source, error) from error
    return records


def _safely(source: str, task: Task, records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    try:
        yield from records
    except UsageError:
        raise
    except Exception as error:  # of pyarrow, of json, of the hub, ...
        raise _unreadable(task, source, error) from error


def _unreadable(task: Task, source: str, error: Exception) -> UsageError:
    return UsageError(f"{task.title}: {source} cannot be read ({describe(error)}); {_fetch(task)}.")


def _fetch(task: Task) -> str:
    line = f"hf download --repo-type dataset {task.hub} --local-dir DIR/{task.hub}"
    return f"fetch it with `{line}` and add --suite-data DIR, or leave it out with --tasks"
