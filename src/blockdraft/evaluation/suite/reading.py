"""Prompts of a suite, read from the hub or from a folder with copies of its datasets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from blockdraft.errors import Complaints, UsageError, describe
from blockdraft.evaluation.suite.paper import PAPER, SHUFFLE_SEED, Task, Turns

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
Records = Iterable[Mapping[str, Any]]


def chosen_tasks(names: str | None) -> list[Task]:
    """Return the paper's tasks with these comma-separated names, or all of them.

    Raises:
        UsageError: A name is unknown.
    """
    known = {task.name: task for task in PAPER}
    wanted = list(known) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise UsageError(f"tasks must be some of {','.join(known)}, got {name!r}.")
    return [task for task in known.values() if task.name in wanted]


def read_tasks(tasks: Sequence[Task], folder: Path | None, limit: int | None) -> dict[str, list[Turns]]:
    """Read the prompts of each task, by its name. Every call returns the same prompts in the same order.

    Args:
        folder: Folder with the datasets, each in a folder with its name on the hub, with or without the owner. None
            loads them from the hub.
        limit: Maximum number of prompts per task; None takes as many as the paper.

    Raises:
        UsageError: Datasets cannot be read, or lack columns; the message lists all problems.
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"suite_data is {folder}, which is no folder; give the one that holds the datasets.")
    complaints, prompts = Complaints(), dict[str, list[Turns]]()
    for task in tasks:
        with complaints.noting():
            prompts[task.name] = _sampled(list(_prompts(task, folder)), task.samples if limit is None else limit)
    complaints.check()
    return prompts


def _sampled(prompts: list[Turns], count: int) -> list[Turns]:
    """Return the prompts to measure: shuffled as in the authors' benchmark, unless all are taken."""
    if len(prompts) <= count:
        return prompts
    order = numpy.random.default_rng(SHUFFLE_SEED).permutation(len(prompts))  # as `shuffle` of datasets
    return [prompts[i] for i in order[:count]]


def _prompts(task: Task, folder: Path | None) -> Iterator[Turns]:
    count = 0
    for source, records in _sources(task, folder):
        try:
            for number, record in enumerate(records, 1):
                count += 1
                yield _turns(task, record, source, number)
        except UsageError:
            raise
        except Exception as error:  # from pyarrow, json, the hub
            raise _problem(task, f"{source} cannot be read ({describe(error)})") from error
    if not count:
        raise _problem(task, f"{folder or task.hub} holds no records of {task.hub}")


def _turns(task: Task, record: Mapping[str, Any], source: str, number: int) -> Turns:
    try:
        turns = task.turns(record)
    except KeyError as error:
        raise _problem(task, f"{source} has no column {error}, and {', '.join(map(repr, record))} instead") from error
    except TypeError:  # a column of another type
        turns = ()
    if not turns or not all(isinstance(text, str) and text.strip() for text in turns):
        raise _problem(task, f"record {number} of {source} asks nothing: {str(dict(record))[:200]}")
    return turns


def _sources(task: Task, folder: Path | None) -> Iterator[tuple[str, Records]]:
    """Yield the files or datasets of a task, with their records."""
    if folder is not None:
        for file in _files(task, folder):
            yield str(file), _load(task, str(file), FORMATS[file.suffix], data_files=str(file), split="train")
    elif task.files:  # a dataset that the library cannot open by its name
        files = [f"hf://datasets/{task.hub}/{file}" for file in task.files]
        yield task.hub, _load(task, task.hub, "json", data_files=files, split="train")
    else:
        yield task.hub, _load(task, task.hub, task.hub, task.subset, split=task.split)


def _files(task: Task, folder: Path) -> list[Path]:
    """Return the files of a dataset: those named after its split, or else all, in the folder of its subset if any."""
    places = [folder / task.hub, folder / task.hub.partition("/")[2]]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise _problem(task, f"there is neither {places[0]} nor {places[1]}")
    if task.files:
        missing = [name for name in task.files if not (place / name).is_file()]
        if missing:
            raise _problem(task, f"{place} lacks {', '.join(missing)}")
        return [place / name for name in task.files]
    inside = place / (task.subset or "")
    inside = inside if inside.is_dir() else place
    files = sorted(file for file in inside.rglob("*") if file.suffix in FORMATS)
    # The hub's client keeps a folder .cache beside the files.
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(inside).parts)]
    files = [file for file in files if file.name.startswith(task.split)] or files
    formats = sorted({file.suffix for file in files})
    if len(formats) != 1:
        held = f"files of several kinds ({', '.join(formats)})" if formats else "no .parquet or .jsonl file"
        raise _problem(task, f"{place} holds {held}")
    return files


def _load(task: Task, source: str, *args: Any, **kwargs: Any) -> Records:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("The suite needs the package `datasets`; run pip install 'blockdraft[train]'.") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        records: Records = datasets.load_dataset(*args, **kwargs, streaming=True)
    except Exception as error:  # any kind
        raise _problem(task, f"{source} cannot be read ({describe(error)})") from error
    return records


def _problem(task: Task, what: str) -> UsageError:
    command = f"hf download --repo-type dataset {task.hub} --local-dir DIR/{task.hub}"
    return UsageError(
        f"{task.title}: {what}; fetch it with `{command}` and add --suite-data DIR, or leave it out with --tasks."
    )
